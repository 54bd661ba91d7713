"""`splitwave trace`: the tree that it prints, and what it says if there is none."""

from pathlib import Path

import pytest

from services.cli.main import main
from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing import Origin, Past, Tracing, Value, WallClock, parent_of, traced
from splitwave.runtime.tracing_export import FileExporter
from splitwave.runtime.tracing_queue import SpanPass
from splitwave.runtime.wave_spans import WaveSpans
from tests.unit.test_wave_spans import LINK, SEGMENT, Group, Waves

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
MORNING_NS = 1_700_000_000 * 10**9


def service(name: str, directory: Path) -> Tracing:
    exporter = FileExporter(directory / f"{name}.spans.jsonl")
    clock = WallClock(lambda: 0.0, lambda: MORNING_NS)
    return traced(Origin(service=name), SpanPass(exporter), clock)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """One trace of two services, which failed."""
    router, prefill = service("router", tmp_path), service("prefill", tmp_path)
    request: dict[str, Value] = {
        names.REQUEST_ID: "mine",
        names.OUTCOME: "stalled",
        "gen_ai.request.max_tokens": 8,
    }
    root = router.record(
        Past(
            name="chat demo",
            began_s=0.0,
            ended_s=1.25,
            attributes=request,
            error="stalled",
            events=(("first_token", 0.25),),
        ),
        parent_of(CLIENT),
    )
    attempt = router.record(Past(name=names.ATTEMPT, began_s=0.001, ended_s=1.0), root)
    serve = Past(name=names.PREFILL_SERVE, began_s=0.01, ended_s=0.05)
    prefill.record(serve, attempt)
    grant = Past(name=names.GRANT, began_s=0.002, ended_s=0.004)
    router.record(grant, attempt)
    router.record(Past(name=names.ATTEMPT, began_s=1.1, ended_s=1.2), root)
    return tmp_path


TREE = f"""\
trace {TRACE_ID}, 5 spans, began 2023-11-14 22:13:20.000+00:00
                                    at ms    took ms
chat demo (router)                    0.0     1250.0  ERROR stalled outcome=stalled max_tokens=8\
 [first_token at 250.0]
├─ attempt (router)                   1.0      999.0
│  ├─ grant (router)                  2.0        2.0
│  └─ prefill.serve (prefill)        10.0       40.0
└─ attempt (router)                1100.0      100.0
"""


@pytest.mark.parametrize("wanted", ["mine", TRACE_ID, "cmpl-mine", "chatcmpl-mine"])
def test_a_request_s_tree_is_printed_by_any_of_its_ids(
    wanted: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", wanted, "--dir", str(directory)]) == 0

    assert capsys.readouterr().out == TREE


def test_an_unknown_request_is_named_with_where_it_was_looked_for(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "yours", "--dir", str(directory)]) == 1

    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"splitwave trace: no span of 'yours' in {directory}: ")


def test_a_directory_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "mine", "--dir", str(tmp_path / "none")]) == 1

    assert f"{tmp_path / 'none'}: No such file or directory" in capsys.readouterr().err


def test_without_an_id_it_asks_for_one(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--dir", str(directory)]) == 1

    assert "say which request" in capsys.readouterr().err


def test_a_directory_is_checked_for_traces_that_are_not_whole(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--check", "--dir", str(directory)]) == 1

    said = capsys.readouterr().err
    assert "faults, in 1 traces" in said
    assert "missing" not in said.partition(":\n")[0]


def test_traces_that_lack_a_lost_worker_s_spans_are_not_whole_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = service("router", tmp_path)
    request: dict[str, Value] = {
        names.REQUEST_ID: "mine",
        names.OUTCOME: "worker_lost",
        names.ROUTER_SPANS: 3,
    }
    whole = Past(
        name="chat demo", began_s=0.0, ended_s=2.0, attributes=request, error="worker_lost"
    )
    attempt = Past(name=names.ATTEMPT, began_s=0.0, ended_s=1.0, error="worker_lost")
    below = router.record(attempt, router.record(whole, parent_of(CLIENT)))
    call = router.start(names.DECODE, below, {})
    call.add_event(names.ACCEPTED, {names.DECODE_WORKER: "decode-0"})
    router.end(call, "worker_lost", "gone")

    assert main(["trace", "--check", "--dir", str(tmp_path)]) == 1

    said = capsys.readouterr()
    assert said.out == ""
    assert "not whole: 1 spans missing with all below them, since their worker" in said.err
    assert "splitwave.decode.serve of decode-0" in said.err
    assert "fault" not in said.err


def test_the_waves_of_a_request_are_told_below_its_tree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waves = WaveSpans(service("decode", tmp_path), Group(), Waves([SEGMENT], (SEGMENT.key,)))
    (wave,) = waves.worked(LINK.traceparent, 1.1, 1.2)
    waves.close()
    service("router", tmp_path).record(
        Past(
            name="chat demo",
            began_s=1.0,
            ended_s=1.3,
            attributes={names.REQUEST_ID: "mine", names.OUTCOME: "finished"},
            links=(wave, f"00-{TRACE_ID}-{1:016x}-01"),  # Nobody has written the other yet.
        ),
        parent_of(CLIENT),
    )

    assert main(["trace", "mine", "--dir", str(tmp_path)]) == 0

    assert capsys.readouterr().out.splitlines()[-1] == (
        "decode wave 4.1: first_request to pause, 500.0 ms, 20 steps, 25% dummy, 1 requests,"
        f" trace {wave[3:35]}"
    )
