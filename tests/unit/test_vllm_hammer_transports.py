"""DeepEP's transports against a group of one rank, whose buffers take only what DeepEP's take."""

import sys
import types
from typing import Any  # DeepEP's calls take whatever they are given

import pytest
import torch

from bench.hammer.device import Cpu
from bench.hammer.graphs import FINISHED, LANE, STARTED, Graphs, stage_name
from bench.hammer.rows import Rows
from bench.hammer.settings import Settings, parse
from bench.hammer.transports import ElasticTransport, LegacyTransport, Transport
from splitwave.certify.hammer.walk import Step, plan

ARGUMENTS = ["--sizes", "8,16", "--hidden", "32", "--experts", "8", "--topk", "2", "--ranks", "1"]
STALE = 3


class Handle:
    def __init__(self, count: int, source: torch.Tensor) -> None:
        self.psum_num_recv_tokens_per_scaleup_rank = torch.tensor([count])
        self.source = source


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

    def __init__(self, **given: Any) -> None:
        ElasticBuffer.made += 1
        call = Call.of(
            given,
            "group num_max_tokens_per_rank hidden num_topk use_fp8_dispatch allow_hybrid_mode "
            "prefer_overlap_with_compute allow_multiple_reduction explicitly_destroy",
        )
        self.most = call.num_max_tokens_per_rank

    def dispatch(self, **given: Any) -> tuple[object, ...]:
        call = Call.of(
            given,
            "x topk_idx topk_weights num_experts num_max_tokens_per_rank do_expand do_cpu_sync "
            "do_handle_copy async_with_compute_stream",
        )
        assert not call.do_cpu_sync
        assert not call.do_expand
        assert len(call.x) == call.num_max_tokens_per_rank <= self.most
        got, source = land(call, call.num_max_tokens_per_rank, STALE)
        return (*got, Handle(len(source), source), None)

    def combine(self, **given: Any) -> tuple[object, ...]:
        call = Call.of(given, "x handle topk_weights async_with_compute_stream")
        return sent_back(call.x, call.handle.source), None, None


class Buffer:
    made = 0
    group_size = 1

    def __init__(self, group: object, num_nvl_bytes: int, num_rdma_bytes: int, **more: Any) -> None:
        Buffer.made += 1
        Call.of(more, "explicitly_destroy", may="low_latency_mode num_qps_per_rank")
        assert num_nvl_bytes > 0 == num_rdma_bytes
        self.memory = torch.zeros(64, dtype=torch.uint8)

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[object, ...]:
        return ("per rank", None, "per expert", "in rank", None)

    def dispatch(self, **given: Any) -> tuple[object, ...]:
        call = Call.of(
            given,
            "x num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank "
            "num_tokens_per_expert topk_idx topk_weights num_worst_tokens",
            may="async_finish",
        )
        assert (call.num_tokens_per_rank, call.is_token_in_rank) == ("per rank", "in rank")
        assert call.num_tokens_per_expert == "per expert"
        rows = call.num_worst_tokens or int((call.topk_idx >= 0).any(dim=1).sum())
        got, source = land(call, rows, -1)
        return (*got, [], source, None)

    def combine(self, **given: Any) -> tuple[object, ...]:
        call = Call.of(given, "x handle", may="async_finish")
        return sent_back(call.x, call.handle), None, None

    @staticmethod
    def get_dispatch_config(ranks: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(get_nvl_buffer_size_hint=lambda row, ranks: row * ranks)

    get_combine_config = get_dispatch_config

    def get_local_buffer_tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return self.memory.view(dtype)


@pytest.fixture(autouse=True)
def deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("deep_ep")
    module.ElasticBuffer, module.Buffer = ElasticBuffer, Buffer  # type: ignore[attr-defined]  # stands in for a module
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    ElasticBuffer.made = Buffer.made = 0


def built(*more: str) -> tuple[Settings, Transport, Rows, Graphs]:
    settings = parse([*ARGUMENTS, *more])
    make = ElasticTransport if settings.transport == "v2" else LegacyTransport
    transport = make(settings, types.SimpleNamespace(size=lambda: 1))
    rows = Rows(settings, 0, torch.device("cpu"))
    return settings, transport, rows, Graphs(settings, Cpu(), transport, rows)


def walked(*more: str) -> dict[str, int]:
    """Walk 40 replays over both sizes and return the tally."""
    settings, _, rows, graphs = built("--replays", "40", *more)
    for size in settings.sizes:
        graphs.capture(size)
    for replay, step in enumerate(plan(settings.walk())):
        rows.stage(step)
        graphs.replay(step.size, replay)
        rows.check(step, replay)
        graphs.mark(FINISHED, replay + 1)
    assert graphs.marks[:2].tolist() == [40, 40]
    return rows.tally.read()


TRANSPORTS = ["v2", "legacy", "legacy_shared", "legacy_unfixed"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "more", [[], ["--tbo"], ["--tbo", "--tbo-buffers", "1"], ["--layers", "1", "--pool", "shared"]]
)
def test_a_right_transport_passes(transport: str, more: list[str]) -> None:
    if transport == "legacy_unfixed" and "--tbo" in more:
        return
    found = walked("--transport", transport, *more)

    assert (found["wrong_rows"], found["wrong_loads"]) == (0, 0)


def test_stale_rows_are_found_when_they_are_believed() -> None:
    found = walked("--transport", "v2", "--no-sanitise")

    assert found["wrong_loads"] > 30


def test_a_transport_that_loses_a_row_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(
        self: Buffer, *, x: torch.Tensor, handle: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        out = torch.zeros_like(x)
        out[handle[1:]] = x[1 : len(handle)]
        return out, None, None

    monkeypatch.setattr(Buffer, "combine", forgetful)

    assert walked("--transport", "legacy")["wrong_rows"] > 30


def test_the_served_transports_pass_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ubatching = types.ModuleType("vllm.v1.worker.ubatching")
    ubatching.dbo_current_ubatch_id = lambda: 0  # type: ignore[attr-defined]  # stands in for vLLM's
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.ubatching", ubatching)
    for transport in ("v2", "legacy"):
        found = walked("--transport", transport, "--product")

        assert (found["wrong_rows"], found["wrong_loads"]) == (0, 0)
    assert (ElasticBuffer.made, Buffer.made) == (1, 3)


@pytest.mark.parametrize(
    ("transport", "buffers"),
    [("legacy", 2), ("legacy_shared", 1), ("legacy_unfixed", 1), ("v2", 1)],
)
def test_a_variant_has_the_buffers_of_its_name(transport: str, buffers: int) -> None:
    built("--transport", transport)

    assert Buffer.made + ElasticBuffer.made == buffers


def test_two_microbatches_have_two_elastic_buffers_or_share_a_legacy_one() -> None:
    built("--transport", "v2", "--tbo")
    built("--transport", "legacy_shared", "--tbo")

    assert (ElasticBuffer.made, Buffer.made) == (2, 1)
    built("--transport", "v2", "--tbo", "--tbo-buffers", "1")
    assert ElasticBuffer.made == 3


def test_legacy_buffers_can_be_poisoned() -> None:
    _, transport, _, _ = built("--transport", "legacy")
    transport.poison()
    assert isinstance(transport, LegacyTransport)

    buffers = transport._buffers.values()  # noqa: SLF001  # what was poisoned is inside
    memory = [buffer.get_local_buffer_tensor(torch.bfloat16) for buffer in buffers]
    assert all(part.isnan().all() for part in memory)


def test_a_synchronised_dispatch_brings_exactly_what_was_sent() -> None:
    settings, transport, rows, _ = built("--transport", "legacy_unfixed")
    step = Step(size=16, tokens=(5,), entries=(2,), factor=0.25)
    pool = rows.pool
    x = pool.x[2, :5] * 0.25
    received = transport.eager(x, pool.ids[0, 2, 0, :5], pool.weights[2, 0, :5])
    assert received.x.shape[0] == rows.received_rows(step, (5,)) == 5

    y, _ = rows.expert(received.x, received.ids, received.weights, None)
    rows.check_eager(step, transport.combine(y, received, 0), 9)
    assert rows.tally.read()["wrong_rows"] == 0
    rows.check_eager(step, transport.combine(y * 2, received, 0), 9)
    assert rows.tally.read()["wrong_rows"] == 5
    assert settings.transport == "legacy_unfixed"


def test_marks_name_the_point_that_the_device_passed() -> None:
    _, _, rows, graphs = built("--transport", "v2")
    graphs.capture(8)
    rows.stage(Step(8, (8,), (0,), 1.0))
    graphs.replay(8, 6)

    assert graphs.marks[STARTED] == 7
    assert stage_name(int(graphs.marks[LANE])) == "layer 1 combined"
    assert stage_name(0) == "layer 0 entered"
