"""What both workers do from a step outside the mode on: hold, be judged, drain, end the epoch."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from services.worker.group_guard import VIOLATION_SPAN, Decertified
from splitwave.core.errors import Reason, ServingError
from splitwave.core.mode_guard import Action, Standing
from splitwave.core.session import AskGrant
from splitwave.core.worker import Role
from splitwave.engine.sim import SimFaults
from splitwave.engine.sim.odd_step import OddSteps
from splitwave.runtime.engine_metrics import RENEWED_EVERY_S
from tests.sim.virtual_loop import run
from tests.unit.hand_router import HandRouter
from tests.unit.traced import Kept
from tests.unit.worker_rig import (
    DECODE,
    DECODE_CONFIG,
    GREEDY,
    PREFILL,
    PREFILL_CONFIG,
    Rig,
    rig,
    right_answer,
)

PROMPT = list(range(40, 60))
LONG = replace(GREEDY, max_tokens=40)
ODD = SimFaults(out_of_mode_step=5)


@asynccontextmanager
async def violated(
    patience_s: float = 1000.0, kept: Kept | None = None
) -> AsyncIterator[tuple[Rig, HandRouter]]:
    """A decode worker whose group has run one odd step while it served a request to its end."""
    config = replace(DECODE_CONFIG, decertified_patience_s=patience_s)
    async with rig(decode=replace(DECODE, faults=ODD), decode_config=config, kept=kept) as r:
        router = HandRouter()
        r.connect(router)
        heard = await r.start_one(router, "a/0", PROMPT, LONG)
        await heard.over.wait()
        assert heard.token_ids == right_answer(PROMPT, LONG)
        yield r, router


def test_a_decertified_worker_takes_no_new_work_and_finishes_what_it_has() -> None:
    async def main() -> None:
        async with violated() as (r, router):
            assert r.decode.load().standing is Standing.DECERTIFIED
            assert r.decode.load().draining
            assert not r.decode.healthy()
            described = await r.decode.describe(counters=True)
            assert described.uncertified
            (violation,) = described.certification.violations
            assert (violation.step, violation.kind, violation.tokens) == (5, "odd", 1)
            assert violation.requests[0].engine_request_id.startswith("a/0#")
            router.send(AskGrant("new", 1, 5.0))
            await asyncio.sleep(0.1)
            assert router.ask_refusals["new"].reason is Reason.WORKER_DRAINING

    run(main())


def test_a_worker_that_is_told_to_serve_on_takes_work_again() -> None:
    async def main() -> None:
        async with violated() as (r, router):
            epoch = r.decode.group.epoch
            assert r.decode.guard.judge(epoch, Action.SERVE_ON, "no room") is Standing.DEGRADED
            heard = await r.start_one(router, "b/0", PROMPT)
            await heard.over.wait()
            assert heard.token_ids == right_answer(PROMPT, GREEDY)
            assert r.decode.guard.judge(epoch, Action.DRAIN, "late") is Standing.DEGRADED
            assert r.decode.load().standing is Standing.DEGRADED

    run(main())


def test_a_judgement_of_another_epoch_is_refused() -> None:
    async def main() -> None:
        async with violated() as (r, _):
            with pytest.raises(ServingError) as refused:
                r.decode.guard.judge(r.decode.group.epoch + 1, Action.DRAIN, "")
            assert refused.value.reason is Reason.EPOCH_MISMATCH
            assert r.decode.load().standing is Standing.DECERTIFIED

    run(main())


@pytest.mark.parametrize("judged", [True, False])
def test_a_worker_that_is_told_to_drain_or_told_nothing_ends_its_epoch(judged: bool) -> None:
    async def main() -> None:
        async with violated(1000.0 if judged else 3.0) as (r, _):
            began_s = r.now_s()
            if judged:
                r.decode.guard.judge(r.decode.group.epoch, Action.DRAIN, "one of eight")
            ended = asyncio.gather(r.decode_runs, return_exceptions=True)
            (error,) = await asyncio.wait_for(ended, 60.0)
            assert isinstance(error, Decertified)
            assert "rank 0 ran its step 5 as odd" in str(error)
            assert judged == (r.now_s() - began_s < 2.9)
            r.decode_runs = asyncio.create_task(asyncio.sleep(0))

    with pytest.raises(AssertionError, match="a worker ended by itself"):
        run(main())


def test_the_violating_step_stands_in_the_trace_with_ids_and_lengths_and_no_text() -> None:
    async def main() -> None:
        kept = Kept()
        async with violated(kept=kept):
            (span,) = [span for span in kept.spans() if span.name == VIOLATION_SPAN]
        about = span.attributes
        assert (about["splitwave.step"], about["splitwave.step.kind"]) == (5, "odd")
        assert about["splitwave.standing"] == "decertified"
        assert about["splitwave.mode"] == "decode_cpu_eager"
        assert list(about["splitwave.step.lengths"]) == ["23"]  # type: ignore[call-overload]  # texts

    run(main())


def test_a_prefill_worker_holds_and_serves_on_likewise() -> None:
    async def main() -> None:
        config = replace(PREFILL_CONFIG, decertified_patience_s=1000.0)
        async with rig(replace(PREFILL, faults=ODD), prefill_config=config) as r:
            for n in range(5):
                await r.prefill_one(f"p/{n}", PROMPT)
            guard = r.prefill.guard
            assert guard.standing is Standing.DECERTIFIED
            with pytest.raises(ServingError) as refused:
                await r.prefill_one("p/9", PROMPT)
            assert refused.value.reason is Reason.WORKER_DRAINING
            assert (await r.prefill.describe(counters=False)).role is Role.PREFILL
            guard.judge(r.prefill.group.epoch, Action.SERVE_ON, "no room")
            assert (await r.prefill_one("p/10", PROMPT)).handoff is not None

    run(main())


@pytest.mark.parametrize("role", Role)
def test_a_step_that_its_rank_only_counted_is_found_without_a_scrape(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OddSteps, "take", lambda _: ())  # No report of it arrives.

    async def main() -> None:
        decode = replace(DECODE, faults=ODD) if role is Role.DECODE else DECODE
        prefill = replace(PREFILL, faults=ODD) if role is Role.PREFILL else PREFILL
        async with rig(prefill, decode=decode) as r:
            worker = r.decode if role is Role.DECODE else r.prefill
            if role is Role.PREFILL:
                for n in range(5):
                    await r.prefill_one(f"p/{n}", PROMPT)
            else:
                router = HandRouter()
                r.connect(router)
                await (await r.start_one(router, "a/0", PROMPT, LONG)).over.wait()
            assert worker.guard.takes_work, "nobody has told of it yet"
            await asyncio.sleep(RENEWED_EVERY_S + 1.0)
            assert worker.guard.standing is Standing.DECERTIFIED
            (violation,) = worker.guard.certification.violations
            assert violation.kind == "odd"

    run(main())
