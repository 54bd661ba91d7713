"""Work outside the envelope is refused by name, and no step runs for it."""

import asyncio
from dataclasses import replace
from typing import Any  # changes of a request

from splitwave.certify.battery.bench import Bench, Subject
from splitwave.certify.battery.cases import cases, prompt
from splitwave.certify.battery.rig import Rig, decode_request
from splitwave.certify.battery.scale import Scale
from splitwave.certify.battery.verdict import CheckBroken, Observed, Verdict
from splitwave.core.errors import Reason
from splitwave.core.evidence import Check as CheckName
from splitwave.core.generation import Sampling, first_token_is_kept
from splitwave.core.worker import Role
from splitwave.engine.port import EngineRequest, GroupDescription

CROWD = 2
"""Requests at once, in seats of a rank."""
CROWD_TOKENS = 6


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
        "a prompt that is too long is cut and runs; and the envelope ends one token below the "
        "widest step that the engines run"
    )
    shows = ("let_in", "computed", "crowd")

    async def observe(self, bench: Bench) -> Observed:
        """Requests that must not run, then more requests than seats."""
        return {
            **await self._bad(bench),
            "cap_tokens": _cap_tokens(bench.subject),
            **await self._crowd(bench),
        }

    async def observe_broken(self, bench: Bench) -> Observed:
        """A front that cuts prompts, and the same engines under a narrower envelope."""
        keeps_first = bench.rig.role is Role.DECODE and first_token_is_kept(GOOD)
        with bench.rig.target.probe.clipping(GOOD_TOKENS + keeps_first):
            bad = await self._bad(bench)
        crowd = await self._crowd(bench)
        return {**bad, "cap_tokens": crowd["largest_step_tokens"] - 1, **crowd}

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
        """Twice as many requests as seats; sizes of the steps that ran for them."""
        rig, ranks = bench.rig, bench.rig.ranks()
        count = CROWD * bench.subject.envelope.seats_max * len(ranks)
        marks = [await rig.target.last_step(rank) for rank in ranks]
        asked = cases([2] * count, CROWD_TOKENS, bench.scale.seed)
        given = await bench.all_at_once(asked)
        logs = await asyncio.gather(*(rig.target.probe.steps(rank, marks[rank]) for rank in ranks))
        return {
            "crowd": count,
            "served": sum(len(found.token_ids) == CROWD_TOKENS for found in given),
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
        words = f"{seen['crowd'] - seen['served']} of {seen['crowd']} waiting requests were lost"
        verdict.require(seen["served"] == seen["crowd"], "lost", words)
        return verdict


def _cap_tokens(subject: Subject) -> int:
    """Tokens of a step at most: a decode step has one a seat."""
    envelope = subject.envelope
    return envelope.seats_max if subject.mode.role == "decode" else envelope.step_max_tokens


async def _good(rig: Rig, name: str) -> EngineRequest:
    """A request that the group under test would run; a decode group's KV is held for it."""
    ids = prompt(GOOD_TOKENS, 1)
    if rig.role is Role.PREFILL:
        return EngineRequest(engine_request_id=name, rank=0, token_ids=ids, sampling=GOOD)
    first = await rig.hold(name, ids, GOOD, 0)
    held = first.outputs[-1].held
    if held is None:
        raise CheckBroken(f"{name}: prefill held nothing")
    return decode_request(name, ids, GOOD, first, held)


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
