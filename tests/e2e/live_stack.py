"""A local stack as users start it: `splitwave up` in a process of its own, on free ports."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import psutil

from splitwave.wire.channel import CHANNEL_OPTIONS

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0


@dataclass(slots=True)
class LiveStack:
    """The running command and where its programs listen."""

    process: subprocess.Popen[str]
    ports: Mapping[str, int]
    run_dir: Path
    served_model: str
    output: list[str] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    reader: threading.Thread = field(default_factory=threading.Thread)

    def address(self, name: str) -> str:
        """host:port of grpc, http, prefill or decode."""
        return f"127.0.0.1:{self.ports[name]}"

    def channel(self, name: str) -> grpc.aio.Channel:
        """A channel to grpc (the router), prefill or decode."""
        return grpc.aio.insecure_channel(self.address(name), options=CHANNEL_OPTIONS)

    def family(self) -> list[psutil.Process]:
        """Every process of the stack that is alive now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        return []

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once it says that it is ready; AssertionError with its output otherwise."""
        deadline_s = time.monotonic() + timeout_s
        while not any(line.startswith("ready:") for line in self.output):
            assert self.process.poll() is None, "ended early:\n" + self.said()
            assert time.monotonic() < deadline_s, "not ready in time:\n" + self.said()
            time.sleep(0.1)
        self.pids = {process.pid for process in self.family()}

    def said(self) -> str:
        """All that it has printed."""
        return "\n".join(self.output)

    def stop(self, number: int = signal.SIGINT) -> int:
        """Stop it as Ctrl-C does; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait_end(STOP_TIMEOUT_S)

    def wait_end(self, timeout_s: float) -> int:
        """Return its exit code once it has ended by itself and all that it said is here."""
        code = self.process.wait(timeout_s)
        self.reader.join(timeout_s)
        return code

    def left_over(self) -> list[str]:
        """Processes of the stack that outlived it."""
        return [
            " ".join(process.cmdline())
            for process in psutil.process_iter()
            if process.pid in self.pids and process.status() != psutil.STATUS_ZOMBIE
        ]


PORTS = range(21000, 29000)
PORTS_EACH = 16
"""Process ids of runs side by side are neighbours: each begins where no other one does."""


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that are free now."""
    assert count <= PORTS_EACH
    begin = os.getpid() * PORTS_EACH % len(PORTS)
    for step in range(0, len(PORTS), PORTS_EACH):
        first = PORTS[(begin + step) % len(PORTS)]
        with contextlib.ExitStack() as sockets:
            try:
                for port in range(first, first + count):
                    probe = sockets.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


def start(
    model: Path | str,
    run_dir: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
) -> LiveStack:
    """Start `splitwave up`; it is not ready yet. Uncertified unless a flag says otherwise:
    making smoke certificates takes longer than most tests."""
    first = free_ports(16)
    names = ("grpc", "http", "prefill", "decode")
    ports = {name: first + index for index, name in enumerate(names)}
    command: Sequence[str] = [
        sys.executable,
        "-m",
        "services.cli.main",
        "up",
        *("--certify", "off"),
        *("--model", str(model)),
        *("--run-dir", str(run_dir)),
        *("--side-channel-port", str(first + 8)),
        *(word for name in names for word in (f"--{name}-port", str(ports[name]))),
        *flags,
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    stack = LiveStack(process, ports, run_dir, Path(model).name)
    stack.reader = threading.Thread(target=_collect, args=(stack,), daemon=True)
    stack.reader.start()
    return stack


def _collect(stack: LiveStack) -> None:
    assert stack.process.stdout is not None
    with stack.process.stdout as lines:
        for line in lines:
            stack.output.append(line.rstrip("\n"))


@contextlib.contextmanager
def running(
    model: Path | str, run_dir: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[LiveStack]:
    """A ready stack; afterwards it has ended well and left nothing, or the test fails."""
    stack = start(model, run_dir, *flags, environment=environment)
    try:
        stack.wait_ready()
        yield stack
        code = stack.stop()
        assert code == 0, f"exit code {code}:\n{stack.said()}"
        assert stack.left_over() == []
    finally:
        for process in stack.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        stack.wait_end(STOP_TIMEOUT_S)
