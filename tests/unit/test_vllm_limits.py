"""Work outside the envelope, sent to the front that real groups have: refused for what is wrong."""

import contextlib
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any  # a rig and an engine that are none

import pytest

from splitwave.certify.battery import limits
from splitwave.certify.battery.bench import Bench
from splitwave.certify.battery.drive import Flight
from splitwave.certify.battery.limits import OverEnvelope, reasons_of
from splitwave.certify.battery.verdict import CheckBroken
from splitwave.core.generation import FinishReason
from splitwave.engine.port import EngineRequest, GroupDescription, Held, RequestOutput, Role
from splitwave.engine.vllm.probe.breaks import Break
from splitwave.engine.vllm.probe.client import Probe, Step
from splitwave.engine.vllm.requests import Preparation, RefusedRequest
from tests.unit.test_certify_campaign import envelope, subject
from tests.unit.test_certify_judges import SCALE

GROUP = GroupDescription(
    group_id="g", epoch=1, role=Role.DECODE, mode="decode_cpu_eager", model="m", ranks=2,
    block_size_tokens=32, blocks_per_rank=64, seats_per_rank=64, model_len_max_tokens=64,
    batch_max_tokens=64, block_bytes=1, kv_layout="k",
)  # fmt: skip


class Target:
    """A group of one step a request, behind the checks of the real front."""

    def __init__(self, role: Role) -> None:
        self.description = SimpleNamespace(
            **{name: getattr(GROUP, name) for name in ("ranks", "model_len_max_tokens")}, role=role
        )
        checks: Any = Preparation(
            self.description,  # type: ignore[arg-type]  # what the checks need of it
            SimpleNamespace(get_vocab_size=lambda: 300),
        )

        def prepare(request: EngineRequest) -> EngineRequest:
            checks._check_contract(request)  # noqa: SLF001  # without vLLM's own parameters
            checks._check_tokens(request)  # noqa: SLF001  # likewise
            return request

        engine: Any = SimpleNamespace(description=self.description, _prepare=prepare)
        self.engine = engine
        self.probe = Probe(engine)
        self.steps = 0
        self.took: list[int] = []
        self.blocks_used = 0
        self.at_once: list[int] = []
        """Sizes of the crowds that came."""
        self.given_up: list[str] = []
        self.loses = 0
        """Requests that come next and of which nobody hears."""
        self.mended: list[Break] = []
        self.wide, self.limit, self.heeds_limits = 8, 10**6, True
        self.gives = 0
        """Tokens by which a crowd's requests end early."""
        for name in ("steps", "start_break", "end_break"):  # There is no process to ask.
            vars(self.probe)[name] = getattr(self, f"_{name}")

    @property
    def prepares(self) -> Any:
        return vars(self.engine)["_prepare"]

    async def _steps(self, rank: int, since: int = 0) -> list[Step]:
        return [Step(1, min(self.wide, self.limit), 0.1, 0.0)]

    async def _start_break(self, what: Break, rank: int, argument: float) -> None:
        if what is Break.NARROW:
            self.limit = int(argument) if self.heeds_limits else self.limit
        else:
            assert (what, rank) == (Break.LOSE_REQUEST, 1)
            self.loses = 1

    async def _end_break(self, what: Break, rank: int) -> None:
        self.mended.append(what)
        self.limit = 10**6

    async def start(self, *requests: EngineRequest) -> list[Flight]:
        self.at_once.append(len(requests))
        flights = [Flight() for _ in requests]
        lost, self.loses = self.loses, 0
        for request, flight in list(zip(requests, flights, strict=True))[lost:]:
            ids = [5] * (request.sampling.max_tokens - self.gives)
            flight.outputs.append(
                RequestOutput(engine_request_id="x", token_ids=ids, finish=FinishReason.LENGTH)
            )
            flight.ended.set()
        return flights

    async def counters(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(blocks_used=self.blocks_used) for _ in range(2)]

    async def abort(self, names: Sequence[str]) -> None:
        self.given_up += names

    async def last_step(self, rank: int) -> int:
        return self.steps

    async def run(self, request: EngineRequest) -> Flight:
        try:
            prepared = self.prepares(request)
        except RefusedRequest as refused:
            output = RequestOutput(
                engine_request_id="x", token_ids=[], failure=refused.reason, failure_message="no"
            )
            return Flight(outputs=[output])
        self.steps += 1
        self.took.append(len(prepared.token_ids))
        return Flight(outputs=[RequestOutput(engine_request_id="x", token_ids=[5])])


def bench(role: Role) -> tuple[Bench, Target, list[str]]:
    target, released = Target(role), list[str]()

    async def hold(name: str, ids: Sequence[int], *more: object) -> Flight:
        held = Held(remote_tokens=len(ids), connector_params=b"{}", block_count=1, expires_at_s=9.0)
        return Flight(outputs=[RequestOutput(engine_request_id=name, token_ids=[7], held=held)])

    async def release(names: Sequence[str]) -> None:
        released.extend(names)

    numbers = itertools.count()
    prefill = SimpleNamespace(
        engine=SimpleNamespace(release=release),
        description=SimpleNamespace(ranks=1, blocks_per_rank=128),
    )
    rig: Any = SimpleNamespace(
        role=role, target=target, hold=hold, ranks=lambda: range(2), prefill=prefill,
        name=lambda word: f"{word}/{next(numbers)}",
    )  # fmt: skip
    of = subject(role.value, envelope(60, 64, 60))
    return Bench(subject=of, scale=SCALE, rig=rig), target, released


@pytest.mark.parametrize("role", list(Role))
async def test_each_bad_request_is_refused_for_what_is_wrong_with_it(role: Role) -> None:
    on, target, released = bench(role)

    seen = await OverEnvelope().observe(on)

    assert {row["why"]: row["reason"] for row in seen["refusals"]} == reasons_of(role)
    assert OverEnvelope().judge(seen, on.subject, SCALE).passed
    assert len(released) == (4 if role is Role.DECODE else 0)
    assert target.took == []


@pytest.mark.parametrize(("role", "cut_to"), [(Role.PREFILL, 8), (Role.DECODE, 9)])
async def test_a_front_that_cuts_a_long_prompt_is_noticed_and_mended(
    role: Role, cut_to: int
) -> None:
    on, target, released = bench(role)
    check, before = OverEnvelope(), target.prepares
    on.widest_step_tokens = 8

    verdict = check.judge(await check.observe_broken(on), on.subject, SCALE)

    assert target.took == [cut_to]
    assert len(released) == (3 + 1 if role is Role.DECODE else 0), "and of the crowd the lost one"
    assert all(verdict.shows(code) for code in check.shows)
    assert target.prepares is before


@pytest.mark.parametrize("role", list(Role))
async def test_one_of_a_crowd_that_is_lost_is_noticed_and_let_go(role: Role) -> None:
    on, target, released = bench(role)
    check = OverEnvelope()
    on.widest_step_tokens = 8

    verdict = check.judge(await check.observe_broken(on), on.subject, SCALE)

    assert verdict.figures["lost"] == len(target.given_up) == 1
    assert verdict.shows("lost")
    assert (target.given_up[0] in released) is (role is Role.DECODE)
    assert target.mended == [Break.LOSE_REQUEST, Break.NARROW, Break.NARROW]


async def test_a_step_over_the_cap_is_caught_for_the_limit_that_was_taken_away_alone() -> None:
    on, target, _ = bench(Role.DECODE)
    check = OverEnvelope()
    seen = await check.observe(on)
    assert not check.judge(seen, on.subject, SCALE).shows("crowd")

    broken = await check.observe_broken(on)

    assert (broken["cap_tokens"], broken["largest_step_tokens"]) == (7, 8)
    assert check.judge(broken, on.subject, SCALE).shows("crowd")
    assert target.limit > 8, "taken back"
    target.heeds_limits = False
    with pytest.raises(CheckBroken, match="a step had 8 tokens under a limit of 7"):
        await check.observe_broken(on)


async def test_a_group_of_one_seat_has_no_narrower_limit_and_is_held_to_less() -> None:
    on, target, _ = bench(Role.DECODE)
    target.wide = 1
    check = OverEnvelope()
    await check.observe(on)

    broken = await check.observe_broken(on)

    assert (broken["cap_tokens"], broken["largest_step_tokens"]) == (0, 1)


async def test_a_crowd_comes_at_once_as_far_as_prefill_can_hold_it() -> None:
    on, target, _ = bench(Role.DECODE)

    seen = await OverEnvelope().observe(on)

    assert (seen["crowd"], seen["served"]) == (256, 256)
    assert target.at_once == [64] * 4


async def test_requests_of_a_crowd_that_end_early_are_not_served() -> None:
    on, target, _ = bench(Role.PREFILL)
    target.gives = 1

    verdict = OverEnvelope().judge(await OverEnvelope().observe(on), on.subject, SCALE)

    assert [problem.code for problem in verdict.problems] == ["lost"]
    assert target.given_up == []


async def test_a_crowd_that_engines_work_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ANSWER_TIMEOUT_S", 1.0)
    on, target, _ = bench(Role.PREFILL)
    target.blocks_used, target.loses = 3, 1

    with pytest.raises(CheckBroken, match="1 requests of a crowd"):
        await OverEnvelope().observe(on)


async def test_a_front_is_mended_though_the_control_breaks_off() -> None:
    target = Target(Role.PREFILL)
    before = target.prepares

    with contextlib.suppress(OSError), target.probe.clipping(8):
        raise OSError

    assert target.prepares is before
