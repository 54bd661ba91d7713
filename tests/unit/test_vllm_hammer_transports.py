"""DeepEP's transports against a group of one rank, whose buffers take only what DeepEP's take."""

import sys
import types

import pytest
import torch

from bench.hammer.device import Cpu
from bench.hammer.graphs import FINISHED, LANE, STARTED, Graphs, stage_name
from bench.hammer.rows import Rows
from bench.hammer.settings import Settings, parse
from bench.hammer.transports import BareElastic, BareLegacy, Transport
from splitwave.certify.hammer.walk import Step, plan
from tests.unit.deep_ep_stand_in import Buffer, ElasticBuffer, module

ARGUMENTS = ["--sizes", "8,16", "--hidden", "32", "--experts", "8", "--topk", "2", "--ranks", "1"]


@pytest.fixture(autouse=True)
def deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", module())


def built(*more: str) -> tuple[Settings, Transport, Rows, Graphs]:
    settings = parse([*ARGUMENTS, *more])
    make = BareElastic if settings.transport == "v2" else BareLegacy
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
    ubatching.dbo_enabled = lambda: False  # type: ignore[attr-defined]  # stands in for vLLM's
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
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
    assert isinstance(transport, BareLegacy)

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
