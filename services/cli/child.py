"""One child process of a local stack: started with a log of its own, watched, stopped for good."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LOG_TAIL_LINES = 20


@dataclass(slots=True)
class Child:
    """A child and everything that it starts: it leads a process group of its own.

    Its own group keeps the terminal's Ctrl-C away from it: the supervisor stops
    children in order, and each exactly once.
    """

    name: str
    log_path: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        log_path: Path,
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> "Child":
        """Start `command`; its output goes to `log_path`, from the beginning of the file."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=None if environment is None else {**os.environ, **environment},
                start_new_session=True,
                pass_fds=pass_fds,
            )
        return cls(name, log_path, process)

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative for a signal, as in `subprocess`."""
        return self.process.poll()

    def log_tail(self) -> str:
        """The end of its log, for a failure's message."""
        return log_tail(self.log_path)

    def terminate(self) -> None:
        """Ask it to drain and stop. Harmless once it has ended."""
        if self.returncode is None:
            self.process.terminate()

    def wait(self, timeout_s: float) -> bool:
        """True if it ended within the time."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill_group(self) -> None:
        """End it and whatever of its group is left, also after it has ended itself."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, or a word on why there are none."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


def stop_all(children: Sequence[Child], grace_s: float) -> list[str]:
    """Stop children in order, each within `grace_s`; return the names of those that were killed."""
    killed = []
    for child in children:
        child.terminate()
        deadline_s = time.monotonic() + grace_s
        if not child.wait(max(0.0, deadline_s - time.monotonic())):
            killed.append(child.name)
        child.kill_group()
    return killed


def describe_exit(returncode: int) -> str:
    """An exit code in words: `exit code 3` or `signal SIGKILL`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    return f"signal {signal.Signals(-returncode).name}"
