"""`python -m services.router` as a process of its own: its start, its settings, its end."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from splitwave.engine.sim import write_vocabulary
from tests.integration.worker_stack import free_port

HEAVY = ("splitwave.engine", "services.prefill", "services.decode", "vllm", "torch", "transformers")
START_CPU_MAX_S = 2.0


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    write_vocabulary(tmp_path)
    return tmp_path


def command(model_dir: Path, **changes: str) -> list[str]:
    """A router whose workers are not there."""
    flags = {
        "listen": f"127.0.0.1:{free_port()}",
        "http-listen": "127.0.0.1:0",
        "prefill": f"127.0.0.1:{free_port()}",
        "decode": f"127.0.0.1:{free_port()}",
        "model-path": str(model_dir),
        "drain-unready-s": "0",
        "log-level": "info",
    }
    given = {**flags, **changes}
    pairs = [part for name, value in given.items() for part in (f"--{name}", value)]
    return [sys.executable, "-X", "importtime", "-m", "services.router", *pairs]


@contextlib.contextmanager
def running(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a router, and leave none behind."""
    with log.open("wb") as stderr:
        process = subprocess.Popen(arguments, stderr=stderr)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(text: str, log: Path, process: "subprocess.Popen[bytes]") -> str:
    """The log once `text` stands in it."""
    for _ in range(600):
        said = log.read_text()
        if text in said:
            return said
        assert process.poll() is None, said[-2000:]
        time.sleep(0.05)
    raise AssertionError(f"{text!r} never came")


def test_it_starts_fast_without_an_engine_and_stops_at_sigterm(
    model_dir: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with running(command(model_dir), log) as process:
        said = wait_for("http ready", log, process)
        times = psutil.Process(process.pid).cpu_times()

        process.send_signal(signal.SIGTERM)
        code = process.wait(10)

    imported = re.findall(r"\| +([\w.]+)$", said, re.MULTILINE)
    assert "services.router.main" in imported
    assert [name for name in imported if name.startswith(HEAVY)] == []
    assert times.user + times.system < START_CPU_MAX_S
    assert code == 0


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"prefill": "nowhere"}, 2, "prefill: 'nowhere' is no worker address"),
        ({"decode": "dns:name"}, 2, "decode: 'dns:name' is no worker address"),
        ({"routers": "2", "router-index": "2"}, 2, "router_index: is 2"),
        ({"live-max": "0"}, 2, "live_max: is 0"),
        ({"http-listen": "8080"}, 2, "http_listen: is '8080'"),
        ({"model-path": "/nowhere"}, 2, "model_path: /nowhere: no such directory"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_that_cannot_work_is_named(
    model_dir: Path, tmp_path: Path, changes: dict[str, str], code: int, message: str
) -> None:
    log = tmp_path / "log"
    with running(command(model_dir, **changes), log) as process:
        assert process.wait(20) == code

    assert message in log.read_text()


@pytest.mark.parametrize("flag", ["http-listen", "listen"])
def test_a_taken_port_is_named(model_dir: Path, tmp_path: Path, flag: str) -> None:
    log = tmp_path / "log"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with running(command(model_dir, **{flag: address}), log) as process:
            assert process.wait(20) == 1

    assert f"{flag.replace('-', '_')}: cannot listen on {address}" in log.read_text()
