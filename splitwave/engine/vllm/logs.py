"""What engine processes write: one file a process, its end, and how far a start has come."""

import ctypes
import faulthandler
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path

from splitwave.engine.vllm import stacks
from splitwave.engine.vllm.worst_token import wedge

TAIL_BYTES_MAX = 4096
TAIL_LINES_MAX = 25
COORDINATOR = "coordinator"
_PR_SET_PDEATHSIG = 1
_PREFIX = re.compile(r"^\([^)]*pid=\d+\)\s*")
"""vLLM puts the process's name and pid before each line."""

MILESTONES = (
    ("Initializing a V1 LLM engine", "process is up"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "weights loaded"),
    ("KV cache size", "KV cache allocated"),
    ("init engine (", "engine initialised"),
)
"""Words in vLLM's log that say how far an engine's start has come, in order."""


class ProcessLogs:
    """Log files of one group's processes, named for the rank that writes them."""

    def __init__(self, log_dir: Path, group_id: str, epoch: int, ranks: int) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._stem = log_dir / f"{group_id}-{epoch}"
        self._by_process = {
            f"EngineCore_DP{rank}" if ranks > 1 else "EngineCore": f"rank{rank}"
            for rank in range(ranks)
        } | {"VLLM_DP_Coordinator": COORDINATOR}
        self._parent_pid = os.getpid()
        for who in self._by_process.values():
            self.path(who).unlink(missing_ok=True)  # of an earlier start with the same epoch
        self.wedge_dir = Path(f"{self._stem}-wedge").absolute()
        """Where ranks that wait too long say where they stand."""
        wedge.clear(self.wedge_dir)

    def path(self, who: int | str) -> Path:
        """Return the file of a rank, or of the coordinator."""
        name = who if isinstance(who, str) else f"rank{who}"
        return Path(f"{self._stem}-{name}.log")

    def tail(self, who: int | str) -> str:
        """Return the end of a file, or an empty string if there is none."""
        try:
            with self.path(who).open("rb") as file:
                file.seek(max(0, self.path(who).stat().st_size - TAIL_BYTES_MAX))
                lines = file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-TAIL_LINES_MAX:])

    def milestone(self, rank: int) -> str:
        """Return how far a rank's start has come, or an empty string before the first sign."""
        try:
            text = self.path(rank).read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return next((words for sign, words in reversed(MILESTONES) if sign in text), "")

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Send what processes forked inside the block write to their files.

        multiprocessing calls the hook in each child before its target runs. A spawned child is
        not reached: it writes where its parent does.
        """
        hook = _ChildHook(self)
        util.register_after_fork(hook, _ChildHook.enter)
        try:
            yield
        finally:
            hook.logs = None

    def adopt(self, process_name: str) -> None:
        """In a new child: take its file as output, leave the terminal's group, die with the parent.

        A Ctrl-C reaches the worker alone, which then drains; a killed worker leaves no engine.
        """
        who = self._by_process.get(process_name)
        if who is None:
            return
        _forget_signal_handlers()
        # Opened for the life of the process.
        file = os.open(self.path(who), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.close(file)
        os.setpgid(0, 0)
        end_with(self._parent_pid)
        faulthandler.enable(2)
        stacks.answer()


def end_with(parent_pid: int) -> None:
    """From now on this process is killed when its parent dies; ends it if that has happened."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _forget_signal_handlers() -> None:
    """Undo what an event loop of the parent has set up for signals.

    Its wakeup descriptor is shared after a fork: a signal to the child would be delivered to the
    parent's handler, and the child itself would ignore it.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


class _ChildHook:
    """What multiprocessing keeps, weakly, for its children; inert once the block is left."""

    def __init__(self, logs: ProcessLogs) -> None:
        self.logs: ProcessLogs | None = logs

    def enter(self) -> None:
        """Run in each child that multiprocessing forks from this process."""
        if self.logs is not None:
            self.logs.adopt(multiprocessing.current_process().name)


def without_prefix(line: str) -> str:
    """Return a log line without the process's name."""
    return _PREFIX.sub("", line)
