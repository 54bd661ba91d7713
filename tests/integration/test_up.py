"""`splitwave up` with simulated engines: it starts, says what is wrong, and leaves nothing."""

import contextlib
import functools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from services.cli.zygote import RESTARTS_MAX
from splitwave.demo_model import DemoModelOptions, Variant, build
from tests.e2e.live_stack import LiveStack, running, start

pytestmark = pytest.mark.timeout(120)

T = TypeVar("T")

SIM = ("--engine", "sim")
NOTICED_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("model") / "tiny"
    build(model, DemoModelOptions(variant=Variant.TINY))
    return model


@contextlib.contextmanager
def failing(model: Path | str, run_dir: Path, *flags: str, **more: str) -> Iterator[LiveStack]:
    """A stack that is expected to end by itself; killed with all that is its own otherwise."""
    stack = start(model, run_dir, *SIM, *flags, environment=more)
    try:
        yield stack
    finally:
        for process in stack.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        stack.wait_end(10.0)


def ended(stack: LiveStack, timeout_s: float = 20.0) -> tuple[int, str]:
    return stack.wait_end(timeout_s), stack.said()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_stack_ends_well_and_leaves_no_process(
    number: signal.Signals, tiny_model: Path, tmp_path: Path
) -> None:
    with running(tiny_model, tmp_path, *SIM) as stack:
        assert len(stack.pids) == 5  # The command, the router, the zygote and two workers.
        assert stack.stop(number) == 0
        assert stack.left_over() == []
    assert "decode: ready: 2 rank(s)" in stack.said()


def test_a_killed_command_takes_its_processes_along(tiny_model: Path, tmp_path: Path) -> None:
    with running_unchecked(tiny_model, tmp_path) as stack:
        stack.process.kill()
        deadline_s = time.monotonic() + 10.0
        while stack.left_over() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert stack.left_over() == []


@contextlib.contextmanager
def running_unchecked(model: Path, run_dir: Path) -> Iterator[LiveStack]:
    with failing(model, run_dir) as stack:
        stack.wait_ready(30.0)
        yield stack


def test_a_taken_port_is_named_with_its_flag_before_anything_starts(
    tiny_model: Path, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with failing(tiny_model, tmp_path, "--http-port", port) as stack:
            code, said = ended(stack)
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in said
    assert "--http-port" in said
    assert "forked" not in said


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with failing(tmp_path / "nothing", tmp_path) as stack:
        code, said = ended(stack)
    assert code == 1
    assert "has no config.json; give a model directory, `demo` or `tiny`" in said


def test_too_little_memory_is_said_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    # Room for as many KV caches, and not for their processes.
    ranks = f"--decode-ranks={psutil.virtual_memory().total // 2**27}"
    whole = "--decode-setting=expert_parallel=false"
    with failing(tiny_model, tmp_path, "--engine", "vllm", ranks, whole) as stack:
        code, said = ended(stack)
    assert code == 1
    assert "GiB needed" in said
    assert "forked" not in said


def test_a_worker_that_cannot_start_is_named_with_the_end_of_its_log(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    traces = f"trace_exporter=file,trace_dir={tmp_path}/file/traces"
    with failing(tiny_model, tmp_path / "run", "--decode", traces) as stack:
        code, said = ended(stack)
    assert code == 1
    assert "decode: ended with exit code 2" in said
    assert f"trace_dir: cannot write {tmp_path}" in said


def test_a_setting_that_the_engines_do_not_have_is_refused_before_anything_starts(
    tiny_model: Path, tmp_path: Path
) -> None:
    with failing(tiny_model, tmp_path, "--decode-setting", "seats=3") as stack:
        code, said = ended(stack)
    assert code == 2
    assert "decode.engine_settings: seats: unknown (splitwave up, flag --decode-setting)" in said
    assert "forked" not in said


def test_groups_that_the_router_will_not_take_are_told_of_and_not_waited_for(
    tiny_model: Path, tmp_path: Path
) -> None:
    with failing(tiny_model, tmp_path, "--router", "allow_uncertified=false") as stack:
        code, said = ended(stack)
    assert code == 1
    assert "the router gives it no work: it is uncertified: no certificate is given" in said
    assert "ready: OpenAI HTTP" not in said


def test_a_router_that_dies_ends_the_stack_and_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with running_unchecked(tiny_model, tmp_path) as stack:
        os.kill(_pid_of(stack, "services.router"), signal.SIGKILL)
        code, said = ended(stack, NOTICED_WITHIN_S + 20.0)
        assert stack.left_over() == []
    assert code == 1
    assert "router: ended with signal SIGKILL" in said


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_worker_that_dies_is_started_over_and_then_given_up(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    with running_unchecked(tiny_model, tmp_path) as stack:
        for _ in range(RESTARTS_MAX + 1):
            pid = _wait_for(lambda: _pid_of(stack, f"services.{name}"))
            os.kill(pid, signal.SIGKILL)
            _wait_for(functools.partial(_is_gone, pid))
        code, said = ended(stack, NOTICED_WITHIN_S + 20.0)
        assert stack.left_over() == []
    assert code == 1
    assert said.count(f"{name}: ended with signal SIGKILL; starting it over") == RESTARTS_MAX
    assert f"splitwave up: {name}: ended with signal SIGKILL" in said


def _is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def _wait_for(found: Callable[[], T], timeout_s: float = 20.0) -> T:
    """What `found` gives once it is something; None and failed assertions are nothing."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(AssertionError, psutil.NoSuchProcess):
            if value := found():
                return value
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _pid_of(stack: LiveStack, module: str) -> int:
    """The router runs its module; workers are children of the zygote, told by their port."""
    role = module.removeprefix("services.")
    if role == "router":
        return next(p.pid for p in stack.family() if module in p.cmdline())
    port = stack.ports[role]
    for process in stack.family():
        listening = [c.laddr.port for c in process.net_connections() if c.status == "LISTEN"]
        if port in listening:
            return process.pid
    raise AssertionError(f"nobody listens on {port}")
