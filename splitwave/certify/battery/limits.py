"""Work outside the envelope is refused by name, and no step runs for it."""

import asyncio
from dataclasses import replace

from splitwave.certify.battery.bench import Bench, Subject
from splitwave.certify.battery.cases import cases, prompt
from splitwave.certify.battery.scale import Scale
from splitwave.certify.battery.verdict import Observed, Verdict
from splitwave.core.evidence import Check as CheckName
from splitwave.core.generation import Sampling
from splitwave.core.worker import Role
from splitwave.engine.port import EngineRequest

CROWD = 2
"""Requests at once, in seats of a rank."""
CROWD_TOKENS = 6


class OverEnvelope:
    """What is too long or too strange is refused; what is too much waits for a seat."""

    name = CheckName.OVER_ENVELOPE
    broken = "the envelope ends one token below the widest step that the engines run"
    shows = ("crowd",)

    async def observe(self, bench: Bench) -> Observed:
        """Requests that must not run, then more requests than seats."""
        computed = await _tokens_computed(bench)
        refusals = [await self._refusal(bench, why) for why in self._bad(bench)]
        computed = await _tokens_computed(bench) - computed
        return {
            "refusals": refusals,
            "computed_tokens": computed,
            "cap_tokens": _cap_tokens(bench.subject),
            **await self._crowd(bench),
        }

    async def observe_broken(self, bench: Bench) -> Observed:
        """The same engines under a narrower envelope."""
        crowd = await self._crowd(bench)
        cap_tokens = crowd["largest_step_tokens"] - 1
        return {"refusals": [], "computed_tokens": 0, "cap_tokens": cap_tokens, **crowd}

    def _bad(self, bench: Bench) -> list[tuple[str, EngineRequest]]:
        """Requests that the group under test must refuse, by what is wrong with them."""
        rig = bench.rig
        longest = rig.target.description.model_len_max_tokens
        good = EngineRequest(
            engine_request_id="",
            rank=0,
            token_ids=prompt(8, 1),
            sampling=Sampling(max_tokens=2, temperature=0.0, ignore_eos=True),
        )
        bad = [
            ("too long", replace(good, token_ids=prompt(longest + 1, 1))),
            ("no such rank", replace(good, rank=rig.target.description.ranks)),
            ("unknown token", replace(good, token_ids=[1, 10**7])),
        ]
        if rig.role is Role.DECODE:
            bad.append(("without a handoff", good))
        return bad

    async def _refusal(self, bench: Bench, bad: tuple[str, EngineRequest]) -> dict[str, object]:
        why, request = bad
        named = replace(request, engine_request_id=bench.rig.name("over"))
        flight = await bench.rig.target.run(named)
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
        let_in = [row["why"] for row in seen["refusals"] if not row["reason"] or row["tokens"]]
        cap = seen["cap_tokens"]
        verdict.note(
            refused=len(seen["refusals"]) - len(let_in),
            crowd=seen["crowd"],
            largest_step_tokens=seen["largest_step_tokens"],
            cap_tokens=cap,
        )
        verdict.require(not let_in, "let_in", f"not refused: {', '.join(let_in)}")
        words = f"{seen['computed_tokens']} tokens were computed for refused requests"
        verdict.require(not seen["computed_tokens"], "computed", words)
        words = f"a step had {seen['largest_step_tokens']} tokens, certified are {cap}"
        verdict.require(seen["largest_step_tokens"] <= cap, "crowd", words)
        words = f"{seen['crowd'] - seen['served']} of {seen['crowd']} waiting requests were lost"
        verdict.require(seen["served"] == seen["crowd"], "lost", words)
        return verdict


def _cap_tokens(subject: Subject) -> int:
    """Tokens of a step at most: a decode step has one a seat."""
    envelope = subject.envelope
    return envelope.seats_max if subject.mode.role == "decode" else envelope.step_max_tokens


async def _tokens_computed(bench: Bench) -> int:
    """Tokens that the group under test has computed for requests, by the workers' log."""
    return sum([await bench.rig.target.last_step(rank) for rank in bench.rig.ranks()])
