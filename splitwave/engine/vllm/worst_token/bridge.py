"""DeepEP V2 behind the interface of DeepEP's legacy Buffer, so that microbatches can use it.

vLLM interleaves two microbatches only over backends whose prepare and finalize hand over to the
other one at each collective; for DeepEP that is the legacy high-throughput one. It is kept, hooks
and all, and given this buffer, which carries the rows through an ElasticBuffer.

Tensors that a collective makes on the communication stream are read on the compute stream. The
allocator does not know that, so they are held here until this microbatch's next collective is
enqueued: it waits for the microbatch's own compute, which had read them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any  # DeepEP's buffers and torch's tensors are untyped here

from splitwave.engine.vllm.switches import Fault, fault
from splitwave.engine.vllm.worst_token.rows import receive_bound
from splitwave.engine.vllm.worst_token.transport import State, microbatch, rows_of


@dataclass(frozen=True, slots=True)
class Experts:
    """Stands for the layout that the legacy buffer counts beforehand: V2 counts by itself."""

    count: int


@dataclass(slots=True)
class Held:
    """What one microbatch's collectives have made or read, and another stream may still need."""

    received: object = None
    combined: object = None
    """What combine has read stands here too: compute may go on without waiting for it."""


@dataclass(slots=True)
class ElasticBridge:
    """Stands for `deep_ep.Buffer` before vLLM's DeepEPHTPrepareAndFinalize.

    `make(hidden, topk)` makes the ElasticBuffer at the first dispatch, which all ranks do
    together, for batches of up to `tokens_max` tokens a rank.
    """

    make: Callable[[int, int], Any]
    tokens_max: int
    group_size: int
    state: State
    sms: int = 0
    """Streaming multiprocessors of a collective; 0 leaves it to DeepEP."""
    _elastic: Any = None
    _held: dict[int, Held] = field(default_factory=dict)

    @staticmethod
    def capture() -> None:
        """Return no event: collectives start on a stream that has waited for compute already."""

    def get_dispatch_layout(
        self, topk_idx: Any, num_experts: int, **_unused: Any
    ) -> tuple[Any, ...]:
        """As Buffer.get_dispatch_layout, but only the number of experts is passed on."""
        return None, None, Experts(num_experts), None, None

    def dispatch(
        self, x: Any, *, topk_idx: Any, topk_weights: Any, num_tokens_per_expert: Experts,
        **_unused: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """As Buffer.dispatch with `num_worst_tokens`; ids of rows that did not come are -1."""
        at = microbatch()
        elastic = self._made(x, topk_idx)
        held = self._held.setdefault(at, Held())
        bound = self.tokens_max
        if self.state.is_worst():
            bound = receive_bound(rows_of(x), self.tokens_max)
        self.state.log.launched("dispatch", at)
        received, ids, weights, handle, event = elastic.dispatch(
            x=x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_experts=num_tokens_per_expert.count,
            num_max_tokens_per_rank=bound,
            num_sms=self.sms,
            do_expand=False,
            do_cpu_sync=False,
            do_handle_copy=False,
            async_with_compute_stream=False,
        )
        self.state.marks.mark("dispatch", at)
        if not fault(Fault.NO_SANITISE):
            ids = sanitised(ids, handle.psum_num_recv_tokens_per_scaleup_rank)
        held.combined = None
        held.received = (received, ids, weights, handle)
        return received, ids, weights, [], handle, event

    def combine(self, x: Any, handle: Any, **_unused: Any) -> tuple[Any, ...]:
        """As Buffer.combine."""
        at = microbatch()
        self.state.log.launched("combine", at)
        combined = self._elastic.combine(
            x=x, handle=handle, num_sms=self.sms, async_with_compute_stream=False
        )
        self.state.marks.mark("combine", at)
        held = self._held[at]
        held.combined = (combined, x)
        held.received = None
        return tuple(combined)

    def _made(self, x: Any, topk_idx: Any) -> Any:
        if self._elastic is None:
            hidden = int((x[0] if isinstance(x, tuple) else x).shape[1])
            self._elastic = self.make(hidden, int(topk_idx.shape[1]))
        return self._elastic


def sanitised(ids: Any, received_of_ranks: Any) -> Any:
    """Return `ids` with -1 in rows past the received ones, where stale ids may stand.

    `received_of_ranks`: prefix sums of the rows that each rank has sent.
    """
    import torch

    rows = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1)
    return torch.where(rows < received_of_ranks[-1], ids, -1)


def elastic_maker(group: Any, tokens_max: int) -> Callable[[int, int], Any]:
    """Return what makes the ElasticBuffer over a NCCL group."""

    def make(hidden: int, topk: int) -> Any:
        import deep_ep
        import torch

        # A communicator exists from its first collective on, and the buffer takes it as it is.
        torch.distributed.all_reduce(torch.zeros(1, device="cuda"), group=group)
        torch.cuda.synchronize()
        return deep_ep.ElasticBuffer(
            group,
            num_max_tokens_per_rank=tokens_max,
            hidden=hidden,
            num_topk=topk,
            prefer_overlap_with_compute=True,
            allow_multiple_reduction=False,
            explicitly_destroy=True,
        )

    return make
