"""Import once, fork many: the process that the workers of a local stack are forked from.

Importing torch and vLLM takes 10 to 17 CPU seconds; both workers need the same
modules. This process imports them, forks one child a worker before any thread
exists, and reports on a pipe what becomes of them. One whose engines have died, or
that was killed, is forked again: nothing here has threads that a fork would lose.
It dies with its parent, and the workers die with it.

Run as `python -m services.cli.zygote SPEC STATUS_FD`; SPEC is JSON, see `Spec`.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from services.cli.tether import die_with_parent

RESTARTS_MAX = 3
"""Times that one worker is started over before the stack gives up."""
END_S = 5.0
"""What the processes that a dead worker has left get to be gone."""
EXIT_EPOCH_OVER = 75
"""A worker's exit code when its engines have died (splitwave.runtime.serve, which imports gRPC:
that must not happen before a fork)."""
RESTARTS = "SPLITWAVE_RESTARTS"
"""Tells a worker how often it was started over (splitwave.runtime.again, likewise)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedWorker:
    """One worker: `module.main(arguments)` returns its exit code."""

    name: str
    module: str
    arguments: tuple[str, ...]
    log_path: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What to import, and whom to fork in which order."""

    preload: tuple[str, ...]
    """Functions to call before the first fork, as `module:function`."""
    workers: tuple[ForkedWorker, ...]

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Spec":
        """The inverse of `to_json`."""
        fields = json.loads(text)
        workers = [
            ForkedWorker(**{**w, "arguments": tuple(w["arguments"])}) for w in fields["workers"]
        ]
        return cls(preload=tuple(fields["preload"]), workers=tuple(workers))


def main(arguments: Sequence[str]) -> int:
    """Preload, fork, report, wait. Returns 0 once all workers have ended."""
    die_with_parent()
    spec, status_fd = Spec.from_json(arguments[0]), int(arguments[1])
    os.set_inheritable(status_fd, False)  # A worker that execs must not keep the pipe open.
    for name in spec.preload:
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)()
    _report(status_fd, event="preloaded")
    nursery = _Nursery(status_fd)
    for worker in spec.workers:
        nursery.start(worker)
    signal.signal(signal.SIGTERM, lambda *_: nursery.stop())
    nursery.wait()
    return 0


class _Nursery:
    """The workers that run."""

    def __init__(self, status_fd: int) -> None:
        self._status_fd = status_fd
        self._running: dict[int, ForkedWorker] = {}
        self._restarts: Counter[str] = Counter()
        self._stopping = False

    def start(self, worker: ForkedWorker) -> None:
        """Fork a worker and say so."""
        restarts = {RESTARTS: str(self._restarts[worker.name])}
        environment = {**worker.environment, **restarts}
        pid = _fork(replace(worker, environment=environment), self._status_fd)
        self._running[pid] = worker
        _report(self._status_fd, event="started", name=worker.name, pid=pid)

    def stop(self) -> None:
        """Let the workers stop, and start none any more."""
        self._stopping = True
        for pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def wait(self) -> None:
        """Return once all have ended for good."""
        while self._running:
            pid, status = os.wait()
            if pid in self._running:
                self._ended(pid, os.waitstatus_to_exitcode(status))

    def _ended(self, pid: int, code: int) -> None:
        worker = self._running.pop(pid)
        name = worker.name
        if self._stopping or not self._may_start_over(name, code):
            _report(self._status_fd, event="exited", name=name, code=code)
            return
        self._restarts[name] += 1
        _report(self._status_fd, event="lost", name=name, code=code)
        end_session(pid)
        if not self._stopping:
            self.start(worker)

    def _may_start_over(self, name: str, code: int) -> bool:
        """True if another start may help: its engines have died, or it was killed."""
        helps = code == EXIT_EPOCH_OVER or code < 0
        return helps and self._restarts[name] < RESTARTS_MAX


def end_session(leader: int) -> None:
    """Kill what a dead worker has left, and wait until it is gone: its ports are needed again."""
    deadline_s = time.monotonic() + END_S
    while (left := _session(leader)) and time.monotonic() < deadline_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _session(leader: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            _, _, stat = (entry / "stat").read_text().rpartition(")")
            state, _, _, session = stat.split()[:4]
            if int(session) == leader and state not in "ZX":
                found.append(int(entry.name))
    return found


def _fork(worker: ForkedWorker, status_fd: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent()
        os.setsid()  # Its engines are stopped, and killed, with its process group.
        os.close(status_fd)
        _redirect(worker.log_path, again=worker.environment[RESTARTS] != "0")
        os.environ.update(worker.environment)
        code = importlib.import_module(worker.module).main(list(worker.arguments))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
    except BaseException:  # noqa: BLE001  # child must never return into the parent's code
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _redirect(log_path: str, *, again: bool) -> None:
    """Write to the log: from its beginning, or behind what says why there is another start."""
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    begin = 0 if again else os.O_TRUNC
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | begin, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _report(status_fd: int, **event: object) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status_fd, (json.dumps(event) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
