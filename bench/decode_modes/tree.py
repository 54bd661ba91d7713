"""Start one row's processes, read along, and end them all, whatever became of them."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any  # reports are JSON

import psutil

from bench.decode_modes.spec import Spec
from bench.decode_modes.traffic import RANKS
from bench.decode_modes.turn import SLOT
from splitwave.engine.vllm.switches import WEDGE_DIR

ROOT = Path(__file__).parents[2]
POLL_S = 0.1
LINGER_S = 15.0
"""After one rank has ended badly, how long the others may still say what they saw."""
LOG_LINES_KEPT = 25
PORTS = range(23000, 29000, 16)
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "EP_JIT_CACHE_DIR": "deep_ep",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
}
"""Where kernels compiled at run time are kept: a folder a rank, or ranks disturb each other."""
PR_SET_PDEATHSIG = 1

Say = Callable[[str], None]


@dataclass
class Outcome:
    """What came of one row's processes."""

    status: str
    """`done`, `failed` (a rank ended badly), or `late` (the limit came first)."""
    wall_s: float
    exit_codes: list[int | None]
    reports: list[list[dict[str, Any]]]
    """Of each rank, in order."""
    log_tails: list[str] = field(default_factory=list)
    stopped: dict[str, Any] | None = None
    """The wedge on purpose: seconds until the other rank ended by itself, and what it said."""

    def first(self, rank: int, key: str) -> Any:  # whatever was reported
        """The first report of a rank that has this field, or None."""
        return next((report for report in self.reports[rank] if key in report), None)


def free_ports() -> int:
    """The first of 16 neighbouring ports that nothing listens on.

    Rows that boot side by side look in stretches of their own: a port that is free to one of them
    may be the other's in a moment.
    """
    slot = int(os.environ.get(SLOT, "0"))
    for first in PORTS[slot * 16 :]:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + 16):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError("no 16 neighbouring ports are free")


def environment(mode_env: Mapping[str, str], rank: int, port: int, caches: Path) -> dict[str, str]:
    """Environment of one rank's process."""
    env = dict(os.environ)
    for name, folder in CACHES.items():
        env[name] = str(Path(env.get(name) or caches / folder) / f"rank{rank}")
        Path(env[name]).mkdir(parents=True, exist_ok=True)
    return env | {
        "VLLM_DP_SIZE": str(RANKS),
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **mode_env,
    }  # fmt: skip


def _die_with_parent() -> None:
    """In the child: be killed when whoever started it ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def started(
    spec: Spec, mode_env: Mapping[str, str], caches: Path, module: str = "bench.decode_modes.rank"
) -> Iterator["Tree"]:
    """The row's processes, a rank's each; all are dead, with their children, when this is left."""
    out_dir, port = Path(spec.out_dir), free_ports()
    out_dir.mkdir(parents=True, exist_ok=True)
    spec.save(out_dir / "spec.json")
    tree = Tree(out_dir)
    # Not in a folder of all rows: wedged ranks read each other's reports, and answer them.
    mode_env = {WEDGE_DIR: str(out_dir)} | dict(mode_env)
    try:
        for rank in range(RANKS):
            command = [sys.executable, "-m", module]
            command += ["--spec", str(out_dir / "spec.json"), "--rank", str(rank)]
            with (out_dir / f"rank{rank}.log").open("w") as log:
                tree.ranks.append(
                    subprocess.Popen(  # this command alone
                        command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                        env=environment(mode_env, rank, port, caches), process_group=0,
                        preexec_fn=_die_with_parent,  # no thread runs here
                    )
                )  # fmt: skip
        yield tree
    finally:
        tree.kill()


class Tree:
    """The processes of one row."""

    def __init__(self, out_dir: Path) -> None:
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.reports: list[list[dict[str, Any]]] = [[] for _ in range(RANKS)]
        self._out_dir = out_dir
        self._began_s = time.monotonic()

    def wait(self, limit_s: float, say: Say) -> Outcome:
        """Wait for the end of all ranks, of one of them and a while, or of the time."""
        status, end_s = "late", self._began_s + limit_s
        while time.monotonic() < end_s:
            self.read(say)
            codes = [process.poll() for process in self.ranks]
            if all(code == 0 for code in codes):
                status = "done"
                break
            if all(code is not None for code in codes):
                status = "failed"
                break
            if any(code for code in codes) and status == "late":
                status, end_s = "failed", min(end_s, time.monotonic() + LINGER_S)
            time.sleep(POLL_S)
        return self._outcome(status, say)

    def wait_wedged(self, limit_s: float, bound_s: float, say: Say) -> Outcome:
        """Stop rank 1 once batches run, and wait for rank 0 to end by itself within its bound."""
        end_s = self._began_s + limit_s
        while time.monotonic() < end_s and not all(_batches(r) >= 1 for r in self.reports):
            self.read(say)
            if any(process.poll() is not None for process in self.ranks):
                return self._outcome("failed", say)
            time.sleep(POLL_S)
        if not all(_batches(reports) >= 1 for reports in self.reports):
            return self._outcome("late", say)
        stopped = _family(self.ranks[1])
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        say(f"rank 1 is stopped ({len(stopped)} processes)")
        while self.ranks[0].poll() is None and time.monotonic() - stopped_s < bound_s:
            time.sleep(POLL_S)
        seconds, code = time.monotonic() - stopped_s, self.ranks[0].poll()
        outcome = self._outcome("done" if code is not None else "late", say)
        outcome.stopped = {
            "ended_by_itself": code is not None,
            "seconds": round(seconds, 2),
            "bound_s": bound_s,
            "exit_code": code,
            "text": _tail(self._out_dir / "rank0.log"),
        }
        return outcome

    def read(self, say: Say) -> None:
        """Take in what ranks have reported since the last time."""
        for rank, seen in enumerate(self.reports):
            path = self._out_dir / f"rank{rank}.jsonl"
            lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
            for line in lines[len(seen) :]:
                report = json.loads(line)
                seen.append(report)
                if rank == 0 or "failed" in report:
                    say(f"rank {rank}: {in_words(report)}")

    def _outcome(self, status: str, say: Say) -> Outcome:
        codes = [process.poll() for process in self.ranks]
        self.kill()
        self.read(say)
        tails = [] if status == "done" else [_tail(self._log(rank)) for rank in range(RANKS)]
        wall_s = round(time.monotonic() - self._began_s, 1)
        return Outcome(status, wall_s, codes, self.reports, tails)

    def _log(self, rank: int) -> Path:
        return self._out_dir / f"rank{rank}.log"

    def kill(self) -> None:
        """Kill every process of the row, stopped ones too."""
        family = [process for rank in self.ranks for process in _family(rank)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for rank in self.ranks:
            rank.wait()
        psutil.wait_procs(family, timeout=10)


def _family(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """A process that still runs and all below it."""
    if process.poll() is not None:
        return []
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    return []


def _batches(reports: list[dict[str, Any]]) -> int:
    return sum("phase" in report for report in reports)


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(line[:400] for line in lines[-LOG_LINES_KEPT:])


def in_words(report: Mapping[str, Any]) -> str:
    """A progress line."""
    if "begins" in report:
        return f"begins {report['begins']}"
    if "booted" in report:
        return f"booted after {report['at_s']:.1f} s, {report['cudagraph_mode']}"
    if "kernels" in report:
        return f"profiled at {report['sequences']}"
    if "phase" in report:
        kinds = ", ".join(f"{kind} {n}" for kind, n in report["steps_by_kind"].items())
        return (
            f"{report['phase']}: {report['median_ms']:.3f} ms median, {report['p99_ms']:.3f} p99,"
            f" {report['tokens_per_s']:.0f} tokens/s a rank; steps {kinds}"
        )
    return str(report.get("failed") or "done")
