"""Checks of step sizes: every one after every one, and ranks that disagree about them."""

import asyncio
from collections.abc import Collection, Sequence

from splitwave.certify.battery import walks
from splitwave.certify.battery.bench import Bench, Subject, difference_row, judge_differences
from splitwave.certify.battery.cases import Case, cases
from splitwave.certify.battery.rig import within
from splitwave.certify.battery.scale import Scale
from splitwave.certify.battery.verdict import CheckBroken, Observed, Verdict
from splitwave.core.evidence import Check as CheckName
from splitwave.core.worker import Role
from splitwave.engine.vllm.probe.breaks import Break
from splitwave.engine.vllm.probe.client import Step

WALK_TIMEOUT_S = 600.0
SPARE_TOKENS = 40
"""A request that takes part in every step must not end before the walk does; steps before the
last one has joined take some."""
STEPS_MIN = 10
"""Of a walk: as many as a control's takes, which has every order of three sizes."""


def sizes_of(subject: Subject) -> list[int]:
    """Batch sizes that the mode may run on one rank: its grid, or in an eager mode any."""
    envelope = subject.envelope
    seats = range(1, envelope.seats_max + 1)
    return [size for size in envelope.capture_grid or seats if size <= envelope.seats_max]


def executed(seen: Observed) -> list[list[int]]:
    """Sizes of the steps of each rank, in order, from the workers' own log."""
    found: list[list[int]] = seen["executed"]
    return found


async def walk(
    bench: Bench, plans: Sequence[Sequence[int]], wrong: tuple[int, int] | None
) -> Observed:
    """Keep every seat that the plans need busy, let ranks walk, and compare what was generated.

    `wrong`: a rank and the size at which its weights are to be wrong.
    """
    rig, probe = bench.rig, bench.rig.target.probe
    needed = max(max(plan) for plan in plans)
    asked = _long_cases(bench, needed * len(plans), max(map(len, plans)))
    before = [await rig.target.last_step(rank) for rank in rig.ranks()]
    await probe.walk(plans, needed)
    try:
        if wrong is not None:
            await probe.start_break(Break.WEIGHTS_AT_SIZE, wrong[0], wrong[1])
        opened = await bench.open_all(asked)
        if not await within(WALK_TIMEOUT_S, lambda: _walked(bench)):
            raise CheckBroken(f"the walk did not end in {WALK_TIMEOUT_S:g} s")
        walked = [sizes for sizes, _ in await probe.walked()]
        await rig.decode.abort([request.name for request in opened])
    finally:
        await probe.end_walk()
        if wrong is not None:
            await probe.end_break(Break.WEIGHTS_AT_SIZE, wrong[0])
    ours = [rig.generated(request) for request in opened]
    shorter = [
        Case(case.name, case.token_ids, len(mine.token_ids))
        for case, mine in zip(asked, ours, strict=True)
    ]
    right = await bench.oracle(shorter)
    logs = await asyncio.gather(*(probe.steps(rank, before[rank]) for rank in rig.ranks()))
    executed = [[step.tokens for step in log] for log in logs]
    parts = [log[walks.stretch(*each)] for log, *each in zip(logs, walked, executed, strict=True)]
    return {
        "executed": executed,
        "raggedness": _raggedness(parts),
        "differences": [
            difference_row(case, bench.difference(mine, wanted))
            for case, mine, wanted in zip(asked, ours, right, strict=True)
        ],
    }


async def walk_in_parts(bench: Bench, plans: Sequence[Sequence[int]]) -> Observed:
    """The same for plans of any length: requests end with the envelope, and others go on."""
    found = [
        await walk(bench, part, None) for part in walks.parts(plans, _steps_max(bench.subject))
    ]
    steps = [sum(map(len, executed(part))) for part in found]
    ragged = sum(part["raggedness"] * count for part, count in zip(found, steps, strict=True))
    logs = zip(*map(executed, found), strict=True)
    return {
        "executed": [[size for log in logs_of_rank for size in log] for logs_of_rank in logs],
        "raggedness": ragged / max(1, sum(steps)),
        "differences": [row for part in found for row in part["differences"]],
    }


def _steps_max(subject: Subject) -> int:
    """Steps of a walk during which no request of the envelope has to end."""
    envelope = subject.envelope
    room = min(envelope.traffic.output_max_tokens, envelope.sequence_max_tokens - 8)
    if (steps := room - SPARE_TOKENS) < STEPS_MIN:
        words = f"a walk needs requests of {STEPS_MIN + SPARE_TOKENS} tokens"
        raise CheckBroken(f"{words}; the envelope has room for {room}")
    return steps


def _long_cases(bench: Bench, count: int, steps: int) -> list[Case]:
    """Requests that outlast a walk, if the envelope lets them."""
    if steps > (most := _steps_max(bench.subject)):
        raise CheckBroken(f"a walk of {steps} steps outlasts requests, which last for {most}")
    tokens = steps + SPARE_TOKENS
    return cases([2 + place % 5 for place in range(count)], tokens, bench.scale.seed)


def _raggedness(logs: Sequence[Sequence[Step]]) -> float:
    return walks.raggedness_seen([[(step.ended_at_s, step.tokens) for step in log] for log in logs])


async def _walked(bench: Bench) -> bool:
    return all(left == 0 for _, left in await bench.rig.target.probe.walked())


class Grid:
    """Every size of the grid runs after every other, and after itself, in lock-step."""

    name = CheckName.GRID
    broken = "at one size of the grid the weights of one rank are wrong"
    shows = ("logprob",)

    def _sizes(self, bench: Bench) -> list[int]:
        return walks.spread(sizes_of(bench.subject), bench.scale.grid_sizes_max)

    async def observe(self, bench: Bench) -> Observed:
        """The shortest walk that has every order."""
        sizes = self._sizes(bench)
        plan = walks.every_order(sizes)
        return {"sizes": sizes, **await walk_in_parts(bench, [plan] * len(bench.rig.ranks()))}

    async def observe_broken(self, bench: Bench) -> Observed:
        """A short walk over few sizes, one of which is wrong."""
        sizes = walks.spread(self._sizes(bench), 3)
        plan = walks.every_order(sizes)
        plans = [plan] * len(bench.rig.ranks())
        return {"sizes": sizes, **await walk(bench, plans, (0, sizes[len(sizes) // 2]))}

    def judge(self, seen: Observed, subject: Subject, scale: Scale) -> Verdict:
        """Every order ran on every rank, no size beside the grid did, and tokens are right."""
        verdict = Verdict()
        sizes, grid = seen["sizes"], set(sizes_of(subject))
        missing = [len(walks.orders_missing(sizes, steps)) for steps in executed(seen)]
        ran = {size for steps in executed(seen) for size in steps}
        strays = sorted(size for size in ran if not _fits(size, subject, grid))
        verdict.note(
            sizes=len(sizes),
            sizes_of_the_grid=len(grid),
            orders=len(sizes) ** 2,
            steps=sum(map(len, executed(seen))),
        )
        verdict.require(not any(missing), "orders", f"{max(missing)} orders never ran")
        verdict.require(not strays, "strays", f"steps of sizes beside the grid ran: {strays}")
        judge_differences(verdict, seen, subject)
        return verdict


def _fits(size: int, subject: Subject, grid: Collection[int]) -> bool:
    """True if a step of so many tokens may run: a graph's rows are padded up to its size."""
    return size <= max(grid) if subject.mode.captures_graphs else size in grid


RAGGED_MIN, RAGGED_MIN_OF_ONE = 0.5, 0.25
"""Share of the executed steps in which ranks had different sizes; where a batch has one size, they
differ by idleness alone, and logs tell of two that idle in turn as if they had stepped together."""


class RaggedHammer:
    """Ranks of one lock-step run different sizes, each by a walk of its own, now and then none."""

    name = CheckName.RAGGED_HAMMER
    broken = "at its smallest size the weights of the last rank are wrong"
    shows = ("logprob",)

    def _plans(self, bench: Bench, steps: int) -> list[list[int]]:
        sizes = sizes_of(bench.subject)
        if not bench.subject.envelope.capture_grid:
            sizes = sizes[: bench.scale.hammer_size_max]
        sizes = [0, *walks.spread(sizes, bench.scale.grid_sizes_max)]
        return walks.ragged(sizes, len(bench.rig.ranks()), steps, bench.scale.seed)

    async def observe(self, bench: Bench) -> Observed:
        """A long skewed walk; for prefill, prompts of unequal length at once."""
        if bench.rig.role is Role.PREFILL:
            return await self._prompts(bench, wrong=False)
        return await walk_in_parts(bench, self._plans(bench, bench.scale.hammer_steps))

    async def observe_broken(self, bench: Bench) -> Observed:
        """A shorter one with a wrong size."""
        if bench.rig.role is Role.PREFILL:
            return await self._prompts(bench, wrong=True)
        steps = min(48, bench.scale.hammer_steps, _steps_max(bench.subject))
        plans = self._plans(bench, steps)
        last = len(plans) - 1
        size = min(size for size in plans[last] if size)
        return await walk(bench, plans, (last, size))

    async def _prompts(self, bench: Bench, *, wrong: bool) -> Observed:
        ranks, scale = len(bench.rig.ranks()), bench.scale
        longest = min(scale.prompt_max_tokens, bench.subject.envelope.prompt_max_tokens)
        lengths = [2 + (place * 37) % (longest - 2) for place in range(scale.batch_cases * ranks)]
        asked = cases(lengths, 2, scale.seed)
        right = await bench.oracle(asked)
        target = bench.rig.target
        before = [await target.last_step(rank) for rank in bench.rig.ranks()]
        if wrong:
            async with bench.broken(Break.WEIGHTS, ranks - 1):
                ours = await bench.all_at_once(asked)
        else:
            ours = await bench.all_at_once(asked)
        rows = [
            difference_row(case, bench.difference(mine, wanted))
            for case, mine, wanted in zip(asked, ours, right, strict=True)
        ]
        logs = [await target.probe.steps(rank, before[rank]) for rank in bench.rig.ranks()]
        return {
            "raggedness": _raggedness(logs),
            "executed": [[step.tokens for step in log] for log in logs],
            "differences": rows,
        }

    def judge(self, seen: Observed, subject: Subject, scale: Scale) -> Verdict:
        """Ragged enough, and tokens are right."""
        verdict = Verdict()
        share = seen["raggedness"]
        least = RAGGED_MIN if len(sizes_of(subject)) > 1 else RAGGED_MIN_OF_ONE
        verdict.note(
            raggedness=round(share, 3),
            raggedness_min=least,
            steps=sum(map(len, executed(seen))),
        )
        words = f"ranks differed in {share:.0%} of the steps only"
        verdict.require(share >= least, "even", words)
        judge_differences(verdict, seen, subject)
        return verdict
