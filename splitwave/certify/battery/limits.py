"""Work outside the envelope is refused by name, and no step runs for it."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any  # changes of a request

from splitwave.certify.battery.bench import Bench, Subject
from splitwave.certify.battery.cases import Case, cases, prompt
from splitwave.certify.battery.drive import ANSWER_TIMEOUT_S, Flight, Group
from splitwave.certify.battery.rig import Rig, decode_request
from splitwave.certify.battery.scale import Scale
from splitwave.certify.battery.verdict import CheckBroken, Observed, Verdict
from splitwave.core.errors import Reason
from splitwave.core.evidence import Check as CheckName
from splitwave.core.generation import Sampling, first_token_is_kept
from splitwave.core.worker import Role
from splitwave.engine.port import EngineRequest, GroupDescription
from splitwave.engine.vllm.probe.breaks import Break

HELD_SHARE = 0.5
"""Of prefill's blocks, a block a request of the crowd: who waits for decode is held there."""
LOOK_S = 0.05
IDLE_LOOKS = 4
"""Looks in a row at which the engines use no block and nobody has ended since the one before: a
request that has not ended is not theirs any more. One that waits is given blocks by the next step,
and an answer to a look says that there was one."""


GOOD_TOKENS = 8
GOOD = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
UNKNOWN_TOKEN = 10**7

_REASONS = {
    "too long": Reason.INVALID_REQUEST,
    "unknown token": Reason.INVALID_REQUEST,
    "no such rank": Reason.INTERNAL,
}


def reasons_of(role: str) -> dict[str, str]:
    """Why each bad request must be refused, by what is wrong with it."""
    found = {why: reason.value for why, reason in _REASONS.items()}
    if role == Role.DECODE:
        found["without a handoff"] = Reason.INTERNAL.value
    return found


class OverEnvelope:
    """What is too long or too strange is refused; what is too much waits for a seat."""

    name = CheckName.OVER_ENVELOPE
    broken = (
        "a prompt that is too long is cut and runs; a limit of a step's tokens, one below what "
        "the crowd fills, is taken away; and one of those who wait is lost"
    )
    shows = ("let_in", "computed", "crowd", "lost")

    async def observe(self, bench: Bench) -> Observed:
        """Requests that must not run, then more requests than seats."""
        bad, crowd = await self._bad(bench), await self._crowd(bench)
        bench.widest_step_tokens = crowd["largest_step_tokens"]
        return {**bad, "cap_tokens": _cap_tokens(bench.subject), **crowd}

    async def observe_broken(self, bench: Bench) -> Observed:
        """A front that cuts prompts, engines that lose a request, and no limit of a step.

        The limit: a second crowd comes while the schedulers' own one is below what the first
        filled. It must hold, so that of the same crowd without it only the missing limit can be
        the reason. CheckBroken if it does not.
        """
        keeps_first = bench.rig.role is Role.DECODE and first_token_is_kept(GOOD)
        with bench.rig.target.probe.clipping(GOOD_TOKENS + keeps_first):
            bad = await self._bad(bench)
        unlimited = bench.widest_step_tokens
        limit = max(1, unlimited - 1)
        async with contextlib.AsyncExitStack() as breaks:
            for rank in bench.rig.ranks():
                await breaks.enter_async_context(bench.broken(Break.NARROW, rank, limit))
            last = bench.rig.ranks()[-1]
            await breaks.enter_async_context(bench.broken(Break.LOSE_REQUEST, last))
            crowd = await self._crowd(bench)
        if crowd["largest_step_tokens"] > limit:
            wide = crowd["largest_step_tokens"]
            raise CheckBroken(f"over_envelope: a step had {wide} tokens under a limit of {limit}")
        # One seat has no limit below it that lets anything run: there the envelope is narrower.
        cap = min(limit, unlimited - 1)
        return {**bad, **crowd, "cap_tokens": cap, "largest_step_tokens": unlimited}

    async def _bad(self, bench: Bench) -> Observed:
        """What became of each bad request, and whether a step ran for any."""
        before = await _steps_with_tokens(bench)
        refusals = [await self._refusal(bench, why) for why in reasons_of(bench.rig.role)]
        return {
            "refusals": refusals,
            "steps_for_refused": await _steps_with_tokens(bench) - before,
        }

    async def _refusal(self, bench: Bench, why: str) -> dict[str, object]:
        """Send what is good but for one thing, so that nothing else can be the reason."""
        rig = bench.rig
        name = rig.name("over")
        request = spoilt(await _good(rig, name), why, rig.target.description)
        flight = await rig.target.run(request)
        if rig.role is Role.DECODE and flight.failure:
            # It did not pull what is held for it. One that ran has, and that frees it.
            await rig.prefill.engine.release([name])
        return {"why": why, "reason": flight.failure, "tokens": len(flight.token_ids)}

    async def _crowd(self, bench: Bench) -> dict[str, int]:
        """More requests than seats; sizes of the steps that ran for them."""
        rig, ranks = bench.rig, bench.rig.ranks()
        seats, scale = bench.subject.envelope.seats_max, bench.scale
        count = max(seats + 1, int(scale.crowd_share * seats)) * len(ranks)
        marks = [await rig.target.last_step(rank) for rank in ranks]
        crowd = await _started(rig, cases([2] * count, scale.crowd_tokens, scale.seed))
        await _ended_or_lost(rig.target, [flight for _, flight in crowd])
        logs = await asyncio.gather(*(rig.target.probe.steps(rank, marks[rank]) for rank in ranks))
        await _give_up(
            rig, [x.engine_request_id for x, flight in crowd if not flight.ended.is_set()]
        )
        return {
            "crowd": count,
            "served": sum(_is_served(*each) for each in crowd),
            "largest_step_tokens": max(step.tokens for log in logs for step in log),
        }

    def judge(self, seen: Observed, subject: Subject, scale: Scale) -> Verdict:
        """A reason for each, no token for any; no step over the cap; the crowd all served."""
        verdict = Verdict()
        wanted = reasons_of(subject.mode.role)
        rows = {row["why"]: row for row in seen["refusals"]}
        let_in = [why for why, row in rows.items() if not row["reason"] or row["tokens"]]
        unasked = sorted(wanted.keys() - rows.keys())
        odd = [why for why, row in rows.items() if row["reason"] not in (None, wanted.get(why))]
        cap = seen["cap_tokens"]
        verdict.note(
            refused=len(rows) - len(let_in),
            crowd=seen["crowd"],
            largest_step_tokens=seen["largest_step_tokens"],
            cap_tokens=cap,
        )
        verdict.require(not unasked, "unasked", f"never sent: {', '.join(unasked)}")
        verdict.require(not let_in, "let_in", f"not refused: {', '.join(let_in)}")
        verdict.require(not odd, "odd", f"refused for another reason: {', '.join(odd)}")
        words = f"{seen['steps_for_refused']} steps ran for refused requests"
        verdict.require(not seen["steps_for_refused"], "computed", words)
        words = f"a step had {seen['largest_step_tokens']} tokens, certified are {cap}"
        verdict.require(seen["largest_step_tokens"] <= cap, "crowd", words)
        lost = seen["crowd"] - seen["served"]
        verdict.note(lost=lost)
        words = f"{lost} of {seen['crowd']} waiting requests were lost"
        verdict.require(seen["served"] == seen["crowd"], "lost", words)
        return verdict


def _cap_tokens(subject: Subject) -> int:
    """Tokens of a step at most: a decode step has one a seat."""
    envelope = subject.envelope
    return envelope.seats_max if subject.mode.role == "decode" else envelope.step_max_tokens


async def _started(rig: Rig, crowd: Sequence[Case]) -> list[tuple[EngineRequest, Flight]]:
    """Give the group under test a crowd, as much of it at once as prefill can hold."""
    ranks, started = len(rig.ranks()), list[tuple[EngineRequest, Flight]]()
    held, part = rig.prefill.description, len(crowd)
    if rig.role is Role.DECODE:
        part = max(1, int(HELD_SHARE * held.blocks_per_rank * held.ranks))
    for begin in range(0, len(crowd), part):
        requests = await asyncio.gather(
            *(
                _crowded(rig, case, place % ranks)
                for place, case in enumerate(crowd[begin : begin + part], begin)
            )
        )
        started += zip(requests, await rig.target.start(*requests), strict=True)
    return started


async def _crowded(rig: Rig, case: Case, rank: int) -> EngineRequest:
    """One request of the crowd; a decode group's is prefilled, and held for it."""
    name = rig.name("crowd")
    if rig.role is Role.PREFILL:
        return EngineRequest(
            engine_request_id=name, rank=rank, token_ids=case.token_ids, sampling=case.sampling
        )
    first = await rig.hold(
        name, case.token_ids, case.sampling, rank % rig.prefill.description.ranks
    )
    return replace(_behind(name, case.token_ids, case.sampling, first), rank=rank)


async def _ended_or_lost(group: Group, flights: Sequence[Flight]) -> None:
    """Return once all have ended, or the engines have nothing more to do for those that have not.

    CheckBroken if the engines go on for far too long without an end, and EngineDied.
    """
    idle, left, progress_s = 0, len(flights), time.monotonic()
    while idle < IDLE_LOOKS:
        await asyncio.sleep(LOOK_S)
        is_used = any(rank.blocks_used for rank in await group.counters())
        before, left = left, sum(not flight.ended.is_set() for flight in flights)
        if not left:
            return
        if left < before:
            progress_s = time.monotonic()
        idle = 0 if is_used or left < before else idle + 1
        if time.monotonic() - progress_s > ANSWER_TIMEOUT_S:
            raise CheckBroken(f"{left} requests of a crowd: nothing for {ANSWER_TIMEOUT_S:g} s")


async def _give_up(rig: Rig, names: Sequence[str]) -> None:
    """Let go of requests that will not end, and of what is held for them."""
    await rig.target.abort(names)
    if rig.role is Role.DECODE:
        await rig.prefill.engine.release(names)


def _is_served(request: EngineRequest, flight: Flight) -> bool:
    """True if a request was given all its tokens."""
    return flight.ended.is_set() and len(flight.token_ids) == request.sampling.max_tokens


async def _good(rig: Rig, name: str) -> EngineRequest:
    """A request that the group under test would run; a decode group's KV is held for it."""
    ids = prompt(GOOD_TOKENS, 1)
    if rig.role is Role.PREFILL:
        return EngineRequest(engine_request_id=name, rank=0, token_ids=ids, sampling=GOOD)
    return _behind(name, ids, GOOD, await rig.hold(name, ids, GOOD, 0))


def _behind(name: str, ids: Sequence[int], sampling: Sampling, first: Flight) -> EngineRequest:
    """What decode is asked for behind prefill's token."""
    held = first.outputs[-1].held
    if held is None:
        raise CheckBroken(f"{name}: prefill held nothing")
    return decode_request(name, ids, sampling, first, held)


def spoilt(good: EngineRequest, why: str, group: GroupDescription) -> EngineRequest:
    """A good request with one thing wrong."""
    longest = group.model_len_max_tokens
    ids = list(good.token_ids)
    changes: dict[str, dict[str, Any]] = {
        "too long": {"token_ids": (ids * longest)[:longest]},
        "unknown token": {"token_ids": [*ids[:-1], UNKNOWN_TOKEN]},
        "no such rank": {"rank": group.ranks},
        "without a handoff": {"pull": None},
    }
    return replace(good, **changes[why])


async def _steps_with_tokens(bench: Bench) -> int:
    """Steps in which the group under test has computed tokens, by the workers' log."""
    return sum([await bench.rig.target.last_step(rank) for rank in bench.rig.ranks()])
