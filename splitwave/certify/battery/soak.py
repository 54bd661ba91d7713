"""The soak: steady load for long, and what must not change meanwhile."""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any  # JSON

from splitwave.certify.battery import statistics
from splitwave.certify.battery.bench import Bench, Subject
from splitwave.certify.battery.cases import prompt
from splitwave.certify.battery.scale import Scale
from splitwave.certify.battery.statistics import StepSample, TooFewSamples
from splitwave.certify.battery.verdict import CheckBroken, Observed, Verdict
from splitwave.core.evidence import Check as CheckName
from splitwave.core.generation import Sampling
from splitwave.core.mode import Device
from splitwave.core.worker import Role
from splitwave.engine.port import EngineRequest
from splitwave.engine.vllm.probe.breaks import Break
from splitwave.engine.vllm.probe.client import Step

SAMPLES = 60
"""Looks at the processes' memory in a soak."""
LOOKS_MIN = 20
"""Below that a soak goes on, for growth is told of tenths."""
WARM_SHARE = 0.05
"""Of the soak, before it: the first steps of a load pay for caches and connections."""
BREAK_AT = 0.6
"""Share of the control's soak after which everything breaks."""
PATIENCE = 10.0
"""Times its length that a soak may take to have steps enough to compare."""
PARTS = 20
"""Points of a curve in the report."""

During = Callable[[float], Awaitable[None]]
"""Told now and then which share of the soak is over."""


class Soak:
    """Steady load: no step outside the mode, no step slower, no memory lost, no request failed."""

    name = CheckName.SOAK
    broken = "towards its end steps take twice their time, keep memory, and one is of another kind"
    shows = ("drift", "memory", "kinds")

    async def observe(self, bench: Bench) -> Observed:
        """Keep a share of the seats busy for the whole time."""
        return await _soak(bench, bench.scale.soak_s, _nothing)

    async def observe_broken(self, bench: Bench) -> Observed:
        """A shorter soak in which all of it breaks on the last rank."""
        rank, scale = bench.rig.ranks()[-1], bench.scale
        breaks = {
            Break.SLOW: 0.0,
            Break.LEAK_MEMORY: float(scale.memory_slack_bytes),
            Break.ODD_STEP: 0.0,
        }
        probe, begun = bench.rig.target.probe, False

        async def breaking(share: float) -> None:
            nonlocal begun
            if share >= BREAK_AT and not begun:
                begun = True
                for what, argument in breaks.items():
                    await probe.start_break(what, rank, argument)

        try:
            return await _soak(bench, scale.soak_control_s, breaking)
        finally:
            for what in breaks:
                await probe.end_break(what, rank)

    def judge(self, seen: Observed, subject: Subject, scale: Scale) -> Verdict:
        """The bounds of design: drift's interval, memory, kinds, failures."""
        verdict = Verdict()
        verdict.note(seconds=round(seen["seconds"], 1), requests=seen["requests"])
        _judge_kinds(verdict, seen, subject)
        _judge_drift(verdict, seen, scale)
        _judge_memory(verdict, seen, scale)
        words = f"{seen['failures']} of {seen['requests']} requests failed"
        verdict.require(not seen["failures"], "failures", words)
        return verdict


def _judge_kinds(verdict: Verdict, seen: Observed, subject: Subject) -> None:
    kinds: dict[str, int] = seen["kinds"]
    strays = {kind: count for kind, count in kinds.items() if kind not in subject.mode.step_kinds}
    verdict.note(steps=sum(kinds.values()), steps_outside_mode=sum(strays.values()))
    words = f"steps of kinds that {subject.mode.name} does not have: {strays}"
    verdict.require(not strays, "kinds", words)


def _judge_drift(verdict: Verdict, seen: Observed, scale: Scale) -> None:
    worst = None
    for rank, rows in enumerate(seen["steps"]):
        try:
            samples = [StepSample(*row) for row in rows]
            found = statistics.drift(samples, share=scale.drift_share, seed=rank)
        except TooFewSamples as few:
            verdict.require(False, "few", f"rank {rank}: {few}")
            continue
        if worst is None or found.high > worst.high:
            worst = found
    if worst is None:
        return
    verdict.note(
        drift=round(worst.value, 4),
        drift_low=round(worst.low, 4),
        drift_high=round(worst.high, 4),
        drift_max=scale.drift_max,
    )
    words = f"steps take {worst.value:.2f} times ({worst.low:.2f} to {worst.high:.2f}) as long"
    verdict.require(worst.high < scale.drift_max, "drift", words + " at the end as at the start")


def _judge_memory(verdict: Verdict, seen: Observed, scale: Scale) -> None:
    for rank, samples in enumerate(seen["memory"]):
        for where in samples[0]:
            curve = [float(sample[where]) for sample in samples]
            if not any(curve):
                continue
            try:
                share = statistics.growth(curve)
            except TooFewSamples as few:
                verdict.require(False, "few", f"memory of rank {rank}: {few}")
                continue
            allowed = max(scale.memory_growth_max, scale.memory_slack_bytes / curve[0])
            verdict.note(**{f"memory_growth_{where}_rank_{rank}": round(share, 4)})
            words = f"rank {rank} holds {share:.1%} more ({where}); allowed are {allowed:.1%}"
            verdict.require(share <= allowed, "memory", words)


async def _nothing(_: float) -> None:
    return


async def _soak(bench: Bench, seconds: float, during: During) -> Observed:
    """Load the group, look at it, and sum up."""
    stop, counts = asyncio.Event(), {"requests": 0, "failures": 0}
    target, ranks = bench.rig.target, bench.rig.ranks()
    streams = max(1, int(bench.subject.envelope.seats_max * bench.scale.soak_share))
    running = [
        asyncio.create_task(_stream(bench, rank, number, stop, counts))
        for rank in ranks
        for number in range(streams)
    ]
    try:
        await asyncio.sleep(WARM_SHARE * seconds)
        kinds = await target.kinds()
        marks = [await target.last_step(rank) for rank in ranks]
        memory = await _watch(bench, seconds, during, running)
        logs = await asyncio.gather(*(target.probe.steps(rank, marks[rank]) for rank in ranks))
        after = await target.kinds()
    finally:
        stop.set()
        await asyncio.gather(*running, return_exceptions=True)
    return {
        "seconds": seconds,
        **counts,
        "kinds": {kind: after[kind] - kinds.get(kind, 0) for kind in after},
        "steps": [costs(log, bench.subject.mode.device) for log in logs],
        "memory": [[sample[rank] for sample in memory] for rank in ranks],
    }


async def _watch(
    bench: Bench, seconds: float, during: During, running: list[asyncio.Task[None]]
) -> list[list[dict[str, int]]]:
    """Look at memory until the time is over."""
    began_s = time.monotonic()
    memory: list[list[dict[str, int]]] = []
    marks = [await bench.rig.target.last_step(rank) for rank in bench.rig.ranks()]
    while (
        share := min(
            await _share(bench, (time.monotonic() - began_s) / seconds, marks),
            len(memory) / LOOKS_MIN,  # A busy rank is slow to say what it holds.
        )
    ) < 1.0:
        await during(share)
        memory.append(await bench.rig.target.probe.memory_bytes())
        for task in running:
            if task.done():
                task.result()
                raise CheckBroken("a stream of the soak ended early")
        await asyncio.sleep(seconds / SAMPLES)
    return memory


async def _share(bench: Bench, time_share: float, marks: list[int]) -> float:
    """How much of a soak is over: its time, and on a slow machine the steps that it needs."""
    ranks = bench.rig.ranks()
    ran = [await bench.rig.target.last_step(rank) - marks[rank] for rank in ranks]
    if time_share > PATIENCE:
        raise CheckBroken(f"only {min(ran)} steps in {PATIENCE:g} times the soak's length")
    return min(time_share, min(ran) / bench.scale.soak_steps_min)


async def _stream(
    bench: Bench, rank: int, number: int, stop: asyncio.Event, counts: dict[str, int]
) -> None:
    """One request after the other, of varying lengths, until told to stop."""
    source = random.Random(f"{bench.scale.seed}/{rank}/{number}")
    tokens = min(bench.scale.soak_tokens, bench.subject.envelope.traffic.output_max_tokens)
    while not stop.is_set():
        length = source.randint(2, bench.scale.soak_prompt_tokens)
        token_ids = prompt(length, source.randrange(10**6))
        sampling = Sampling(
            max_tokens=source.randint(max(2, tokens // 2), tokens), temperature=0.0, ignore_eos=True
        )
        counts["requests"] += 1
        counts["failures"] += await _failed(bench, token_ids, sampling, rank)


async def _failed(bench: Bench, token_ids: tuple[int, ...], sampling: Sampling, rank: int) -> bool:
    rig = bench.rig
    if rig.role is Role.PREFILL:
        name = rig.name("soak")
        request = EngineRequest(
            engine_request_id=name, rank=rank, token_ids=token_ids, sampling=sampling
        )
        flight = await rig.prefill.run(request)
        failed = len(flight.token_ids) != sampling.max_tokens
    else:
        opened = await rig.open(token_ids, sampling, rank)
        name, flight = opened.name, opened.decoding or opened.first
        failed = len((await rig.finished(opened)).token_ids) != sampling.max_tokens
    for group in (rig.prefill, rig.decode):
        group.flights.pop(name, None)
    return failed or flight.failure is not None


def costs(log: list[Step], device: Device) -> list[tuple[int, float]]:
    """Tokens and cost of each step: CPU seconds; on a GPU the time since the step before."""
    if device is Device.CPU:
        return [(step.tokens, step.cpu_s) for step in log]
    return [
        (step.tokens, step.ended_at_s - before.ended_at_s)
        for before, step in itertools.pairwise(log)
    ]


def curves(seen: Observed) -> dict[str, Any]:
    """What the report draws: step time by size, over the soak, and memory; a curve a rank."""
    samples = [[StepSample(*row) for row in rows] for rows in seen["steps"]]
    return {
        "by_size": [statistics.median_by_size(rows) for rows in samples],
        "over_time": [statistics.medians_in_parts(rows, PARTS) for rows in samples],
        "memory": [[sum(sample.values()) for sample in rank] for rank in seen["memory"]],
    }
