"""Starts both sides of a handoff, tells them what to do, and ends them."""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # answers are JSON

from bench.decode_modes.models import write
from bench.handoff.shapes import Cache
from splitwave.core.mode import Device, lookup

ROOT = Path(__file__).parents[2]
KILL_WAIT_S = 10.0
LOG_LINES = 25
TOKENS_MAX = 512
"""Longest sequence of the engines: nothing is computed, so that they start soon."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    # Tells in each side's log which ways UCX has chosen for which sizes.
    "UCX_PROTO_INFO": "y",
}
_PR_SET_PDEATHSIG = 1


class SideFailed(Exception):
    """A side has ended, or was too slow; the message has the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a side runs."""

    role: str
    device: str
    """`cpu` or `cuda`."""
    order: str
    """cuda: visible devices, the side's own first."""
    port: int
    environment: Mapping[str, str]


def spec(cache: Cache, name: str, place: Place, blocks: int, folder: Path) -> dict[str, Any]:
    """What a side's engine is made of."""
    prefill = place.role == "prefill"
    mode = lookup(f"{place.role}_cpu_eager")
    arguments: dict[str, Any] = {
        "model": str(write(cache.shape(name, place.device), folder / "models")),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": cache.dtype[place.device],
        "block_size": cache.block_tokens[place.device],
        "num_gpu_blocks_override": blocks,
        "max_model_len": TOKENS_MAX,
        "max_num_seqs": 4,
        "max_num_batched_tokens": TOKENS_MAX,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": (blocks + 1) * cache.block_bytes(place.device),
    }
    if place.device == "cpu":
        assert mode.device is Device.CPU
        arguments["async_scheduling"] = False
    return {
        "arguments": arguments,
        "transfer": {
            "kv_connector": "SplitwaveNixlConnector",
            "kv_connector_module_path": "splitwave.engine.vllm.connector",
            "kv_role": "kv_producer" if prefill else "kv_consumer",
            "kv_buffer_device": place.device,
            "kv_load_failure_policy": "fail",
        },
    }


class Told:
    """A side that runs, and answers."""

    def __init__(self, place: Place, folder: Path, made: Mapping[str, Any]) -> None:
        self.place = place
        self.log_path = folder / f"{place.role}.log"
        path = folder / f"{place.role}.json"
        path.write_text(json.dumps(made), encoding="utf-8")
        ours, theirs = os.pipe()
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(place.port),
            **place.environment,
        }
        if place.device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = place.order
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.handoff.side", str(path), str(theirs)],
                cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log,
                pass_fds=(theirs,), process_group=0, preexec_fn=_die_with_parent,
            )  # fmt: skip
        os.close(theirs)
        self._answers = os.fdopen(ours, "rb", buffering=0)
        self._read = b""

    def say(self, **command: object) -> None:
        """Tell it to do something; `hear` has its answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write((json.dumps(command) + "\n").encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise SideFailed(f"{self.place.role}: has ended\n{self.tail()}") from None

    def hear(self, until_s: float) -> dict[str, Any]:
        """Its next answer. Raises SideFailed if it has none in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._read:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    raise SideFailed(f"{self.place.role}: no answer in time\n{self.tail()}")
                got = self._answers.read(1 << 20)
                if not got:
                    raise SideFailed(f"{self.place.role}: has ended\n{self.tail()}")
                self._read += got
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise SideFailed(f"{self.place.role}: {answer['failed']}\n{self.tail()}")
        return answer

    def ask(self, until_s: float, **command: object) -> dict[str, Any]:
        """Tell and hear."""
        self.say(**command)
        return self.hear(until_s)

    def tail(self) -> str:
        """The end of its log."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(line[:300] for line in lines[-LOG_LINES:])

    def kill(self) -> None:
        """End it and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError, OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        self.process.wait(KILL_WAIT_S)
        self._answers.close()


@contextlib.contextmanager
def sides(
    cache: Cache, name: str, places: Mapping[str, Place], blocks: int, folder: Path
) -> Iterator[dict[str, Told]]:
    """Both sides, starting side by side; dead when this is left."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Told] = {}
    try:
        for role, place in places.items():
            found[role] = Told(place, folder, spec(cache, name, place, blocks, folder))
        yield found
    finally:
        for side in found.values():
            side.kill()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
