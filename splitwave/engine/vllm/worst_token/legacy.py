"""Worst-token transport over DeepEP's legacy Buffer: `num_worst_tokens`, within one host.

Each captured size has a buffer of its own, and so has each size of a microbatch, so that no two
graphs share queues, barrier signals or offsets; the microbatches of one graph do, and take turns.
Steps outside the graphs keep the buffer that vLLM made and its host-synced dispatch; the stream is
drained before the first of them after a replay, because replayed kernels go on writing the counters
that the host polls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any  # DeepEP's buffers and torch's tensors are untyped here

from splitwave.engine.vllm.switches import Fault, fault
from splitwave.engine.vllm.worst_token.rows import worst_rows
from splitwave.engine.vllm.worst_token.transport import (
    State,
    is_capturing,
    is_overlapped,
    microbatch,
    rows_of,
)


@dataclass(frozen=True, slots=True)
class Sent:
    """DeepEP's handle, and the buffer that it belongs to."""

    buffer: Any
    handle: Any


class LegacyTransport:
    """Stands for `deep_ep.Buffer` before vLLM's DeepEPHTPrepareAndFinalize.

    `make_buffer(hidden_bytes)` makes a further buffer; every rank of the group must call it
    together, which they do: all warm up the same sizes in the same order.
    """

    def __init__(self, buffer: Any, make_buffer: Callable[[int], Any], state: State) -> None:
        self._buffer = buffer
        self._make_buffer = make_buffer
        self._state = state
        self._of_size: dict[tuple[int, bool], Any] = {}
        self._shared = fault(Fault.SHARED_BUFFER)
        self._undrained = fault(Fault.NO_DRAIN)
        self._poisoned = fault(Fault.POISON_PADDING)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def dispatch(self, x: Any, **arguments: Any) -> tuple[Any, ...]:
        """As Buffer.dispatch; in a graph's step without asking the host, joined to its stream."""
        at = microbatch()
        buffer = self._buffer
        if self._state.is_worst():
            rows = rows_of(x)
            buffer = self._buffer_for(rows, x)
            arguments["num_worst_tokens"] = worst_rows(rows, buffer.group_size)
            arguments["async_finish"] = False
        elif self._state.replays_in_flight and not self._undrained:
            self._drain()
        self._state.log.launched("dispatch", at)
        received, ids, weights, counts, handle, event = buffer.dispatch(x=x, **arguments)
        self._state.marks.mark("dispatch", at)
        if self._poisoned and self._state.is_worst():
            _poison(received, ids, weights)
        return received, ids, weights, counts, Sent(buffer, handle), event

    def combine(self, x: Any, handle: Any, **arguments: Any) -> tuple[Any, ...]:
        """As Buffer.combine, through the buffer that the rows came by."""
        at = microbatch()
        if self._state.is_worst():
            arguments["async_finish"] = False
        self._state.log.launched("combine", at)
        combined: tuple[Any, ...] = handle.buffer.combine(x=x, handle=handle.handle, **arguments)
        self._state.marks.mark("combine", at)
        return combined

    def _buffer_for(self, rows: int, x: Any) -> Any:
        """Return the buffer of a size; it is made in the warm-up of the size's graph."""
        if self._shared:
            return self._buffer
        size = rows, is_overlapped()
        if size not in self._of_size:
            if is_capturing():
                raise RuntimeError(f"a graph of {rows} rows is captured without its warm-up")
            hidden = (x[0] if isinstance(x, tuple) else x).shape[1]
            self._of_size[size] = self._make_buffer(int(hidden) * 2)
        return self._of_size[size]

    def _drain(self) -> None:
        import torch

        torch.cuda.current_stream().synchronize()
        self._state.replays_in_flight = False
        self._state.drains += 1


def _poison(received: Any, ids: Any, weights: Any) -> None:
    """Fill rows that no expert is asked for with NaN; DeepEP has marked their ids already."""
    rows = received[0] if isinstance(received, tuple) else received
    unsent = (ids == -1).all(dim=1, keepdim=True)
    weights.masked_fill_(unsent, 1.0e4)
    if rows.dtype.is_floating_point and rows.element_size() > 1:
        rows.masked_fill_(unsent, float("nan"))


def buffer_maker(group: Any) -> Callable[[int], Any]:
    """Return what makes a buffer for `hidden_bytes` a row, just large enough for its queues."""

    def make(hidden_bytes: int) -> Any:
        import deep_ep

        ranks = group.size()
        configs = (
            deep_ep.Buffer.get_dispatch_config(ranks),
            deep_ep.Buffer.get_combine_config(ranks),
        )
        nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, ranks) for config in configs)
        return deep_ep.Buffer(group, int(nvl_bytes), 0, explicitly_destroy=True)

    return make
