"""`splitwave up --trace-dir` and `splitwave trace`: three real processes, three files."""

import http.client
import json
import time
from pathlib import Path

import pytest

from services.cli.main import main
from splitwave.demo_model import DemoModelOptions, Variant, build
from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing_check import faults
from splitwave.runtime.tracing_files import find_traces, read_spans
from tests.e2e.live_stack import LiveStack, running

pytestmark = pytest.mark.timeout(120)

SEEN_WITHIN_S = 10.0


def ask(stack: LiveStack, request_id: str, **change: object) -> int:
    """Ask for a completion; return the status."""
    body = {"model": stack.served_model, "prompt": "Hello", "max_tokens": 8, **change}
    connection = http.client.HTTPConnection(stack.address("http"), timeout=30.0)
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def seen(directory: Path, request_id: str) -> None:
    """Wait until a request's whole trace is in the files of the running processes."""
    deadline_s = time.monotonic() + SEEN_WITHIN_S
    while True:
        spans = [span for trace in find_traces(directory, request_id).values() for span in trace]
        if spans and not faults(spans):
            return
        assert time.monotonic() < deadline_s, faults(spans)
        time.sleep(0.1)


def test_a_request_s_tree_can_be_printed_while_the_stack_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, traces = tmp_path / "tiny", tmp_path / "traces"
    build(model, DemoModelOptions(variant=Variant.TINY))
    flags = ("--engine", "sim", "--trace-dir", str(traces))
    with running(model, tmp_path / "run", *flags) as stack:
        assert ask(stack, "mine") == 200
        assert ask(stack, "wrong", top_p=7) == 400
        seen(traces, "mine")
        seen(traces, "wrong")
        assert main(["trace", "mine", "--dir", str(traces)]) == 0

    printed = capsys.readouterr().out
    lines = [line.strip("│├└─ ") for line in printed.splitlines()]
    begun = [line.partition(" (")[0] for line in lines]
    for name in names.BY_NAME.keys() - {names.REQUEST}:
        assert begun.count(name.removeprefix("splitwave.")) == 1, printed
    assert "Hello" not in printed
    services = {path.name.partition("-")[0] for path in traces.iterdir()}
    assert services == {"router", "prefill", "decode"}
    wanted = {"mine": "finished", "wrong": "invalid_request"}
    assert faults(read_spans(traces), wanted) == []
