"""The front's side of the probe: what the battery asks of a started group."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any  # vLLM's request

from splitwave.engine.port import EngineRequest
from splitwave.engine.vllm.adapter import VllmEngine
from splitwave.engine.vllm.probe.breaks import Break


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank in which it computed tokens for requests."""

    number: int
    tokens: int
    cpu_s: float
    ended_at_s: float
    """On this host's monotonic clock."""


class Probe:
    """Looks into a group that was started with SPLITWAVE_PROBE=1, and breaks it on purpose."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    async def steps(self, rank: int, since: int = 0) -> list[Step]:
        """Steps of a rank with a number above `since`. The log begins with the first call."""
        rows = await self._engine.call_rank(rank, "splitwave_probe_steps", since)
        return [Step(*row) for row in rows]

    async def memory_bytes(self) -> list[dict[str, int]]:
        """Bytes by where they are (`host_bytes`, `device_bytes`), in rank order."""
        return list(await self._engine.call_ranks("splitwave_probe_memory"))

    async def walk(self, plans: Sequence[Sequence[int]], needed: int) -> None:
        """Give each rank the sizes of its next steps; they begin once `needed` requests run."""
        for rank, plan in enumerate(plans):
            await self._engine.call_rank(rank, "splitwave_probe_walk", list(plan), needed)

    async def walked(self) -> list[tuple[list[int], int]]:
        """Sizes that were run and steps left, in rank order."""
        found = await self._engine.call_ranks("splitwave_probe_walked")
        return [(list(sizes), left) for sizes, left in found]

    async def end_walk(self) -> None:
        """Let steps be as wide as they are again."""
        await self.walk([()] * self._engine.description.ranks, 0)

    async def start_break(self, what: Break, rank: int, argument: float = 0.0) -> None:
        """Break something on one rank."""
        await self._engine.call_rank(rank, "splitwave_probe_break", what.value, argument)

    @contextlib.contextmanager
    def clipping(self, tokens: int) -> Iterator[None]:
        """A front that is broken: a prompt that is too long is cut to `tokens`, and runs."""
        engine, longest = self._engine, self._engine.description.model_len_max_tokens
        whole = engine._prepare  # noqa: SLF001  # each request to the group passes it

        def clip(request: EngineRequest) -> Any:  # vLLM's request
            if len(request.token_ids) >= longest:
                request = replace(request, token_ids=request.token_ids[:tokens])
            return whole(request)

        vars(engine)["_prepare"] = clip
        try:
            yield
        finally:
            vars(engine)["_prepare"] = whole

    async def end_break(self, what: Break, rank: int) -> None:
        """Take it back."""
        await self._engine.call_rank(rank, "splitwave_probe_mend", what.value)
