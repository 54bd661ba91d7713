"""What every check is given, and what every check is."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from splitwave.certify.battery.cases import BOUNDS, Case, Difference, Generated, compare
from splitwave.certify.battery.rig import Opened, Rig
from splitwave.certify.battery.scale import Scale
from splitwave.certify.battery.verdict import Observed, Verdict
from splitwave.core.envelope import Envelope
from splitwave.core.evidence import Check as CheckName
from splitwave.core.evidence import Level
from splitwave.core.mode import Mode
from splitwave.engine.vllm.probe.breaks import Break

Generate = Callable[[Sequence[Case]], Awaitable[list[Generated]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is to be certified."""

    mode: Mode
    level: Level
    envelope: Envelope
    dtype: str
    block_size_tokens: int


@dataclass(slots=True)
class Bench:
    """One subject on its rig."""

    subject: Subject
    scale: Scale
    rig: Rig
    plain: Generate | None = None
    """Generates on a plain vLLM engine without Splitwave; None: the battery has none."""
    remembered: dict[str, Generated] = field(default_factory=dict)
    """What the group's first boot generated, by case."""
    widest_step_tokens: int = 0
    """Of the crowd that came with all limits as they are; 0: none came yet."""
    reboot: Callable[[], Awaitable[None]] | None = None
    """Starts the group under test anew."""

    async def oracle(self, cases: Sequence[Case]) -> list[Generated]:
        """Generate on the prefill group alone, eagerly, without a handoff."""
        return list(await asyncio.gather(*(self.rig.whole(case) for case in cases)))

    def oracle_words(self) -> str:
        """What `Oracle` compares with."""
        return "a plain vLLM engine" if self.plain else "the prefill group alone"

    def difference(self, ours: Generated, theirs: Generated) -> Difference:
        """How far apart two generations are, by the subject's precision."""
        return compare(ours, theirs, dtype=self.subject.dtype)

    async def all_at_once(self, cases: Sequence[Case]) -> list[Generated]:
        """Generate cases together, spread over the target's ranks."""
        ranks = len(self.rig.ranks())
        return list(
            await asyncio.gather(
                *(self.rig.generate(case, place % ranks) for place, case in enumerate(cases))
            )
        )

    async def open_all(self, cases: Sequence[Case]) -> list[Opened]:
        """Start decoding cases together, spread over the target's ranks."""
        ranks = len(self.rig.ranks())
        return list(
            await asyncio.gather(
                *(
                    self.rig.open(case.token_ids, case.sampling, place % ranks)
                    for place, case in enumerate(cases)
                )
            )
        )

    @contextlib.asynccontextmanager
    async def broken(self, what: Break, rank: int, argument: float = 0.0) -> AsyncIterator[None]:
        """The group under test with one thing wrong."""
        probe = self.rig.target.probe
        await probe.start_break(what, rank, argument)
        try:
            yield
        finally:
            await probe.end_break(what, rank)


class Named(Protocol):
    """What a result says of the check that it is of."""

    @property
    def name(self) -> CheckName:
        """Which check this is."""

    @property
    def broken(self) -> str:
        """What its positive control breaks, in words."""

    @property
    def shows(self) -> Sequence[str]:
        """Codes of the problems that the control must show, all of them."""


class Check(Named, Protocol):
    """One check of the battery. Stateless; what it sees goes into its observation."""

    async def observe(self, bench: Bench) -> Observed:
        """Do it; CheckBroken if it cannot be done to its end."""

    async def observe_broken(self, bench: Bench) -> Observed:
        """Do it with something broken, and mend that afterwards."""

    def judge(self, seen: Observed, subject: Subject, scale: Scale) -> Verdict:
        """Hold what was seen against the bounds. Pure."""


def judge_differences(verdict: Verdict, seen: Observed, subject: Subject) -> None:
    """Hold a list of differences (`differences`, as rows) against the precision's bound."""
    rows = seen["differences"]
    bound = BOUNDS[subject.dtype]
    worst = max((row["logprob"] for row in rows), default=0.0)
    wrong = [row for row in rows if row["first_token"] is not None]
    verdict.note(
        compared=len(rows),
        wrong_tokens=len(wrong),
        logprob_difference_max=round(worst, 6),
        logprob_bound=bound,
        near_ties=sum(row["near_ties"] for row in rows),
    )
    verdict.require(bool(rows), "empty", "nothing was compared")
    verdict.require(
        not wrong, "tokens", f"{len(wrong)} of {len(rows)} generations differ: {_first(wrong)}"
    )
    verdict.require(worst <= bound, "logprob", f"a log probability is off by {worst:.4g}")


def _first(wrong: Sequence[Observed]) -> str:
    return f"{wrong[0]['case']} at token {wrong[0]['first_token']}" if wrong else ""


def difference_row(case: Case, found: Difference) -> Observed:
    """One comparison as JSON."""
    return {
        "case": case.name,
        "first_token": found.first_token,
        "logprob": min(found.logprob, 1e9),
        "near_ties": found.near_ties,
    }
