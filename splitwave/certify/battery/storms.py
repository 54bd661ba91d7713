"""Checks under bursts: waves that begin and end as fast as they can, and aborts at every point."""

import asyncio
import random
import time
from dataclasses import dataclass

from splitwave.certify.battery import walks
from splitwave.certify.battery.bench import Bench, Subject
from splitwave.certify.battery.cases import Case, cases
from splitwave.certify.battery.rig import Rig
from splitwave.certify.battery.scale import Scale
from splitwave.certify.battery.verdict import CheckBroken, Observed, Verdict
from splitwave.core.evidence import Check as CheckName
from splitwave.engine.port import EngineRequest
from splitwave.engine.vllm.probe.breaks import Break

STAGES = ("prefill", "pull", "decode", "never")
WAVES_PER_GAP_MIN = 0.25
"""Waves that must have begun for each gap of the storm, or the group never paused."""


class WaveStorm:
    """No request waits for a rank that sleeps, however waves begin and end."""

    name = CheckName.WAVE_STORM
    broken = "for longer than the limit the last rank does not hear that waves start"
    shows = ("slow",)

    async def observe(self, bench: Bench) -> Observed:
        """Bursts on all ranks with gaps in which the group pauses."""
        scale = bench.scale
        plan = walks.storm(
            scale.storm_requests, len(bench.rig.ranks()), scale.seed, pause_s=scale.pause_s
        )
        waves = _waves(bench.rig)
        asked = cases([3] * len(plan), scale.storm_tokens, scale.seed)
        running = []
        for case, (gap_s, rank) in zip(asked, plan, strict=True):
            if gap_s:
                await asyncio.sleep(gap_s)
            running.append(asyncio.create_task(_timed(bench.rig, case, rank)))
        took_s = await asyncio.gather(*running)
        return {
            "took_s": took_s,
            "gaps": sum(gap_s >= scale.pause_s for gap_s, _ in plan),
            "waves": _waves(bench.rig) - waves,
        }

    async def observe_broken(self, bench: Bench) -> Observed:
        """One request to the first rank while the last one is deaf."""
        await asyncio.sleep(bench.scale.pause_s)
        waves = _waves(bench.rig)
        case = cases([3], bench.scale.storm_tokens, bench.scale.seed)[0]
        deaf_s = bench.scale.storm_limit_s + 1.0
        await asyncio.sleep(2 * bench.scale.pause_s)
        async with bench.broken(Break.LATE_WAKE, bench.rig.ranks()[-1], deaf_s):
            took_s = await _timed(bench.rig, case, 0)
        return {"took_s": [took_s], "gaps": 1, "waves": _waves(bench.rig) - waves}

    def judge(self, seen: Observed, subject: Subject, scale: Scale) -> Verdict:
        """Every request was quick, and the group did pause between bursts."""
        verdict = Verdict()
        took_s = sorted(seen["took_s"])
        needed = seen["gaps"] * WAVES_PER_GAP_MIN
        verdict.note(
            requests=len(took_s),
            waves=seen["waves"],
            slowest_s=round(took_s[-1], 3),
            median_s=round(took_s[len(took_s) // 2], 4),
            limit_s=scale.storm_limit_s,
        )
        words = f"a request of {scale.storm_tokens} tokens took {took_s[-1]:.1f} s"
        verdict.require(took_s[-1] <= scale.storm_limit_s, "slow", words)
        words = f"{seen['waves']} waves in {seen['gaps']} gaps: the group did not pause"
        verdict.require(seen["waves"] >= needed, "no_waves", words)
        return verdict


def _waves(rig: Rig) -> int:
    status = rig.target.engine.waves()
    if status is None:
        raise CheckBroken("nobody coordinates the waves of this group")
    return status.waves


async def _timed(rig: Rig, case: Case, rank: int) -> float:
    """Seconds that a request takes on the group under test."""
    began_s = time.monotonic()
    await rig.generate(case, rank)
    return time.monotonic() - began_s


@dataclass(frozen=True, slots=True)
class _Fate:
    """When a request of the abort storm is given up."""

    stage: str
    """One of `STAGES`: where it is then."""
    after_s: float
    watched_s: float
    """How long nothing may come any more."""


class AbortStorm:
    """Requests are given up at every point; afterwards nothing is held, and the rest are whole."""

    name = CheckName.ABORT_STORM
    broken = "one request's blocks are not freed"
    shows = ("held",)

    async def observe(self, bench: Bench) -> Observed:
        """Everything at once, then silence."""
        source = random.Random(bench.scale.seed)
        count, ranks = bench.scale.abort_requests, len(bench.rig.ranks())
        tokens = min(bench.scale.abort_tokens, bench.subject.envelope.traffic.output_max_tokens)
        asked = cases([2 + 3 * (place % 9) for place in range(count)], tokens, bench.scale.seed)
        fates = [
            _Fate(STAGES[place % 4], source.random() * 0.05, bench.scale.pause_s)
            for place in range(count)
        ]
        ended = await asyncio.gather(
            *(
                _live(bench.rig, case, fate, _rank_of(place, ranks))
                for place, (case, fate) in enumerate(zip(asked, fates, strict=True))
            )
        )
        settled = await bench.rig.settled()
        held = await _held(bench.rig)
        return {
            "by_stage": {stage: sum(fate.stage == stage for fate in fates) for stage in STAGES},
            "late_outputs": sum(late for late, _ in ended),
            "short": sum(
                fate.stage == "never" and given != tokens
                for fate, (_, given) in zip(fates, ended, strict=True)
            ),
            "settled": settled,
            "held": held,
        }

    async def observe_broken(self, bench: Bench) -> Observed:
        """A small storm in which one rank keeps a request's blocks.

        It is that of the first request that is not given up: others may never have got any there.
        """
        ranks = bench.rig.ranks()
        leaks = _rank_of(STAGES.index("never"), len(ranks))
        async with bench.broken(Break.LEAK_BLOCKS, ranks[leaks]):
            return await self.observe(bench)

    def judge(self, seen: Observed, subject: Subject, scale: Scale) -> Verdict:
        """Zero blocks, zero leases; who was not given up got everything."""
        verdict = Verdict()
        by_stage = seen["by_stage"]
        verdict.note(
            **{f"given_up_in_{stage}": count for stage, count in by_stage.items()},
            blocks_held=seen["held"]["blocks"],
            leases_held=seen["held"]["leases"],
        )
        held = seen["held"]
        words = f"{held['blocks']} blocks and {held['leases']} leases are held at the end"
        verdict.require(seen["settled"] and not any(held.values()), "held", words)
        verdict.require(not seen["short"], "short", f"{seen['short']} others lost tokens")
        words = f"{seen['late_outputs']} outputs came after an abort"
        verdict.require(not seen["late_outputs"], "late", words)
        return verdict


def _rank_of(place: int, ranks: int) -> int:
    """A request's rank: each meets every stage, also where ranks are as many as stages."""
    return (place + place // len(STAGES)) % ranks


async def _held(rig: Rig) -> dict[str, int]:
    counts = [*await rig.prefill.counters(), *await rig.decode.counters()]
    return {
        "blocks": sum(rank.blocks_used for rank in counts),
        "leases": sum(rank.leases_live for rank in counts),
    }


async def _live(rig: Rig, case: Case, fate: _Fate, rank: int) -> tuple[int, int]:
    """One request's life: outputs that came after it was given up, and tokens it was given."""
    name = rig.name("storm")
    if fate.stage == "prefill":
        return await _given_up_in_prefill(rig, case, fate, name)
    sampling = case.sampling
    first = await rig.hold(name, case.token_ids, sampling, rank % rig.prefill.description.ranks)
    flight = await rig.hand_over(name, case.token_ids, sampling, first, rank)
    if fate.stage == "decode":
        await rig.decode.until(flight.began, name)
    if fate.stage != "never":
        await asyncio.sleep(fate.after_s if fate.stage == "decode" else fate.after_s / 10)
        await rig.decode.abort([name])
        given = len(flight.outputs)
        await asyncio.sleep(fate.watched_s)
        # A pull that was not yet done leaves the handoff to its owner.
        await rig.prefill.engine.release([name])
        return len(flight.outputs) - given, 0
    await rig.decode.until(flight.ended, name)
    return 0, len(first.token_ids) + len(flight.token_ids)


async def _given_up_in_prefill(rig: Rig, case: Case, fate: _Fate, name: str) -> tuple[int, int]:
    request = EngineRequest(
        engine_request_id=name,
        rank=0,
        token_ids=case.token_ids,
        sampling=case.sampling,
        hold=True,
    )
    flight = (await rig.prefill.start(request))[0]
    await asyncio.sleep(fate.after_s)
    await rig.prefill.engine.release([name])
    given = len(flight.outputs)
    await asyncio.sleep(fate.watched_s)
    return len(flight.outputs) - given, 0
