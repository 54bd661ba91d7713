"""The transports under the hammer: DeepEP's two, each as a graph uses them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol  # DeepEP's buffers are untyped here

import torch
import torch.distributed as dist

from bench.hammer.settings import Settings


@dataclass(slots=True)
class Received:
    """What a dispatch brought to a rank: as many rows as could come at most.

    `ids` are places among this rank's experts, -1 for an expert elsewhere. `count` says how many
    rows are real where the transport leaves the ids past them as they were.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    handle: object
    count: torch.Tensor | None = None


class Transport(Protocol):
    """One way for rows to their experts and back. `lane` is the microbatch, 0 without any."""

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, lane: int
    ) -> Received:
        """Send rows to the ranks of their experts, without a word with the host."""

    def combine(self, y: torch.Tensor, received: Received, lane: int) -> torch.Tensor:
        """Send what the experts made of them back; returns the sum over the ranks."""

    def eager(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Received:
        """Send rows with a host that waits for their number."""

    def poison(self) -> None:
        """Fill the receive buffers with NaN, where that is possible."""


class BareElastic:
    """DeepEP V2: `ElasticBuffer` without CPU synchronisation."""

    def __init__(self, settings: Settings, group: dist.ProcessGroup) -> None:
        import deep_ep

        self._experts = settings.experts
        self._sanitise = settings.sanitise
        self._buffers = [
            deep_ep.ElasticBuffer(
                group=group,
                num_max_tokens_per_rank=max(settings.sizes),
                hidden=settings.hidden,
                num_topk=settings.topk,
                use_fp8_dispatch=False,
                allow_hybrid_mode=True,
                # Two microbatches' kernels must fit on the GPU side by side: fewer SMs each.
                prefer_overlap_with_compute=settings.tbo,
                allow_multiple_reduction=False,
                explicitly_destroy=True,
            )
            for _ in range(settings.microbatch_buffers)
        ]
        if settings.product:
            self._buffers = [served(buffer) for buffer in self._buffers]

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, lane: int
    ) -> Received:
        """Send rows; the kernel is compiled once for each number of rows."""
        rows, row_ids, row_weights, handle, _ = self._buffers[lane % len(self._buffers)].dispatch(
            x=x,
            topk_idx=ids,
            topk_weights=weights,
            num_experts=self._experts,
            num_max_tokens_per_rank=x.shape[0],
            do_expand=False,
            do_cpu_sync=False,
            do_handle_copy=False,  # The ids are static inputs, which outlive the combine.
            async_with_compute_stream=False,
        )
        count = handle.psum_num_recv_tokens_per_scaleup_rank[-1:]
        return Received(rows, row_ids, row_weights, handle, count if self._sanitise else None)

    def combine(self, y: torch.Tensor, received: Received, lane: int) -> torch.Tensor:
        """Send rows back."""
        out, _, _ = self._buffers[lane % len(self._buffers)].combine(
            x=y, handle=received.handle, topk_weights=None, async_with_compute_stream=False
        )
        return out

    def eager(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Received:
        """Not under test here."""
        raise NotImplementedError("host-synchronised dispatches belong to legacy_unfixed")

    def poison(self) -> None:
        """DeepEP gives no access to this buffer."""


class BareLegacy:
    """DeepEP's intranode kernels with `num_worst_tokens`; one buffer, or one a size."""

    def __init__(self, settings: Settings, group: dist.ProcessGroup) -> None:
        import deep_ep

        self._experts, self._ranks = settings.experts, settings.ranks
        own = settings.transport == "legacy" and not settings.product
        count = len(settings.sizes) if own else 1
        self._halves = 2 if settings.tbo else 1
        buffers = [
            deep_ep.Buffer(
                group=group,
                num_nvl_bytes=settings.buffer_mib << 20,
                num_rdma_bytes=0,
                low_latency_mode=False,
                num_qps_per_rank=1,
                explicitly_destroy=True,
            )
            for _ in range(count)
        ]
        self._buffers = {
            size // self._halves: buffers[place % count]
            for place, size in enumerate(settings.sizes)
        }
        self._product: ServedState | None = None
        if settings.product:
            served, self._product = served_legacy(buffers[0], group)
            self._buffers = dict.fromkeys(self._buffers, served)

    def _send(
        self, buffer: "LegacyBuffer", x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
        worst: int,
    ) -> Received:  # fmt: skip
        if self._product is not None:
            self._product.warming = worst > 0
            self._product.replays_in_flight = True
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, self._experts)
        rows, row_ids, row_weights, _, handle, _ = buffer.dispatch(
            x=x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=None,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            num_worst_tokens=worst,
        )
        return Received(rows, row_ids, row_weights, (buffer, handle))

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, lane: int
    ) -> Received:
        """Send rows; both microbatches share a buffer, whose own stream keeps them apart."""
        size = x.shape[0]
        return self._send(self._buffers[size], x, ids, weights, worst=size * self._ranks)

    def combine(self, y: torch.Tensor, received: Received, lane: int) -> torch.Tensor:
        """Send rows back."""
        assert isinstance(received.handle, tuple)
        buffer, handle = received.handle
        out, _, _ = buffer.combine(x=y, handle=handle)
        return out

    def eager(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Received:
        """Send rows while the host polls for their number: the count may be a replay's own."""
        return self._send(next(iter(self._buffers.values())), x, ids, weights, worst=0)

    def poison(self) -> None:
        """Fill the buffers with NaN; every kernel clears the counters that it uses."""
        for buffer in {id(buffer): buffer for buffer in self._buffers.values()}.values():
            buffer.get_local_buffer_tensor(torch.uint8).fill_(255)


class LegacyBuffer(Protocol):
    """The part of `deep_ep.Buffer` that is used here."""

    get_dispatch_layout: Callable[..., tuple[torch.Tensor, ...]]
    dispatch: Callable[..., tuple[torch.Tensor, ...]]
    combine: Callable[..., tuple[torch.Tensor, ...]]
    get_local_buffer_tensor: Callable[..., torch.Tensor]


class ServedState(Protocol):
    """The part of the serving transports' state that says what a dispatch is part of."""

    warming: bool
    replays_in_flight: bool


def served(buffer: object) -> Any:
    """Put the transport that engines are served with before an ElasticBuffer."""
    from splitwave.engine.vllm.worst_token.elastic import ElasticTransport as Served
    from splitwave.engine.vllm.worst_token.transport import State

    return Served(buffer, State(warming=True))


def served_legacy(buffer: object, group: dist.ProcessGroup) -> tuple[Any, ServedState]:
    """Put the transport that engines are served with before a legacy Buffer."""
    from splitwave.engine.vllm.worst_token.legacy import LegacyTransport as Served
    from splitwave.engine.vllm.worst_token.legacy import buffer_maker
    from splitwave.engine.vllm.worst_token.transport import State

    state = State()
    return Served(buffer, buffer_maker(group), state), state


def connect(settings: Settings, group: dist.ProcessGroup) -> Transport:
    """Build the transport under test; `group` is the ranks' CPU group. Collective."""
    if settings.transport == "dry":
        from bench.hammer.dry import DryTransport

        return DryTransport(settings)
    if settings.transport == "v2":
        return BareElastic(settings, device_group(settings))
    return BareLegacy(settings, group)


def device_group(settings: Settings) -> dist.ProcessGroup:
    """Make the NCCL group of all ranks, with its communicator, which a V2 buffer takes as it is."""
    group = dist.new_group(list(range(settings.ranks)), backend="nccl")
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)  # NCCL connects at first use only.
    torch.cuda.synchronize()
    return group


def own_kernel_cache(rank: int) -> None:
    """Give each rank its own cache of compiled kernels; must come before deep_ep is imported."""
    root = os.environ.get("EP_JIT_CACHE_DIR") or str(Path.home() / ".cache/splitwave/deep_ep")
    os.environ["EP_JIT_CACHE_DIR"] = f"{root}/rank{rank}"
    Path(os.environ["EP_JIT_CACHE_DIR"]).mkdir(parents=True, exist_ok=True)
