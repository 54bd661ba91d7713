"""What workers tell of a prompt and of an attempt, on every way out. In virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from splitwave.core.errors import ServingError
from splitwave.core.session import Cancel, Ended
from splitwave.engine.sim import RankDeath, RankPause, SimFaults
from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing_files import SpanRecord
from splitwave.runtime.wave_spans import WAVE_SEGMENT
from tests.sim.virtual_loop import run
from tests.unit.hand_router import HandRouter
from tests.unit.traced import Kept
from tests.unit.worker_rig import DECODE, DECODE_CONFIG, GREEDY, PREFILL, Rig, rig

PROMPT = list(range(40, 60))
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01"
LONG = replace(GREEDY, max_tokens=500)


class Told:
    """The spans of one test, by name."""

    def __init__(self, kept: Kept) -> None:
        told = list(kept.spans())
        self.spans = [span for span in told if span.name != WAVE_SEGMENT]
        self.waves = {span.span_id: span for span in told if span.name == WAVE_SEGMENT}
        self.by_name = {span.name: span for span in self.spans}

    def __getitem__(self, name: str) -> SpanRecord:
        return self.by_name[name]

    def took_s(self, name: str) -> float:
        return (self[name].ended_ns - self[name].began_ns) / 1e9

    def errors(self) -> dict[str, object]:
        """Reasons of the failed spans, by name."""
        return {s.name: s.attributes["error.type"] for s in self.spans if s.status == "error"}


def told_of(scenario: Callable[[Rig], Awaitable[None]], **settings: object) -> Told:
    """Run a scenario on traced workers, close them, and return what they told."""
    kept = Kept()

    async def main() -> None:
        async with rig(kept=kept, **settings) as r:  # type: ignore[arg-type]  # its keywords
            r.traceparent = SAMPLED
            await scenario(r)

    run(main())
    return Told(kept)


async def started(r: Rig, sampling: object = LONG) -> HandRouter:
    """An attempt under way at the decode worker."""
    router = HandRouter()
    r.connect(router)
    await r.start_one(router, "r/0/1", PROMPT, sampling)  # type: ignore[arg-type]  # Sampling
    return router


# Prefill.


def test_a_prompt_s_time_is_split_into_queue_and_compute_and_its_lease_stands_below() -> None:
    async def scenario(r: Rig) -> None:
        await r.prefill_one("h", PROMPT)
        await asyncio.sleep(2.0)
        r.prefill.release("h", SAMPLED)

    told = told_of(scenario, prefill=replace(PREFILL, step_fixed_s=0.5))

    serve, lease = told[names.PREFILL_SERVE], told[names.LEASE]
    assert (serve.trace_id, serve.parent_id) == (TRACE_ID, SPAN_ID)
    assert serve.attributes["splitwave.prompt_tokens"] == 20
    assert (serve.attributes[names.REQUEST_ID], serve.attributes["splitwave.rank"]) == ("h", 0)
    assert {span.parent_id for span in told.spans if span is not serve} == {serve.span_id}
    assert told.took_s(names.PREFILL_QUEUE) == 0.0
    assert told.took_s(names.PREFILL_COMPUTE) == pytest.approx(0.5, abs=0.01)
    assert told.took_s(names.LEASE) == pytest.approx(2.0, abs=0.01)
    assert [event.name for event in lease.events] == ["released"]
    assert lease.links == (SPAN_ID,), "of whoever released it"


@pytest.mark.parametrize("end", ["pulled", "released", "expired", "closed"])
def test_a_lease_says_how_it_ended(end: str) -> None:
    async def scenario(r: Rig) -> None:
        result = await r.prefill_one("h", PROMPT)
        assert result.handoff is not None
        match end:
            case "pulled":
                await r.peers.confirm(result.handoff, SAMPLED)
            case "released":
                await r.peers.release(result.handoff, SAMPLED)
            case "expired":
                await asyncio.sleep(PREFILL.lease_ttl_s)

    told = told_of(scenario)

    assert told[names.LEASE].attributes == {names.LEASE_END: end, "splitwave.blocks": 2}
    assert told[names.LEASE].links == ((SPAN_ID,) if end in ("pulled", "released") else ())


def test_a_prompt_whose_caller_leaves_ends_as_cancelled() -> None:
    async def scenario(r: Rig) -> None:
        call = asyncio.create_task(r.prefill_one("h", PROMPT))
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.wait([call])

    told = told_of(scenario, prefill=replace(PREFILL, step_fixed_s=0.5))

    cancelled = dict.fromkeys([names.PREFILL_SERVE, names.PREFILL_COMPUTE], "cancelled")
    assert told.errors() == cancelled
    assert names.LEASE not in told.by_name


def test_prompts_at_an_engine_that_dies_end_as_lost() -> None:
    async def scenario(r: Rig) -> None:
        with pytest.raises(ServingError):
            await r.prefill_one("h", PROMPT)

    faults = SimFaults(death=RankDeath(rank=0, at_step=1))
    told = told_of(scenario, prefill=replace(PREFILL, faults=faults))

    assert told[names.PREFILL_SERVE].attributes["error.type"] == "worker_lost"


# Decode.


def test_an_attempt_goes_from_its_pull_over_the_fence_to_its_tokens() -> None:
    async def scenario(r: Rig) -> None:
        r.peers.delay_s = 0.05
        router = await started(r, GREEDY)
        await router.heard["r/0/1"].over.wait()

    told = told_of(scenario, decode=replace(DECODE, step_fixed_s=0.02))

    serve = told[names.DECODE_SERVE]
    assert (serve.trace_id, serve.parent_id, serve.status) == (TRACE_ID, SPAN_ID, "unset")
    facts = serve.attributes
    assert (facts["splitwave.end"], facts["splitwave.offset"], facts["splitwave.tokens"]) == (
        "length", 1, 7,
    )  # fmt: skip
    pull, fence, tokens = (told[x] for x in (names.HANDOFF, names.CONFIRM, names.TOKENS))
    assert pull.attributes["splitwave.handoff.bytes"] == 2 * DECODE.block_bytes
    assert (pull.began_ns, pull.ended_ns) == (serve.began_ns, fence.began_ns)
    assert (fence.ended_ns, tokens.ended_ns) == (tokens.began_ns, serve.ended_ns)
    assert told.took_s(names.CONFIRM) == pytest.approx(0.05, abs=0.001)
    assert told[names.LEASE].attributes[names.LEASE_END] == "pulled"
    assert told.errors() == {}


def test_an_attempt_that_is_cancelled_says_where_it_stood() -> None:
    async def scenario(r: Rig) -> None:
        router = await started(r)
        await asyncio.sleep(0.5)
        assert len(router.heard["r/0/1"].token_ids) > 3
        r.sessions[0].cancel()
        await asyncio.sleep(DECODE_CONFIG.reattach_s + 1.0)

    told = told_of(scenario, decode=replace(DECODE, step_fixed_s=0.02))

    assert told.errors() == dict.fromkeys([names.DECODE_SERVE, names.TOKENS], "cancelled")
    assert [event.name for event in told[names.DECODE_SERVE].events] == ["last_token"]


def test_an_attempt_that_stalls_says_when_its_last_token_came() -> None:
    async def scenario(r: Rig) -> None:
        router = await started(r)
        await router.heard["r/0/1"].over.wait()

    pause = SimFaults(pauses=(RankPause(rank=0, at_step=30, pause_s=20.0),))
    told = told_of(scenario, decode=replace(DECODE, step_fixed_s=0.02, faults=pause))

    serve = told[names.DECODE_SERVE]
    assert serve.attributes["error.type"] == "stalled"
    (last,) = serve.events
    assert 9.9 < (serve.ended_ns - last.at_ns) / 1e9 < 11.0


def test_a_pull_that_fails_ends_the_attempt_there() -> None:
    async def scenario(r: Rig) -> None:
        router = await started(r)
        await router.heard["r/0/1"].over.wait()

    told = told_of(scenario, decode=replace(DECODE, faults=SimFaults(pull_failure_rate=1.0)))

    assert told.errors() == dict.fromkeys([names.DECODE_SERVE, names.HANDOFF], "handoff_failed")
    assert names.CONFIRM not in told.by_name


def test_a_fence_that_says_no_ends_the_attempt_there() -> None:
    async def scenario(r: Rig) -> None:
        router = await started(r)
        await router.heard["r/0/1"].over.wait()

    slow = SimFaults(pull_delay_rate=1.0, pull_delay_s=5.0)
    told = told_of(
        scenario,
        prefill=replace(PREFILL, lease_ttl_s=3.0),
        decode=replace(DECODE, faults=slow),
    )

    assert told.errors() == dict.fromkeys([names.DECODE_SERVE, names.CONFIRM], "handoff_expired")
    assert names.TOKENS not in told.by_name
    assert told[names.LEASE].attributes[names.LEASE_END] == "expired"


def test_a_line_about_an_attempt_carries_its_ids(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(r: Rig) -> None:
        r.peers.lost_calls = 1
        router = await started(r)
        await router.heard["r/0/1"].over.wait()

    told_of(scenario)

    (record,) = [x for x in caplog.records if x.getMessage().startswith("fence: ")]
    assert (vars(record)["request_id"], vars(record)["trace_id"]) == ("r", TRACE_ID)


@pytest.mark.parametrize("traceparent", ["", SAMPLED[:-1] + "0", "nonsense", "00-0-0-01"])
def test_without_a_sampled_trace_nothing_is_told(traceparent: str) -> None:
    async def scenario(r: Rig) -> None:
        r.traceparent = traceparent
        router = await started(r, GREEDY)
        await router.heard["r/0/1"].over.wait()

    assert told_of(scenario).spans == []


# Waves.


def test_an_attempt_and_the_segments_of_its_first_and_last_step_link_to_each_other() -> None:
    ended: list[Ended] = []

    async def scenario(r: Rig) -> None:
        router = await started(r, replace(GREEDY, max_tokens=300))
        heard = router.heard["r/0/1"]
        await heard.over.wait()
        assert heard.ended is not None
        ended.append(heard.ended)

    told = told_of(scenario, decode=replace(DECODE, step_fixed_s=0.05))  # 15 s: it is cut once.

    links = told[names.DECODE_SERVE].links
    first, last = (told.waves[link] for link in links)
    assert [first.attributes["splitwave.wave.segment_number"],
            last.attributes["splitwave.wave.segment_number"]] == [1, 2]  # fmt: skip
    assert [SPAN_ID in wave.links for wave in (first, last)] == [True, True]
    assert [link[36:52] for link in ended[0].waves] == list(links)


def test_a_prompt_and_its_wave_link_to_each_other() -> None:
    waves: list[str] = []

    async def scenario(r: Rig) -> None:
        await asyncio.sleep(1.0)
        result = await r.prefill_one("h", PROMPT)
        waves.extend(result.waves)

    told = told_of(scenario)

    (link,) = told[names.PREFILL_SERVE].links
    assert told.waves[link].links == (SPAN_ID,)
    assert [wave[36:52] for wave in waves] == [link]


def test_an_attempt_that_is_cancelled_links_to_the_wave_that_it_was_in() -> None:
    async def scenario(r: Rig) -> None:
        router = await started(r)
        await asyncio.sleep(1.0)
        router.send(Cancel(("r/0/1",)))
        await asyncio.sleep(0.5)

    told = told_of(scenario)

    (link,) = told[names.DECODE_SERVE].links
    assert told.waves[link].links == (SPAN_ID,)
