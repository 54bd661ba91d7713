"""Worst-token transports against buffers that keep what they were asked."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any  # fakes of untyped buffers

import pytest
import torch
import vllm.v1.worker.ubatching  # noqa: F401  # the transports do, and it takes long

from splitwave.engine.vllm.worst_token import legacy as legacy_module
from splitwave.engine.vllm.worst_token.collectives import ended_counts
from splitwave.engine.vllm.worst_token.elastic import POISON_WEIGHT, ElasticTransport, Unsanitised
from splitwave.engine.vllm.worst_token.legacy import LegacyTransport, Sent
from splitwave.engine.vllm.worst_token.marks import DeviceMarks
from splitwave.engine.vllm.worst_token.transport import State

RANKS = 2


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is captured here; tests say which forward belongs to a graph by `warming`."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class FakeElastic:
    """DeepEP V2 as far as the transport sees it: `received` of the worst-case rows have come."""

    group_size = RANKS

    def __init__(self, received: int, most: int = 256) -> None:
        self.num_max_tokens_per_rank = most
        self.received = received
        self.asked: list[dict[str, Any]] = []
        self.combined: list[Any] = []

    def dispatch(self, **arguments: Any) -> tuple[Any, ...]:
        self.asked.append(arguments)
        rows = RANKS * (arguments["num_max_tokens_per_rank"] or 8)
        handle = SimpleNamespace(
            psum_num_recv_tokens_per_scaleup_rank=torch.tensor([0, self.received]),
            num_recv_tokens_per_expert_list=[],
        )
        ids = torch.zeros((rows, 2), dtype=torch.int64)
        return torch.ones((rows, 4)), ids, torch.ones((rows, 2)), handle, None

    def combine(self, **arguments: Any) -> tuple[Any, ...]:
        self.combined.append(arguments["handle"])
        return arguments["x"], None, None


def sent(transport: Any, rows: int, asked: int | None = None) -> tuple[Any, ...]:
    """Dispatch `rows` as vLLM's prepare does for V2."""
    found: tuple[Any, ...] = transport.dispatch(
        x=torch.ones((rows, 4)),
        topk_idx=torch.zeros((rows, 2), dtype=torch.int64),
        num_max_tokens_per_rank=asked,
    )
    return found


def test_a_graphs_dispatch_is_bounded_by_its_own_rows_and_not_by_vllms_power_of_two() -> None:
    buffer = FakeElastic(received=10)
    transport = ElasticTransport(buffer, State(warming=True))

    sent(transport, 96, asked=128)
    sent(transport, 130, asked=256)

    assert [one["num_max_tokens_per_rank"] for one in buffer.asked] == [128, 192]
    assert all(one["do_handle_copy"] is False for one in buffer.asked)


def test_a_step_outside_the_graphs_is_dispatched_as_vllm_asks() -> None:
    buffer = FakeElastic(received=10)
    transport = ElasticTransport(buffer, State())

    sent(transport, 96, asked=256)

    assert buffer.asked[0]["num_max_tokens_per_rank"] == 256
    assert "do_handle_copy" not in buffer.asked[0]


def test_neither_step_asks_for_more_than_the_buffer_was_made_for() -> None:
    buffer = FakeElastic(received=10, most=160)
    sent(ElasticTransport(buffer, State()), 130, asked=256)
    sent(ElasticTransport(buffer, State()), 130, asked=None)
    sent(ElasticTransport(buffer, State(warming=True)), 130, asked=256)

    assert [one["num_max_tokens_per_rank"] for one in buffer.asked] == [160, None, 160]


def test_collectives_are_counted_and_marked() -> None:
    state = State(warming=True)
    marked: list[str] = []
    state.marks = SimpleNamespace(mark=lambda kind, at=0: marked.append(kind), read=list)
    transport = ElasticTransport(FakeElastic(received=1), state)

    rows, _, _, handle, _ = sent(transport, 8)
    transport.combine(x=rows, handle=handle)

    counts = {one["kind"]: one["launched"] for one in state.log.report({}, 0.0)["collectives"]}
    assert counts == {"dispatch": 1, "combine": 1}
    assert marked == ["dispatch", "combine"]


def test_poison_lies_past_the_received_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITWAVE_FAULTS", "poison_padding")
    transport = ElasticTransport(FakeElastic(received=5), State(warming=True))

    rows, ids, weights, handle, _ = sent(transport, 8)

    assert torch.isfinite(rows[:5]).all()
    assert torch.isnan(rows[5:]).all()
    assert (weights[5:] == POISON_WEIGHT).all()
    assert (weights[:5] == 1).all()
    assert (ids[5:] == 0).all()
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == [0, 5]


def test_without_sanitising_all_rows_pass_for_received_and_combine_gets_the_true_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPLITWAVE_FAULTS", "no_sanitise")
    buffer = FakeElastic(received=5)
    transport = ElasticTransport(buffer, State(warming=True))

    rows, _, _, handle, _ = sent(transport, 8)
    transport.combine(x=rows, handle=handle)

    assert isinstance(handle, Unsanitised)
    assert int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]) > rows.shape[0]
    assert handle.num_recv_tokens_per_expert_list == []
    assert buffer.combined[0] is handle.inner


class FakeLegacy:
    """DeepEP's legacy buffer as far as the transport sees it."""

    group_size = RANKS

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[dict[str, Any]] = []
        self.combined: list[dict[str, Any]] = []

    def dispatch(self, **arguments: Any) -> tuple[Any, ...]:
        self.asked.append(arguments)
        rows = arguments.get("num_worst_tokens") or 3
        ids = torch.full((rows, 2), -1, dtype=torch.int64)
        ids[:3] = 1
        return torch.ones((rows, 4)), ids, torch.ones((rows, 2)), [], f"handle {self.name}", None

    def combine(self, **arguments: Any) -> tuple[Any, ...]:
        self.combined.append(arguments)
        return arguments["x"], None, None


class Legacy:
    """A legacy transport, and the buffers that it has made."""

    def __init__(self) -> None:
        self.state = State()
        self.shared = FakeLegacy("shared")
        self.made: list[FakeLegacy] = []
        self.transport = LegacyTransport(self.shared, self._make, self.state)

    def _make(self, hidden_bytes: int) -> FakeLegacy:
        assert hidden_bytes == 2 * 4
        self.made.append(FakeLegacy(f"of size {len(self.made)}"))
        return self.made[-1]

    def send(self, rows: int) -> tuple[Any, ...]:
        """Dispatch as vLLM's prepare does for the legacy buffer."""
        return self.transport.dispatch(x=torch.ones((rows, 4)), async_finish=True)


def test_each_captured_size_has_its_own_buffer_and_worst_case_rows() -> None:
    legacy = Legacy()
    legacy.state.warming = True

    for rows in (64, 128, 64):
        legacy.send(rows)

    assert [len(buffer.asked) for buffer in legacy.made] == [2, 1]
    assert [one["num_worst_tokens"] for buffer in legacy.made for one in buffer.asked] == [
        128,
        128,
        256,
    ]
    assert not any(one["async_finish"] for buffer in legacy.made for one in buffer.asked)
    assert legacy.shared.asked == []


def test_a_microbatch_shares_its_buffer_with_its_twin_and_with_no_other_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    legacy = Legacy()
    legacy.state.warming = True
    legacy.send(64)
    monkeypatch.setattr(legacy_module, "is_overlapped", lambda: True)

    for at in (0, 1):
        monkeypatch.setattr(legacy_module, "microbatch", lambda at=at: at)
        legacy.send(64)

    assert [len(buffer.asked) for buffer in legacy.made] == [1, 2]


@pytest.mark.parametrize("warming", [False, True])
def test_no_buffer_is_made_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, warming: bool
) -> None:
    legacy = Legacy()
    legacy.state.warming = True
    legacy.send(64)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    legacy.state.warming = warming
    legacy.send(64)

    with pytest.raises(RuntimeError, match="128 rows is captured without its warm-up"):
        legacy.send(128)
    assert len(legacy.made) == 1


def test_results_go_back_through_the_buffer_that_the_rows_came_by() -> None:
    legacy = Legacy()
    legacy.state.warming = True
    legacy.send(64)
    rows, _, _, _, handle, _ = legacy.send(128)

    legacy.transport.combine(x=rows, handle=handle, async_finish=True)

    assert isinstance(handle, Sent)
    assert legacy.made[0].combined == []
    assert legacy.made[1].combined[0]["handle"] == "handle of size 1"
    assert legacy.made[1].combined[0]["async_finish"] is False


def test_steps_outside_the_graphs_stay_host_synced_and_drain_the_replays_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drained: list[bool] = []
    stream = SimpleNamespace(synchronize=lambda: drained.append(True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    legacy = Legacy()
    legacy.state.replays_in_flight = True

    for _ in range(2):
        legacy.send(5)

    assert drained == [True]
    assert legacy.state.drains == 1
    assert all("num_worst_tokens" not in one for one in legacy.shared.asked)
    assert all(one["async_finish"] for one in legacy.shared.asked)


def test_with_the_fault_switched_on_all_sizes_share_one_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPLITWAVE_FAULTS", "shared_buffer")
    legacy = Legacy()
    legacy.state.warming = True

    legacy.send(64)
    legacy.send(128)

    assert legacy.made == []
    assert [one["num_worst_tokens"] for one in legacy.shared.asked] == [128, 256]


def test_legacy_poison_spares_rows_that_an_expert_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPLITWAVE_FAULTS", "poison_padding")
    legacy = Legacy()
    legacy.state.warming = True

    rows, ids, _, _, _, _ = legacy.send(64)

    assert torch.isfinite(rows[:3]).all()
    assert torch.isnan(rows[3:]).all()
    assert (ids[3:] == -1).all()


@pytest.fixture
def marks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of a device that is the CPU."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, **more: zeros(size, dtype=more["dtype"]))
    side = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _which: nullcontext())


@pytest.mark.usefixtures("marks_here")
def test_a_mark_moves_the_count_that_reports_name() -> None:
    marks = DeviceMarks("a device")

    marks.mark("dispatch")
    marks.mark("dispatch", 1)
    marks.mark("combine", 1)
    marks.mark("combine", 1)

    assert ended_counts(marks.read()) == {
        ("dispatch", 0): 1, ("combine", 0): 0, ("dispatch", 1): 1, ("combine", 1): 2,
    }  # fmt: skip


@pytest.mark.usefixtures("marks_here")
def test_counts_made_in_inference_mode_can_be_read_outside_it() -> None:
    with torch.inference_mode():  # So vLLM measures what graphs take; the watch's thread reads.
        marks = DeviceMarks("a device")
        marks.mark("dispatch")

    assert ended_counts(marks.read())["dispatch", 0] == 1
