"""The graphs under the hammer: one a size, each of several layers of dispatch, expert, combine."""

from collections.abc import Callable

import torch

from bench.hammer.device import Device
from bench.hammer.rows import Rows
from bench.hammer.settings import Settings
from bench.hammer.transports import Received, Transport

STAGES = ("entered", "dispatched", "computed", "combined")
STARTED, FINISHED, LANE = 0, 1, 2
"""Places in the marks: replay begun, replay ended, then the stage of each microbatch."""


def stage_name(mark: int) -> str:
    """Return what a lane's mark says."""
    return f"layer {mark // len(STAGES)} {STAGES[mark % len(STAGES)]}"


class Graphs:
    """Captures and replays; `marks` are written by the device as it goes."""

    def __init__(
        self, settings: Settings, device: Device, transport: Transport | None, rows: Rows
    ) -> None:
        self._settings, self._device = settings, device
        self._transport, self._rows = transport, rows
        self._replays: dict[int, Callable[[], None]] = {}
        self._kept: list[Received] = []
        self._keeping = False
        self._crossing: list[object] = []
        """What one stream made and another reads: the allocator must not give it away meanwhile."""
        self.lanes = 2 if settings.tbo else 1
        self.marks = torch.zeros(LANE + self.lanes, dtype=torch.int64, device=device.place)

    def warm(self, size: int) -> None:
        """Run the stack of a size once outside a graph: compiles its kernels. Collective."""
        self.stack(size)
        self._device.drain()

    def capture(self, size: int) -> None:
        """Capture the graph of a size."""
        self._keeping = self._settings.pool == "own"
        self._replays[size] = self._device.capture(lambda: self.stack(size))
        self._keeping = False

    def replay(self, size: int, replay: int) -> None:
        """Run the graph of a size, between the marks of its replay."""
        self.mark(STARTED, replay + 1)
        self._replays[size]()

    def mark(self, place: int, value: int) -> None:
        """Have the device write a mark when it gets there."""
        self.marks[place : place + 1].fill_(value)

    def stack(self, size: int) -> None:
        """Run all layers on the first `size` rows of the static inputs."""
        self._crossing = []
        if self.lanes == 1:
            self._serial(size)
        else:
            self._two_batch(size)

    def _serial(self, size: int) -> None:
        rows = slice(0, size)
        hidden = self._rows.x[rows]
        for layer in range(self._settings.layers):
            received = self._dispatch(layer, 0, rows, hidden)
            hidden = self._combine(layer, 0, self._compute(layer, 0, received), received)
        self._rows.out[rows].copy_(hidden)

    def _two_batch(self, size: int) -> None:
        """Interleave two halves: one computes while the other's rows travel."""
        half = size // 2
        rows = (slice(0, half), slice(half, size))
        first, second, join = self._device.lanes()
        hidden = [self._rows.x[part] for part in rows]
        for layer in range(self._settings.layers):
            received = []
            for lane, enter in enumerate((first, second)):
                enter()
                received.append(self._dispatch(layer, lane, rows[lane], hidden[lane]))
            for lane, enter in enumerate((first, second)):
                enter()
                y = self._compute(layer, lane, received[lane])
                hidden[lane] = self._combine(layer, lane, y, received[lane])
        for lane, enter in enumerate((first, second)):
            enter()
            self._rows.out[rows[lane]].copy_(hidden[lane])
        join()

    def _stage(self, layer: int, lane: int, stage: str) -> None:
        self.mark(LANE + lane, layer * len(STAGES) + STAGES.index(stage))

    def _dispatch(self, layer: int, lane: int, part: slice, hidden: torch.Tensor) -> Received:
        self._stage(layer, lane, "entered")
        rows = self._rows
        x = hidden + rows.padding[part]
        ids, weights = rows.ids[layer, part], rows.weights[layer, part]
        assert self._transport is not None
        with self._device.channel():
            received = self._transport.dispatch(x, ids, weights, lane)
        self._hold(x, received)
        self._stage(layer, lane, "dispatched")
        return received

    def _compute(self, layer: int, lane: int, received: Received) -> torch.Tensor:
        y, ids = self._rows.expert(received.x, received.ids, received.weights, received.count)
        self._rows.count_load(layer, ids)
        self._stage(layer, lane, "computed")
        return y

    def _combine(self, layer: int, lane: int, y: torch.Tensor, received: Received) -> torch.Tensor:
        assert self._transport is not None
        with self._device.channel():
            out = self._transport.combine(y, received, lane)
        self._hold(y, out)
        self._poison(received)
        self._stage(layer, lane, "combined")
        return out

    def _hold(self, *tensors: object) -> None:
        if self.lanes > 1:
            self._crossing += tensors

    def _poison(self, received: Received) -> None:
        """Leave NaN and experts that exist where the next replay's padding rows will be."""
        received.x.fill_(torch.nan)
        received.ids.copy_(self._rows.stale[: received.ids.shape[0]])
        received.weights.fill_(torch.nan)
        if self._settings.pool == "own":
            self._kept.append(
                received
            )  # Else the graphs reuse each other's memory, as engines' do.
