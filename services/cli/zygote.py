"""Import once, fork many: the process that the workers of a local stack are forked from.

Importing torch and vLLM takes 10 to 17 CPU seconds; both workers need the same
modules. This process imports them, forks one child a worker before any thread
exists, and reports on a pipe what becomes of them. It dies with its parent, and
the workers die with it.

Run as `python -m services.cli.zygote SPEC STATUS_FD`; SPEC is JSON, see `Spec`.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from services.cli.tether import die_with_parent


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
    running: dict[int, str] = {}
    for worker in spec.workers:
        pid = _fork(worker, status_fd)
        running[pid] = worker.name
        _report(status_fd, event="started", name=worker.name, pid=pid)
    signal.signal(signal.SIGTERM, lambda *_: _terminate(running))
    while running:
        pid, status = os.wait()
        if pid in running:
            code = os.waitstatus_to_exitcode(status)
            _report(status_fd, event="exited", name=running.pop(pid), code=code)
    return 0


def _fork(worker: ForkedWorker, status_fd: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        os.setsid()  # Its engines are stopped, and killed, with its process group.
        os.close(status_fd)
        _redirect(worker.log_path)
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


def _redirect(log_path: str) -> None:
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _terminate(running: Mapping[int, str]) -> None:
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _report(status_fd: int, **event: object) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status_fd, (json.dumps(event) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
