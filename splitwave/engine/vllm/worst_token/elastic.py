"""Worst-token transport over DeepEP V2: its ElasticBuffer, never synchronised with the host.

vLLM's prepare and finalize for this buffer already ask for no synchronisation once graphs are
wanted. Added here: the receive bound is the padded step's own (vLLM rounds it up to a power of
two), topk ids are not copied once more a layer, collectives are numbered, and tests may poison
what lies past the received rows, with or without the sanitising that must make it harmless.
"""

from typing import Any  # DeepEP's buffers and torch's tensors are untyped here

from splitwave.engine.vllm.switches import Fault, fault
from splitwave.engine.vllm.worst_token.rows import receive_bound
from splitwave.engine.vllm.worst_token.transport import State, microbatch, rows_of

POISON_WEIGHT = 1.0e4


class Unsanitised:
    """A handle that claims all rows were received: what a missing check of padding looks like."""

    def __init__(self, handle: Any) -> None:
        import torch

        self.inner = handle
        true_count = handle.psum_num_recv_tokens_per_scaleup_rank
        self.psum_num_recv_tokens_per_scaleup_rank = torch.full_like(true_count, 2**30)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class ElasticTransport:
    """Stands for `deep_ep.ElasticBuffer` before vLLM's DeepEPV2PrepareAndFinalize."""

    def __init__(self, buffer: Any, state: State) -> None:
        self._buffer = buffer
        self._state = state
        self._poisoned = fault(Fault.POISON_PADDING)
        self._unsanitised = fault(Fault.NO_SANITISE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def dispatch(self, x: Any, **arguments: Any) -> tuple[Any, ...]:
        """As ElasticBuffer.dispatch; in a graph's step, bounded by that step's rows."""
        most = int(self._buffer.num_max_tokens_per_rank)
        if self._state.is_worst():
            arguments["num_max_tokens_per_rank"] = receive_bound(rows_of(x), most)
            # The router's ids live until combine, which the handle keeps them for.
            arguments["do_handle_copy"] = False
        elif (asked := arguments.get("num_max_tokens_per_rank")) is not None:
            # vLLM rounds up to a power of two, past what the buffer was made for.
            arguments["num_max_tokens_per_rank"] = min(asked, most)
        at = microbatch()
        self._state.log.launched("dispatch", at)
        received, ids, weights, handle, event = self._buffer.dispatch(x=x, **arguments)
        self._state.marks.mark("dispatch", at)
        if self._poisoned and ids is not None:
            self._poison(received, ids, weights, handle)
        if self._unsanitised:
            handle = Unsanitised(handle)
        return received, ids, weights, handle, event

    def combine(self, x: Any, handle: Any, **arguments: Any) -> tuple[Any, ...]:
        """As ElasticBuffer.combine."""
        at = microbatch()
        self._state.log.launched("combine", at)
        inner = handle.inner if isinstance(handle, Unsanitised) else handle
        combined: tuple[Any, ...] = self._buffer.combine(x=x, handle=inner, **arguments)
        self._state.marks.mark("combine", at)
        return combined

    def _poison(self, received: Any, ids: Any, weights: Any, handle: Any) -> None:
        """Fill what lies past the received rows with what harms most: valid ids, and NaN."""
        import torch

        rows = received[0] if isinstance(received, tuple) else received
        count = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        past = (torch.arange(ids.shape[0], device=ids.device) >= count).unsqueeze(1)
        ids.masked_fill_(past, 0)
        weights.masked_fill_(past, POISON_WEIGHT)
        if rows.dtype.is_floating_point and rows.element_size() > 1:
            rows.masked_fill_(past, float("nan"))
