"""What is measured: a split stack, and one vLLM server on the same cores. Each is up or down."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.cli.plan import Plan, read_experts
from services.cli.stack import Stack, running

ROOT = Path(__file__).parents[1]
READY_S = 600.0
STOP_S = 30.0
SEATS = 32
"""Requests that each system can run at once, over all of its ranks."""
MODEL_LEN_TOKENS = 1024
STALL_S = 300
"""A prefill step of the demo's model may take long on a busy machine; that is told, not ended."""


@dataclass(frozen=True, slots=True)
class System:
    """One system that is up."""

    name: str
    address: str
    """host:port of its OpenAI API."""
    processes: Mapping[str, list[psutil.Process]]
    """By what they do."""
    engines: int
    """Processes that run the model."""

    def cpu_s(self) -> dict[str, float]:
        """User and system seconds so far, by what the processes do."""
        return {name: sum(map(_cpu_s, each)) for name, each in self.processes.items()}

    def rss_mib(self) -> dict[str, int]:
        """Resident memory now, in MiB; pages that forks share are counted in each."""
        return {
            name: round(sum(process.memory_info().rss for process in each) / 2**20)
            for name, each in self.processes.items()
        }


@contextlib.asynccontextmanager
async def split(name: str, model: Path, run_dir: Path, port: int) -> AsyncIterator[System]:
    """`split_1p2d` and the like: one prefill rank and some decode ranks behind a router."""
    decode_ranks = int(name.removeprefix("split_1p").removesuffix("d"))
    plan = Plan(
        model_path=model,
        served_model=model.name,
        run_dir=run_dir / name,
        decode_ranks=decode_ranks,
        experts=read_experts(model),
        grpc_port=port,
        http_port=port + 1,
        prefill_port=port + 2,
        decode_port=port + 3,
        side_channel_port=port + 4,
        worker_flags={"router": ("--stall-max-s", str(STALL_S))},
        prefill_settings={"seats_max": str(SEATS)},
        decode_settings={"seats_max": str(SEATS // decode_ranks)},
    )
    async with running(plan, lambda who, what: None) as stack:
        await stack.ready(READY_S)
        yield System(name, plan.router_http, _of_stack(stack), 1 + decode_ranks)


def _of_stack(stack: Stack) -> dict[str, list[psutil.Process]]:
    assert stack.router is not None
    found = {"router": tree(stack.router.process.pid)}
    for name, worker in stack.workers.items():
        assert worker.pid is not None
        own, *engines = tree(worker.pid)
        found[f"{name}_worker"], found[f"{name}_engines"] = [own], engines
    return found


@contextlib.asynccontextmanager
async def aggregated(name: str, model: Path, run_dir: Path, port: int) -> AsyncIterator[System]:
    """`aggregated_2_threads` and the like: vLLM's own server, without anything of ours."""
    threads = name.split("_")[1]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_PLUGINS": "none",
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        *(sys.executable, "scripts/vllm_cli.py", "serve", str(model)),
        *("--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", str(MODEL_LEN_TOKENS), "--block-size", "32"),
        *("--max-num-seqs", str(SEATS), "--max-num-batched-tokens", "2048", "--enforce-eager"),
        *("--no-enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"),
        *("--distributed-executor-backend", "uni"),
    ]
    log_path = run_dir / f"{name}.log"
    with server(command, environment, log_path) as process:
        wait_healthy(process, f"127.0.0.1:{port}", log_path)
        own, *engines = tree(process.pid)
        yield System(name, f"127.0.0.1:{port}", {"server": [own], "engines": engines}, 1)


@contextlib.contextmanager
def server(
    command: list[str], environment: Mapping[str, str] | None, log_path: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that serves; it and its children are gone afterwards. None: our environment."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    family = [psutil.Process(process.pid)]
    try:
        yield process
        family = tree(process.pid)
    finally:
        process.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_S)
        for survivor in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                survivor.kill()
        process.wait(STOP_S)


def wait_healthy(process: "subprocess.Popen[bytes]", address: str, log_path: Path) -> None:
    """Return once its /health says 200. RuntimeError, with its log, if it ends before that."""
    deadline_s = time.monotonic() + READY_S
    while not _healthy(address):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"{process.args!r} is not there:\n{log_path.read_text()[-4000:]}")
        time.sleep(0.5)


def _healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it."""
    top = psutil.Process(pid)
    return [top, *top.children(recursive=True)]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
