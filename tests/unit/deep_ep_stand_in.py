"""DeepEP's buffers for a group of one rank; they take only what DeepEP's own take."""

import types
from typing import Any  # DeepEP's calls take whatever they are given

import torch

STALE = 3
LATER = "config previous_event async_finish allocate_on_comm_stream"
EVENT = types.SimpleNamespace(event=None)
"""Of a call that is over when it returns."""


class Handle:
    def __init__(self, count: int, source: torch.Tensor) -> None:
        self.psum_num_recv_tokens_per_scaleup_rank = torch.tensor([count])
        self.source = source
        self.num_recv_tokens_per_expert_list: list[int] = []


class Call(types.SimpleNamespace):
    """A call's arguments, which must have exactly these names: DeepEP's own."""

    @classmethod
    def of(cls, given: dict[str, Any], names: str, may: str = "") -> "Call":
        assert set(names.split()) <= set(given) <= set(f"{names} {may}".split())
        return cls(**given)


def land(call: Call, rows: int, unsent: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Lay out what was received in `rows` rows, and say from which rows it came."""
    assert all(t.is_contiguous() for t in (call.x, call.topk_idx, call.topk_weights))
    source = (call.topk_idx >= 0).any(dim=1).nonzero().flatten()
    got = [
        torch.full((rows, call.x.shape[1]), torch.nan).bfloat16(),
        torch.full((rows, call.topk_idx.shape[1]), unsent),
        torch.full((rows, call.topk_idx.shape[1]), torch.nan),
    ]
    for target, sent in zip(got, (call.x, call.topk_idx, call.topk_weights), strict=True):
        target[: len(source)] = sent[source]
    return got, source


def sent_back(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[source] = x[: len(source)]
    return out


class ElasticBuffer:
    made = 0

    def __init__(self, group: object, **given: Any) -> None:
        ElasticBuffer.made += 1
        call = Call.of(
            given,
            "num_max_tokens_per_rank hidden num_topk prefer_overlap_with_compute "
            "allow_multiple_reduction explicitly_destroy",
            may="use_fp8_dispatch allow_hybrid_mode",
        )
        self.num_max_tokens_per_rank = call.num_max_tokens_per_rank

    def dispatch(self, **given: Any) -> tuple[object, ...]:
        call = Call.of(
            given,
            "x topk_idx topk_weights num_experts num_max_tokens_per_rank do_expand do_cpu_sync "
            "do_handle_copy async_with_compute_stream",
        )
        assert not call.do_cpu_sync
        assert not call.do_expand
        assert len(call.x) == call.num_max_tokens_per_rank <= self.num_max_tokens_per_rank
        got, source = land(call, call.num_max_tokens_per_rank, STALE)
        return (*got, Handle(len(source), source), EVENT)

    def combine(self, **given: Any) -> tuple[object, ...]:
        call = Call.of(
            given, "x handle topk_weights async_with_compute_stream", may="allocate_on_comm_stream"
        )
        return sent_back(call.x, call.handle.source), None, EVENT


class Buffer:
    made = 0
    group_size = 1

    def __init__(self, group: object, num_nvl_bytes: int, num_rdma_bytes: int, **more: Any) -> None:
        Buffer.made += 1
        Call.of(more, "explicitly_destroy", may="low_latency_mode num_qps_per_rank")
        assert num_nvl_bytes > 0 == num_rdma_bytes
        self.memory = torch.zeros(64, dtype=torch.uint8)

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, **more: Any
    ) -> tuple[object, ...]:
        Call.of(more, "", may="previous_event async_finish allocate_on_comm_stream")
        return ("per rank", None, "per expert", "in rank", None)

    def dispatch(self, **given: Any) -> tuple[object, ...]:
        call = Call.of(
            given,
            "x num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank "
            "num_tokens_per_expert topk_idx topk_weights num_worst_tokens",
            may=f"handle expert_alignment {LATER}",
        )
        assert (call.num_tokens_per_rank, call.is_token_in_rank) == ("per rank", "in rank")
        assert call.num_tokens_per_expert == "per expert"
        rows = call.num_worst_tokens or int((call.topk_idx >= 0).any(dim=1).sum())
        got, source = land(call, rows, -1)
        return (*got, [], source, EVENT)

    def combine(self, **given: Any) -> tuple[object, ...]:
        call = Call.of(given, "x handle", may=f"topk_weights {LATER}")
        return sent_back(call.x, call.handle), None, EVENT

    @staticmethod
    def capture() -> None:
        return None

    @staticmethod
    def get_dispatch_config(ranks: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(get_nvl_buffer_size_hint=lambda row, ranks: row * ranks)

    get_combine_config = get_dispatch_config

    def get_local_buffer_tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return self.memory.view(dtype)


class EventOverlap:
    """Names the type in vLLM's annotations."""


def module() -> types.ModuleType:
    """Return what `import deep_ep` finds."""
    found = types.ModuleType("deep_ep")
    names = {
        "ElasticBuffer": ElasticBuffer, "Buffer": Buffer, "EventOverlap": EventOverlap,
        "EPHandle": Handle, "Config": types.SimpleNamespace,
    }  # fmt: skip
    found.__dict__.update(names)
    ElasticBuffer.made = Buffer.made = 0
    return found
