"""The GPU as the hammer uses it, and a stand-in on the CPU that captures nothing."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from bench.shared_gpu import device


class Device(Protocol):
    """Where graphs are captured and replayed."""

    name: str
    place: torch.device

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture `run` as a graph; returns what replays it."""

    def ticket(self) -> Callable[[], None]:
        """Return what waits until the device has done all it was given so far."""

    def spin(self, ms: float) -> None:
        """Keep the device busy."""

    def drain(self) -> None:
        """Wait until the device has nothing to do."""

    def lanes(self) -> list[Callable[[], None]]:
        """Return what switches to each of two streams, then what joins them again."""

    def channel(self) -> AbstractContextManager[None]:
        """Within it, work goes to the one stream that carries all microbatches' collectives."""

    def peek(self, marks: torch.Tensor) -> list[int] | None:
        """Read marks while the device works; None if it does not answer in time."""

    def versions(self) -> dict[str, str]:
        """Return what figures depend on."""


class Cpu:
    """A device on which a graph is the calls themselves."""

    name = "CPU"
    place = torch.device("cpu")

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return `run`."""
        return run

    def ticket(self) -> Callable[[], None]:
        """Nothing is ever outstanding."""
        return lambda: None

    def spin(self, ms: float) -> None:
        """Sleep."""
        time.sleep(ms / 1000)

    def drain(self) -> None:
        """Nothing is ever outstanding."""

    def lanes(self) -> list[Callable[[], None]]:
        """There is one lane only."""
        return [lambda: None, lambda: None, lambda: None]

    def channel(self) -> AbstractContextManager[None]:
        """There is one stream only."""
        return nullcontext()

    def peek(self, marks: torch.Tensor) -> list[int] | None:
        """Read them."""
        return [int(mark) for mark in marks.tolist()]

    def versions(self) -> dict[str, str]:
        """Return what figures depend on."""
        return {"torch": torch.__version__}


PEEK_S = 0.5
"""How long a look at the marks may take."""
SPIN_CYCLES = 20_000_000


class Cuda:
    """One GPU, on a stream of its own for everything that is not captured."""

    def __init__(self, rank: int, pool: str, *, one_channel: bool) -> None:
        number = device(rank)
        torch.cuda.set_device(number)
        self.place = torch.device("cuda", number)
        self.name = torch.cuda.get_device_name(number)
        torch.cuda.set_stream(torch.cuda.Stream(self.place))
        self._pool = torch.cuda.graph_pool_handle() if pool == "shared" else None
        self._side = torch.cuda.Stream(self.place)
        self._microbatches = (torch.cuda.Stream(self.place), torch.cuda.Stream(self.place))
        self._collectives = torch.cuda.Stream(self.place) if one_channel else None
        self._seen = torch.zeros(8, dtype=torch.int64, pin_memory=True)
        self._peeked: torch.cuda.Event | None = None
        self._peeking = threading.Lock()
        self._cycles_per_ms = self._calibrate()

    def _calibrate(self) -> float:
        torch.cuda._sleep(1000)  # noqa: SLF001  # torch's one way to keep a GPU busy
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(SPIN_CYCLES)  # noqa: SLF001  # torch's one way to keep a GPU busy
        end.record()
        end.synchronize()
        return float(SPIN_CYCLES / begin.elapsed_time(end))

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture `run`. The mode lets other threads (watchdogs, ours) go on calling CUDA."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        torch.cuda.synchronize()

        def replay() -> None:
            graph.replay()

        return replay

    def ticket(self) -> Callable[[], None]:
        """Return what waits for all that the current stream was given so far."""
        event = torch.cuda.Event()
        event.record()

        def wait() -> None:
            event.synchronize()

        return wait

    def spin(self, ms: float) -> None:
        """Keep the current stream busy."""
        torch.cuda._sleep(int(ms * self._cycles_per_ms))  # noqa: SLF001  # torch's one way to keep a GPU busy

    def drain(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream().synchronize()

    def lanes(self) -> list[Callable[[], None]]:
        """Fork from the current stream: the first two switch streams, the last joins them."""
        origin = torch.cuda.current_stream()

        def enter(stream: torch.cuda.Stream) -> Callable[[], None]:
            stream.wait_stream(origin)
            return lambda: torch.cuda.set_stream(stream)

        def join() -> None:
            torch.cuda.set_stream(origin)
            for stream in self._microbatches:
                origin.wait_stream(stream)

        return [*(enter(stream) for stream in self._microbatches), join]

    @contextmanager
    def channel(self) -> Iterator[None]:
        """Leave the current stream for the collectives' own, and join it again behind them."""
        if self._collectives is None:
            yield
            return
        origin = torch.cuda.current_stream()
        self._collectives.wait_stream(origin)
        torch.cuda.set_stream(self._collectives)
        try:
            yield
        finally:
            torch.cuda.set_stream(origin)
            origin.wait_stream(self._collectives)

    def peek(self, marks: torch.Tensor) -> list[int] | None:
        """Copy the marks on a stream of their own; a copy that hangs is not repeated."""
        with self._peeking, torch.cuda.device(self.place), torch.cuda.stream(self._side):
            if self._peeked is None:
                self._seen[: marks.numel()].copy_(marks, non_blocking=True)
                self._peeked = torch.cuda.Event()
                self._peeked.record()
            end_s = time.monotonic() + PEEK_S
            while not self._peeked.query():
                if time.monotonic() > end_s:
                    return None
                time.sleep(0.002)
            self._peeked = None
            return [int(mark) for mark in self._seen[: marks.numel()].tolist()]

    def versions(self) -> dict[str, str]:
        """Return what figures depend on."""
        return {
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
            "gpu": self.name,
        }
