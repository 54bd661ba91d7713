"""A transport for ranks without a GPU: rows are placed as DeepEP places them."""

import torch
import torch.distributed as dist

from bench.hammer.settings import Settings
from bench.hammer.transports import Received

STALE = 0
"""An expert that exists: what lies in rows past the received ones."""


class DryTransport:
    """Gathers everything everywhere and lets each rank keep what is its own."""

    def __init__(self, settings: Settings) -> None:
        self._ranks = settings.ranks
        self._local = settings.experts // settings.ranks
        self._sanitise = settings.sanitise
        self._rank = dist.get_rank()

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(rows) for _ in range(self._ranks)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, lane: int
    ) -> Received:
        """Send rows: what came lies first, what lies past it is poison."""
        every_x, every_ids, every_weights = (self._gathered(t) for t in (x, ids, weights))
        here = every_ids - self._rank * self._local
        here = torch.where((here >= 0) & (here < self._local) & (every_ids >= 0), here, -1)
        source = (here >= 0).any(dim=1).nonzero().flatten()
        rows = Received(
            x=torch.full_like(every_x, torch.nan),
            ids=torch.full_like(every_ids, STALE),
            weights=torch.full_like(every_weights, torch.nan),
            handle=source,
            count=torch.tensor([len(source)]) if self._sanitise else None,
        )
        rows.x[: len(source)] = every_x[source]
        rows.ids[: len(source)] = here[source]
        rows.weights[: len(source)] = every_weights[source]
        return rows

    def combine(self, y: torch.Tensor, received: Received, lane: int) -> torch.Tensor:
        """Send rows back."""
        assert isinstance(received.handle, torch.Tensor)
        back = torch.zeros_like(y)
        back[received.handle] = y[: len(received.handle)]
        parts = [torch.empty_like(part) for part in back.chunk(self._ranks)]
        dist.all_to_all(parts, list(back.chunk(self._ranks)))
        return torch.stack(parts).float().sum(dim=0).to(y.dtype)

    def eager(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Received:
        """Not under test here."""
        raise NotImplementedError("host-synchronised dispatches belong to legacy_unfixed")

    def poison(self) -> None:
        """There are no buffers."""
