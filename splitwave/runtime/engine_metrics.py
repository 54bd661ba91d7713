"""What engines count, for metrics and the mode guard: asked of them at most once a second, and
never waited for long.

A rank answers between two steps, so a question can take as long as its longest step.
A scrape waits a moment and then takes what was known before.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence

from prometheus_client import Metric

from splitwave.core.worker import RankCounters, WorkerDescription
from splitwave.runtime.metrics import Family, counter, gauge

log = logging.getLogger(__name__)

AGE_MAX_S = 1.0
"""Counts of that age are asked for anew."""
RENEWED_EVERY_S = 2.0
"""How often they are asked if nobody scrapes, so that what a rank did not report is found too."""
WAIT_MAX_S = 0.25
"""How long a scrape waits for new ones."""

GROUP = gauge(
    "splitwave_engine_info", "1; the labels say which group is behind the worker.",
    "role", "worker_id", "group_id", "epoch", "mode", "model", "kv_layout",
)  # fmt: skip
STEPS = counter(
    "splitwave_engine_steps", "Steps by step kind, dummy steps included.", "role", "rank", "kind"
)
DUMMY_STEPS = counter(
    "splitwave_engine_dummy_steps", "Steps without work of the rank's own.", "role", "rank"
)
PROMPT_TOKENS = counter(
    "splitwave_engine_prompt_tokens",
    "Tokens computed beyond one a request and step; on a decode rank always 0.",
    "role", "rank",
)  # fmt: skip
PULLS = counter("splitwave_engine_pulls", "Handoffs pulled.", "role", "rank")
PULLED_BYTES = counter("splitwave_engine_pulled_bytes", "KV bytes pulled.", "role", "rank")
LEASES = gauge(
    "splitwave_engine_leases_live", "Finished prompts whose blocks are held.", "role", "rank"
)
BLOCKS = gauge("splitwave_engine_blocks_used", "KV blocks in use.", "role", "rank")
GUARD_REFUSALS = counter(
    "splitwave_engine_guard_refusals",
    "Requests that the guard refused or ended, by why (preempted, pull_failed, ...).",
    "role", "rank", "why",
)  # fmt: skip
AGE = gauge(
    "splitwave_engine_counters_age_seconds", "Age of the engine's counts in this scrape.", "role"
)

ENGINE_FAMILIES = (
    GROUP, STEPS, DUMMY_STEPS, PROMPT_TOKENS, PULLS, PULLED_BYTES, LEASES, BLOCKS, GUARD_REFUSALS,
    AGE,
)  # fmt: skip


class EngineCounters:
    """The last counts of a group's engines, and the one question for newer ones that is out."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[Sequence[RankCounters]]],
        worker: WorkerDescription,
        clock: Callable[[], float],
    ) -> None:
        self._ask_engine = ask
        self._now_s = clock
        self._asking: asyncio.Task[None] | None = None
        self._fresh = False
        self._at_s = self._asked_s = clock()
        self.worker = worker
        self.last: Sequence[RankCounters] = ()

    @property
    def age_s(self) -> float:
        """How old the counts are; without any, how long they have been missing."""
        return max(0.0, self._now_s() - self._at_s)

    async def refresh(self) -> None:
        """Return with counts that are new enough, or after a moment with those there are."""
        if self._asking is None:
            if self._fresh and self.age_s < AGE_MAX_S:
                return
            self._begin()
        assert self._asking is not None
        await asyncio.wait((self._asking,), timeout=WAIT_MAX_S)

    def renew(self) -> None:
        """Ask for newer counts if it is time, and wait for nothing. Call it now and then."""
        if self._asking is None and self._now_s() - self._asked_s >= RENEWED_EVERY_S:
            self._begin()

    def _begin(self) -> None:
        self._asked_s = self._now_s()
        self._asking = asyncio.create_task(self._ask(), name="engine counters")

    async def _ask(self) -> None:
        asked_s = self._now_s()
        try:
            self.last = tuple(await self._ask_engine())
            self._at_s, self._fresh = asked_s, True
        except Exception as error:  # noqa: BLE001  # Whoever drives the engine says what ails it.
            log.debug("no counts from the engine: %s", error)
        finally:
            self._asking = None

    async def close(self) -> None:
        """Give up a question that is out."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait((self._asking,))


def engine_families(counters: EngineCounters) -> Iterator[Metric]:
    """Every family, from the last counts."""
    worker, ranks = counters.worker, counters.last
    role = worker.role.value
    yield GROUP.by({tuple(str(getattr(worker, name)) for name in GROUP.labels): 1})
    yield STEPS.by(
        {(role, str(r.rank), kind): n for r in ranks for kind, n in r.steps_by_kind.items()}
    )
    for family, count in _BY_RANK.items():
        yield family.by({(role, str(r.rank)): count(r) for r in ranks})
    yield GUARD_REFUSALS.by(
        {(role, str(r.rank), why): n for r in ranks for why, n in r.guard_refusals.items()}
    )
    yield AGE.by_one({role: counters.age_s})


_BY_RANK: dict[Family, Callable[[RankCounters], int]] = {
    DUMMY_STEPS: lambda rank: rank.dummy_steps,
    PROMPT_TOKENS: lambda rank: rank.prefill_tokens_computed,
    PULLS: lambda rank: rank.pulls,
    PULLED_BYTES: lambda rank: rank.bytes_pulled,
    LEASES: lambda rank: rank.leases_live,
    BLOCKS: lambda rank: rank.blocks_used,
}
