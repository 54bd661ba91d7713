"""The rows that a hammer sends: inputs known in advance, experts that scale, and the check.

Expert e multiplies a row by scale[e]. A token's result is therefore
x[t] times the product over the layers of sum_k weight[t, k] * scale[id[t, k]], and each rank can
say beforehand what every row must be, within the rounding of bfloat16.
"""

from dataclasses import dataclass

import torch

from bench.hammer.settings import Settings
from splitwave.certify.hammer.walk import Step

BFLOAT16_HALF = 2.0**-8
"""Largest relative error of one rounding to bfloat16."""


def tolerance(layers: int) -> float:
    """Return the largest relative error of a right row.

    A layer rounds twice, an expert's product and the sum over two ranks, and all terms have one
    sign, so that nothing cancels. A quarter more covers float32. Above 4 layers the least slot of a
    token can hide in it; the loads, which are exact, still show one that is lost.
    """
    return float(((1 + BFLOAT16_HALF) ** (2 * layers) - 1) * 1.25)


@dataclass(slots=True)
class Pool:
    """Inputs of this rank, and the routing of all ranks.

    Shapes: x [entries, rows, hidden], ids [ranks, entries, layers, rows, topk], weights
    [entries, layers, rows, topk], gain [layers, entries, rows], scale [experts].
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gain: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def build(cls, settings: Settings, rank: int, place: torch.device) -> "Pool":
        """Draw everything from the seed, on the CPU, so that all machines agree."""
        entries, rows = settings.walk().entries, max(settings.sizes)
        shape = (entries, settings.layers, rows)
        every = [_routing(settings, shape, other) for other in range(settings.ranks)]
        drawn = torch.Generator().manual_seed(settings.seed * 1000 + 500 + rank)
        scale = 0.75 + 0.5 * torch.rand(
            settings.experts, generator=torch.Generator().manual_seed(settings.seed)
        )
        weights = 0.75 + 0.5 * torch.rand((*shape, settings.topk), generator=drawn)
        weights /= settings.topk
        gain = (weights * scale[every[rank]]).sum(dim=-1).transpose(0, 1)
        x = torch.randn((entries, rows, settings.hidden), generator=drawn).bfloat16()
        return cls(
            x=x.to(place),
            ids=torch.stack(every).to(place),
            weights=weights.to(place),
            gain=gain.contiguous().to(place),
            scale=scale.to(place),
        )


def _routing(settings: Settings, shape: tuple[int, int, int], rank: int) -> torch.Tensor:
    """Draw distinct experts for each row; every fourth entry sends all rows to a single rank."""
    drawn = torch.Generator().manual_seed(settings.seed * 1000 + rank)
    chances = torch.rand((*shape, settings.experts), generator=drawn)
    local = settings.experts // settings.ranks
    for only in range(settings.ranks):
        crowded = chances[1 + only :: 4].unflatten(-1, (settings.ranks, local))
        crowded[..., only, :] += 1.0
    return chances.topk(settings.topk, dim=-1).indices


class Tally:
    """What the checks found, kept on the device until somebody reads it."""

    FIELDS = ("wrong_replays", "wrong_rows", "replay", "row", "wrong_loads", "load_replay")

    def __init__(self, place: torch.device) -> None:
        self._found = torch.tensor([0, 0, -1, -1, 0, -1], device=place)

    def rows(self, bad: torch.Tensor, replay: int) -> None:
        """Take which rows of a replay are wrong: [rows] of bool."""
        found, count = self._found, bad.sum()
        first = (found[2] < 0) & (count > 0)
        found[0] += count > 0
        found[1] += count
        found[3] = torch.where(first, bad.long().argmax(), found[3])
        found[2] = torch.where(first, replay, found[2])

    def loads(self, bad: torch.Tensor, replay: int) -> None:
        """Take whether experts got other rows than were sent to them: a bool."""
        found = self._found
        found[5] = torch.where((found[5] < 0) & bad, replay, found[5])
        found[4] += bad

    def read(self) -> dict[str, int]:
        """Wait for the device and return what was found."""
        return dict(zip(self.FIELDS, (int(value) for value in self._found.tolist()), strict=True))


class Rows:
    """The static inputs and outputs that all graphs share, as a serving engine's graphs do."""

    def __init__(self, settings: Settings, rank: int, place: torch.device) -> None:
        rows, layers, topk = max(settings.sizes), settings.layers, settings.topk
        self._settings, self._rank = settings, rank
        self.pool = Pool.build(settings, rank, place)
        self.local = settings.experts // settings.ranks
        self.x = torch.zeros((rows, settings.hidden), dtype=torch.bfloat16, device=place)
        self.ids = torch.full((layers, rows, topk), -1, dtype=torch.int64, device=place)
        self.weights = torch.zeros((layers, rows, topk), device=place)
        self.padding = torch.full((rows, 1), torch.nan, dtype=torch.bfloat16, device=place)
        """NaN for a padding row, else 0: added to every layer's input."""
        self.out = torch.zeros_like(self.x)
        self.load = torch.zeros((layers, self.local + 1), dtype=torch.int64, device=place)
        """Slots that each local expert got, and, last, those that were none of its own."""
        self.tally = Tally(place)
        worst = settings.ranks * rows
        drawn = torch.Generator().manual_seed(rank)
        self.stale = torch.randint(self.local, (worst, topk), generator=drawn).to(place)
        """Experts that exist, for rows that do not."""
        self._tolerance = tolerance(layers)
        self._ones = torch.ones(worst * topk, dtype=torch.int64, device=place)

    def stage(self, step: Step) -> None:
        """Lay out a step's inputs; what is padding is poison."""
        n, entry, pool = step.tokens[self._rank], step.entries[self._rank], self.pool
        if n:
            torch.mul(pool.x[entry, :n], step.factor, out=self.x[:n])
            self.ids[:, :n].copy_(pool.ids[self._rank, entry, :, :n])
            self.weights[:, :n].copy_(pool.weights[entry, :, :n])
            self.padding[:n].zero_()
        self.x[n:].fill_(torch.nan)
        self.ids[:, n:].fill_(-1)
        self.weights[:, n:].fill_(torch.nan)
        self.padding[n:].fill_(torch.nan)
        self.out.fill_(torch.nan)
        self.load.zero_()

    def expert(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, count: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the local experts make of received rows, and the ids as they were believed.

        With `count` the rows past it are padding, whatever their ids say.
        """
        if count is not None:
            real = torch.arange(ids.shape[0], device=ids.device) < count
            ids = ids.masked_fill(~real[:, None], -1)
        scale = self.pool.scale[self._rank * self.local :][: self.local]
        own = (weights * scale[ids.clamp(0, self.local - 1)]).masked_fill(ids < 0, 0.0)
        return (x.float() * own.sum(dim=1, keepdim=True)).bfloat16(), ids

    def count_load(self, layer: int, ids: torch.Tensor) -> None:
        """Add to a layer's loads what a dispatch brought."""
        slots = ids.masked_fill((ids < 0) | (ids >= self.local), self.local).flatten()
        self.load[layer].scatter_add_(0, slots, self._ones[: slots.numel()])

    def expected_load(self, step: Step) -> torch.Tensor:
        """Return the slots of each local expert [layers, local]."""
        load = torch.zeros_like(self.load)
        for rank, (n, entry) in enumerate(zip(step.tokens, step.entries, strict=True)):
            here = self.pool.ids[rank, entry, :, :n].flatten(1) - self._rank * self.local
            slots = torch.where((here >= 0) & (here < self.local), here, self.local)
            load.scatter_add_(1, slots, torch.ones_like(slots))
        return load[:, : self.local]

    def check(self, step: Step, replay: int) -> None:
        """Compare a replay's rows and loads with the reference, without waiting for the device."""
        n, entry = step.tokens[self._rank], step.entries[self._rank]
        gain = self.pool.gain[:, entry, :n].prod(dim=0)
        expected = self.pool.x[entry, :n].float() * (gain * step.factor)[:, None]
        self.tally.rows(self._wrong(self.out[:n], expected, self._tolerance), replay)
        wrong = (self.load[:, : self.local] != self.expected_load(step)).any()
        self.tally.loads(wrong, replay)

    def check_eager(self, step: Step, out: torch.Tensor, replay: int) -> None:
        """The same for the single layer of a host-synchronised dispatch."""
        n, entry = out.shape[0], step.entries[self._rank]
        gain = self.pool.gain[0, entry, :n] * step.factor
        expected = self.pool.x[entry, :n].float() * gain[:, None]
        self.tally.rows(self._wrong(out, expected, tolerance(1)), replay)

    @staticmethod
    def _wrong(out: torch.Tensor, expected: torch.Tensor, bound: float) -> torch.Tensor:
        # Written so that NaN is wrong.
        right = (out.float() - expected).abs() <= bound * expected.abs() + 1e-30
        return torch.cat((~right.all(dim=1), right.new_zeros(1)))

    def received_rows(self, step: Step, tokens: tuple[int, ...]) -> int:
        """Return how many rows a dispatch of each rank's first `tokens` brings here; waits."""
        count = 0
        for rank, (n, entry) in enumerate(zip(tokens, step.entries, strict=True)):
            here = self.pool.ids[rank, entry, 0, :n] - self._rank * self.local
            count += int(((here >= 0) & (here < self.local)).any(dim=1).sum())
        return count
