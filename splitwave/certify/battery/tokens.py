"""Checks that compare tokens: with an oracle, with another boot, and beside poisoned rows."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence

from splitwave.certify.battery.bench import Bench, Subject, difference_row, judge_differences
from splitwave.certify.battery.cases import (
    Case,
    Generated,
    cases,
    feature_cases,
    lengths_around,
)
from splitwave.certify.battery.scale import Scale
from splitwave.certify.battery.verdict import CheckBroken, Observed, Verdict
from splitwave.core.evidence import Check as CheckName
from splitwave.core.evidence import Level
from splitwave.core.worker import Role
from splitwave.engine.vllm.probe.breaks import Break

FEATURE_TOKENS = 8


def oracle_cases(subject: Subject, scale: Scale) -> list[Case]:
    """Prompts around block boundaries, within the envelope; and every sampling feature."""
    envelope = subject.envelope
    tokens = min(scale.oracle_tokens, envelope.traffic.output_max_tokens)
    longest = min(
        scale.prompt_max_tokens, envelope.prompt_max_tokens, envelope.sequence_max_tokens - tokens
    )
    lengths = lengths_around(subject.block_size_tokens, longest, scale.oracle_cases)
    greedy = cases(lengths, tokens, scale.seed)
    return greedy + feature_cases(5, min(tokens, FEATURE_TOKENS), scale.seed)


def alone_cases(subject: Subject, scale: Scale) -> list[Case]:
    """Those of the oracle's cases that run alone too: plain and sampled ones, evenly chosen."""
    asked = oracle_cases(subject, scale)
    return asked[:: math.ceil(len(asked) / scale.alone_cases)]


async def alone_on_each_rank(bench: Bench) -> dict[str, Generated]:
    """Generate one case after the other on one rank after the other; by rank and case."""
    return {
        f"{rank}/{case.name}": await bench.rig.generate(case, rank)
        for rank in bench.rig.ranks()
        for case in alone_cases(bench.subject, bench.scale)
    }


def edge_cases(subject: Subject, scale: Scale) -> list[Case]:
    """The longest output that the envelope lets in, behind the longest prompt that fits it, which
    is the longest sequence; and the longest prompt if that is another.

    Prefill runs a prompt and one token of it; how long decode goes on is not its to prove. But
    decode shows what prefill handed over by a token of its own: two tokens follow each prompt.
    """
    envelope = subject.envelope
    sequence = envelope.sequence_max_tokens
    prompt = min(envelope.prompt_max_tokens, sequence - 2)
    if subject.mode.role == Role.PREFILL:
        return cases([prompt], 2, scale.seed + 2)
    output = min(envelope.traffic.output_max_tokens, sequence - 1)
    longest = cases([min(prompt, sequence - output)], output, scale.seed + 1)
    if len(longest[0].token_ids) == prompt:
        return longest
    tokens = min(scale.oracle_tokens, output, sequence - prompt)
    return longest + cases([prompt], tokens, scale.seed + 2)


class Oracle:
    """Tokens and log probabilities equal an eager engine's of one rank.

    All cases are generated at once, and some alone on each rank; at the full level those at the
    envelope's edges too, once, for they are long.
    """

    name = CheckName.ORACLE
    broken = "the final norm's weights of one rank are 2% too large: no token changes"
    shows = ("logprob",)

    async def observe(self, bench: Bench) -> Observed:
        """Generate cases alone on every rank, then all together, then those at the edges."""
        asked = oracle_cases(bench.subject, bench.scale)
        edges = edge_cases(bench.subject, bench.scale) if bench.subject.level is Level.FULL else []
        if bench.plain is None:  # The group under test may be the oracle.
            answers = await bench.oracle([*asked, *edges])
            ours = await self._ours(bench, asked, edges)
        else:
            answers, ours = await asyncio.gather(
                bench.plain([*asked, *edges]), self._ours(bench, asked, edges)
            )
        right = {case.name: wanted for case, wanted in zip([*asked, *edges], answers, strict=True)}
        return {
            "oracle": bench.oracle_words(),
            "differences": [
                difference_row(case, bench.difference(given, right[case.name]))
                for case, given in ours
            ],
            **_longest([*asked, *edges]),
            "longest_output_tokens": max(len(given.token_ids) for _, given in ours),
        }

    async def _ours(
        self, bench: Bench, asked: Sequence[Case], edges: Sequence[Case]
    ) -> list[tuple[Case, Generated]]:
        """What the group under test generates, case by case."""
        alone = await alone_on_each_rank(bench)
        bench.remembered |= alone
        named = {case.name: case for case in asked}
        given = [(named[name.partition("/")[2]], found) for name, found in alone.items()]
        given += zip(asked, await bench.all_at_once(asked), strict=True)
        return given + [
            (case, await bench.rig.generate(case, bench.rig.ranks()[-1])) for case in edges
        ]

    async def observe_broken(self, bench: Bench) -> Observed:
        """One short case on a rank with wrong weights."""
        case = oracle_cases(bench.subject, bench.scale)[0]
        right = (await bench.oracle([case]))[0]
        rank = bench.rig.ranks()[-1]
        async with bench.broken(Break.WEIGHTS, rank):
            ours = await bench.rig.generate(case, rank)
        return {
            "oracle": bench.oracle_words(),
            "differences": [difference_row(case, bench.difference(ours, right))],
            **_longest([case]),
            "longest_output_tokens": len(ours.token_ids),
        }

    def judge(self, seen: Observed, subject: Subject, scale: Scale) -> Verdict:
        """Equal tokens, log probabilities within the precision's bound; at full, to the edges."""
        verdict = Verdict()
        lengths = {name: seen[name] for name in LENGTHS}
        verdict.note(oracle=seen["oracle"], **lengths)
        judge_differences(verdict, seen, subject)
        if subject.level is Level.FULL:
            edges = _longest(edge_cases(subject, scale))
            short = [name for name in LENGTHS if lengths[name] < edges[name]]
            words = ", ".join(f"{name} is {lengths[name]}, not {edges[name]}" for name in short)
            verdict.require(not short, "edges", f"the envelope's edges were not reached: {words}")
        return verdict


LENGTHS = ("longest_prompt_tokens", "longest_sequence_tokens", "longest_output_tokens")


def _longest(asked: Sequence[Case]) -> dict[str, int]:
    """How far some cases go."""
    return {
        "longest_prompt_tokens": max(len(case.token_ids) for case in asked),
        "longest_sequence_tokens": max(len(case.token_ids) + case.new_tokens for case in asked),
        "longest_output_tokens": max(case.new_tokens for case in asked),
    }


class TwoBoots:
    """A second boot of the group gives what the first gave."""

    name = CheckName.TWO_BOOTS
    broken = "the second boot's final norm is 2% too large on one rank"
    shows = ("logprob",)

    async def observe(self, bench: Bench) -> Observed:
        """Start the group again, and generate what `Oracle` generated."""
        if bench.reboot is None:
            raise CheckBroken("the group cannot be started again")
        if not bench.remembered:  # The oracle's check was done by a battery before this one.
            bench.remembered |= await alone_on_each_rank(bench)
        await bench.reboot()
        return await self._again(bench)

    async def observe_broken(self, bench: Bench) -> Observed:
        """The second boot with wrong weights."""
        async with bench.broken(Break.WEIGHTS, bench.rig.ranks()[-1]):
            return await self._again(bench, only_rank=bench.rig.ranks()[-1])

    async def _again(self, bench: Bench, only_rank: int | None = None) -> Observed:
        rows = []
        for case in alone_cases(bench.subject, bench.scale):
            for rank in bench.rig.ranks():
                if only_rank is None or rank == only_rank:
                    ours = await bench.rig.generate(case, rank)
                    first = bench.remembered[f"{rank}/{case.name}"]
                    rows.append(difference_row(case, bench.difference(ours, first)))
            if only_rank is not None:
                break  # One case is enough for what is to be wrong in all.
        return {"differences": rows}

    def judge(self, seen: Observed, subject: Subject, scale: Scale) -> Verdict:
        """As with the oracle."""
        verdict = Verdict()
        judge_differences(verdict, seen, subject)
        return verdict


class PaddingPoison:
    """What lies in the rows behind those that count changes nothing."""

    name = CheckName.PADDING_POISON
    broken = "the poison reaches the last row that counts"
    shows = ("tokens",)

    async def observe(self, bench: Bench) -> Observed:
        """Batches of growing size with poisoned rows on every rank."""
        return await self._with(bench, Break.POISON)

    async def observe_broken(self, bench: Bench) -> Observed:
        """The same, one row too far."""
        return await self._with(bench, Break.POISON_REACHES)

    async def _with(self, bench: Bench, what: Break) -> Observed:
        ranks = len(bench.rig.ranks())
        tokens = min(bench.scale.batch_tokens, bench.subject.envelope.traffic.output_max_tokens)
        most = min(bench.scale.batch_cases, bench.subject.envelope.seats_max)
        rows = []
        for size in sorted({1, 2, most}):
            asked = cases([5] * (size * ranks), tokens, bench.scale.seed + size)
            right = await bench.oracle(asked)
            async with _on_all_ranks(bench, what):
                ours = await bench.all_at_once(asked)
            rows += [
                difference_row(case, bench.difference(mine, wanted))
                for case, mine, wanted in zip(asked, ours, right, strict=True)
            ]
        return {"differences": rows}

    def judge(self, seen: Observed, subject: Subject, scale: Scale) -> Verdict:
        """As with the oracle."""
        verdict = Verdict()
        judge_differences(verdict, seen, subject)
        return verdict


@contextlib.asynccontextmanager
async def _on_all_ranks(bench: Bench, what: Break) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for rank in bench.rig.ranks():
            await stack.enter_async_context(bench.broken(what, rank))
        yield
