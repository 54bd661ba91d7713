"""What the transports share: when a step is a worst-token one, and what is counted of it."""

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol  # DeepEP's buffers and torch's tensors are untyped here

from splitwave.engine.vllm.worst_token.collectives import CollectiveLog
from splitwave.engine.vllm.worst_token.marks import NoMarks


class Transport(enum.StrEnum):
    """Which of DeepEP's buffers carries the tokens."""

    V2 = "v2"
    LEGACY = "legacy"


class Marks(Protocol):
    """Counters of ended collectives (`marks`)."""

    def mark(self, kind: str, microbatch: int = 0) -> None:
        """Enqueue that a collective has ended."""

    def read(self) -> list[int]:
        """Return the counts."""


class WorstTokenBuffer(Protocol):
    """What vLLM's prepare and finalize call, beside attributes of DeepEP's own buffer."""

    def dispatch(self, x: Any, **arguments: Any) -> tuple[Any, ...]:
        """Send rows to the ranks of their experts, as DeepEP's buffer of that name."""

    def combine(self, x: Any, handle: Any, **arguments: Any) -> tuple[Any, ...]:
        """Bring results back and sum them, as DeepEP's buffer of that name."""


@dataclass(slots=True)
class State:
    """Of this process's worker: one thread launches, others read."""

    log: CollectiveLog = field(default_factory=CollectiveLog)
    marks: Marks = field(default_factory=NoMarks)
    warming: bool = False
    """The forward that runs now warms a graph up, so it takes the graph's path."""
    replays_in_flight: bool = False
    """A graph was replayed since the stream was last drained: its kernels may still write the
    counters that a host-synced dispatch polls."""
    drains: int = 0
    watched: bool = False
    """The wedge watch runs: it does for the rest of the process."""

    def is_worst(self) -> bool:
        """True if the collectives launched now belong to a graph: captured, or its warm-up."""
        return self.warming or is_capturing()


def is_capturing() -> bool:
    """True if what is launched now is captured and does not run."""
    import torch

    return bool(torch.cuda.is_current_stream_capturing())


def rows_of(x: Any) -> int:
    """Return the rows that are dispatched; scales may come beside them."""
    return int((x[0] if isinstance(x, tuple) else x).shape[0])


def microbatch() -> int:
    """Return the microbatch whose thread calls; 0 without overlap."""
    from vllm.v1.worker.ubatching import dbo_current_ubatch_id

    return int(dbo_current_ubatch_id())


def is_overlapped() -> bool:
    """True if this step is split into microbatches."""
    from vllm.v1.worker.ubatching import dbo_enabled

    return bool(dbo_enabled())
