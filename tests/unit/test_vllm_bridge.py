"""DeepEP V2 behind the legacy interface, against an ElasticBuffer that keeps what it is asked."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any  # fakes of untyped buffers

import pytest
import torch

from splitwave.engine.vllm.worst_token import bridge as under_test
from splitwave.engine.vllm.worst_token.bridge import ElasticBridge, Experts, sanitised
from splitwave.engine.vllm.worst_token.transport import State

TOKENS_MAX = 160
RECEIVED = 5
STALE = 3


class Elastic:
    """One rank's ElasticBuffer: five rows have come, and stale ids stand past them."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.combined: list[dict[str, Any]] = []

    def dispatch(self, **arguments: Any) -> tuple[Any, ...]:
        self.asked.append({k: v for k, v in arguments.items() if k not in ("x", "topk_weights")})
        rows = 2 * arguments["num_max_tokens_per_rank"]
        ids = torch.full((rows, 2), STALE)
        handle = SimpleNamespace(
            psum_num_recv_tokens_per_scaleup_rank=torch.tensor([2, RECEIVED]),
        )
        return torch.ones((rows, 4)), ids, torch.ones((rows, 2)), handle, "event"

    def combine(self, **arguments: Any) -> tuple[Any, ...]:
        self.combined.append({k: v for k, v in arguments.items() if k != "x"})
        return torch.ones((8, 4)), None, "event"


class Bridge:
    """A bridge, what it has made, and whose microbatch's thread calls."""

    def __init__(self) -> None:
        self.at = 0
        self.elastic = Elastic()
        self.made: list[tuple[int, int]] = []
        self.state = State(warming=True)
        self.marked: list[tuple[str, int]] = []
        self.state.marks = SimpleNamespace(
            mark=lambda kind, at=0: self.marked.append((kind, at)), read=list
        )
        self.bridge = ElasticBridge(self._make, TOKENS_MAX, 2, self.state, sms=24)

    def _make(self, hidden: int, topk: int) -> Elastic:
        self.made.append((hidden, topk))
        return self.elastic

    def dispatch(self, rows: int, *, scaled: bool = False) -> tuple[Any, ...]:
        """Dispatch as vLLM's prepare does for the legacy buffer."""
        x = torch.ones((rows, 4))
        ids = torch.zeros((rows, 2), dtype=torch.int64)
        layout = self.bridge.get_dispatch_layout(
            topk_idx=ids, num_experts=128, previous_event=self.bridge.capture(),
            async_finish=False, allocate_on_comm_stream=False,
        )  # fmt: skip
        return self.bridge.dispatch(
            x=(x, torch.ones((rows, 1))) if scaled else x,
            handle=None, num_tokens_per_rank=layout[0], num_tokens_per_rdma_rank=layout[1],
            is_token_in_rank=layout[3], num_tokens_per_expert=layout[2], topk_idx=ids,
            topk_weights=torch.ones((rows, 2)), expert_alignment=1, config=None,
            previous_event=None, async_finish=True, allocate_on_comm_stream=False,
        )  # fmt: skip

    def combine(self, x: Any, handle: Any) -> tuple[Any, ...]:
        """Combine as vLLM's finalize does for the legacy buffer."""
        return self.bridge.combine(
            x=x, handle=handle, topk_weights=None, config=None, previous_event=None,
            async_finish=True, allocate_on_comm_stream=False,
        )  # fmt: skip


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Bridge:
    found = Bridge()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(under_test, "microbatch", lambda: found.at)
    monkeypatch.setenv("SPLITWAVE_FAULTS", "")
    return found


def test_a_graphs_dispatch_is_bounded_by_its_rows_within_the_buffer(bridge: Bridge) -> None:
    for rows in (48, 96, 130):
        bridge.dispatch(rows)

    bounds = [one["num_max_tokens_per_rank"] for one in bridge.elastic.asked]
    assert bounds == [64, 128, TOKENS_MAX]


def test_a_dispatch_outside_the_graphs_has_the_same_bound_on_every_rank(bridge: Bridge) -> None:
    bridge.state.warming = False

    bridge.dispatch(3)
    bridge.dispatch(150)

    assert [one["num_max_tokens_per_rank"] for one in bridge.elastic.asked] == [TOKENS_MAX] * 2


def test_a_captured_dispatch_is_a_graphs_one_without_the_warm_up_flag(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge.state.warming = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    bridge.dispatch(64)

    assert bridge.elastic.asked[0]["num_max_tokens_per_rank"] == 64


def test_no_host_is_asked_and_the_number_of_experts_is_passed_on(bridge: Bridge) -> None:
    _, _, _, counts, handle, event = bridge.dispatch(8)
    bridge.combine(torch.ones((16, 4)), handle)

    asked = bridge.elastic.asked[0]
    assert asked.pop("topk_idx").shape == (8, 2)
    assert asked == {
        "num_experts": 128, "num_max_tokens_per_rank": 8, "num_sms": 24, "do_expand": False,
        "do_cpu_sync": False, "do_handle_copy": False, "async_with_compute_stream": False,
    }  # fmt: skip
    assert (counts, event) == ([], "event")
    expected = {"handle": handle, "num_sms": 24, "async_with_compute_stream": False}
    assert bridge.elastic.combined == [expected]
    layout = bridge.bridge.get_dispatch_layout(torch.zeros(1), 128)
    assert layout == (None, None, Experts(128), None, None)


def test_ids_past_the_received_rows_are_none(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = bridge.dispatch(8)[1]
    assert (ids[:RECEIVED] == STALE).all()
    assert (ids[RECEIVED:] == -1).all()

    monkeypatch.setenv("SPLITWAVE_FAULTS", "no_sanitise")
    assert (bridge.dispatch(8)[1] == STALE).all()


@pytest.mark.parametrize(("received", "kept"), [([0, 0], 0), ([1, 1], 1), ([2, 4], 4)])
def test_sanitising_keeps_what_all_ranks_together_have_sent(received: list[int], kept: int) -> None:
    found = sanitised(torch.full((4, 3), STALE), torch.tensor(received))

    assert found.tolist() == [[STALE] * 3] * kept + [[-1] * 3] * (4 - kept)


def test_one_buffer_is_made_once_for_all_layers_and_microbatches(bridge: Bridge) -> None:
    assert bridge.made == []
    for at in (0, 1, 0):
        bridge.at = at
        bridge.dispatch(8, scaled=at == 1)

    assert bridge.made == [(4, 2)]


def test_collectives_are_counted_for_the_microbatch_that_launches_them(bridge: Bridge) -> None:
    bridge.dispatch(8)
    bridge.at = 1
    handle = bridge.dispatch(8)[4]
    bridge.combine(torch.ones((16, 4)), handle)

    assert bridge.marked == [("dispatch", 0), ("dispatch", 1), ("combine", 1)]
    found = {
        (one["kind"], one["microbatch"]): one["launched"]
        for one in bridge.state.log.report({}, 0.0)["collectives"]
    }
    assert found == {("dispatch", 0): 1, ("dispatch", 1): 1, ("combine", 1): 1}


def watched(*tensors: torch.Tensor) -> list[Any]:
    """Return references that do not keep the tensors."""
    return [weakref.ref(tensor) for tensor in tensors]


def alive(references: list[Any]) -> list[bool]:
    gc.collect()
    return [one() is not None for one in references]


def test_received_rows_are_held_until_the_same_microbatchs_combine(bridge: Bridge) -> None:
    rows, ids, weights, _, handle, _ = bridge.dispatch(8)
    kept = watched(rows, ids, weights)
    del rows, ids, weights

    bridge.at = 1
    other = bridge.dispatch(8)[4]
    bridge.combine(torch.ones((16, 4)), other)
    assert alive(kept) == [True] * 3

    bridge.at = 0
    bridge.combine(torch.ones((16, 4)), handle)
    assert alive(kept) == [False] * 3


def test_what_combine_makes_and_reads_is_held_until_the_same_microbatchs_next_dispatch(
    bridge: Bridge,
) -> None:
    handle = bridge.dispatch(8)[4]
    x = torch.ones((16, 4))
    combined = bridge.combine(x, handle)[0]
    kept = watched(x, combined)
    del x, combined

    bridge.at = 1
    other = bridge.dispatch(8)[4]
    bridge.combine(torch.ones((16, 4)), other)
    assert alive(kept) == [True] * 2

    bridge.at = 0
    bridge.dispatch(8)
    assert alive(kept) == [False] * 2


def test_nothing_is_released_before_the_collective_that_releases_it_is_enqueued(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[bool]] = []
    dispatch, combine = bridge.elastic.dispatch, bridge.elastic.combine
    kept: list[Any] = []

    def dispatched(**arguments: Any) -> tuple[Any, ...]:
        seen.append(alive(kept))
        return dispatch(**arguments)

    def combining(**arguments: Any) -> tuple[Any, ...]:
        seen.append(alive(kept))
        return combine(**arguments)

    monkeypatch.setattr(bridge.elastic, "dispatch", dispatched)
    monkeypatch.setattr(bridge.elastic, "combine", combining)
    rows, _, _, _, handle, _ = bridge.dispatch(8)
    kept = watched(rows)
    del rows
    combined = bridge.combine(torch.ones((16, 4)), handle)[0]
    kept = watched(combined)
    del combined
    bridge.dispatch(8)

    assert seen == [[], [True], [True]]
