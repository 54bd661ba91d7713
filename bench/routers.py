"""Routers alone: ours and vLLM's, each before backends that keep a set pace and compute nothing.

What a router costs is then all that differs: the client and the pace are the same. vLLM's
forwards HTTP from backends that speak it; ours takes token ids over gRPC from simulated engines,
makes text of them and writes the events itself.
"""

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from bench.systems import READY_S, System, server, tree, wait_healthy
from services.cli.plan import Plan
from services.cli.stack import running
from tests.clients.environments import client

SEATS = 512
BLOCKS = SEATS * 64


@contextlib.asynccontextmanager
async def splitwave(
    name: str, model: Path, run_dir: Path, port: int, *, step_s: float
) -> AsyncIterator[System]:
    """Our router before simulated engines, one prefill rank and one decode rank."""
    engine = {"seats_per_rank": str(SEATS), "blocks_per_rank": str(BLOCKS)}
    plan = Plan(
        model_path=model,
        served_model=model.name,
        run_dir=run_dir / name,
        engine="sim",
        decode_ranks=1,
        grpc_port=port,
        http_port=port + 1,
        prefill_port=port + 2,
        decode_port=port + 3,
        prefill_settings=engine,
        decode_settings={**engine, "step_fixed_s": str(step_s)},
    )
    async with running(plan, lambda who, what: None) as stack:
        await stack.ready(READY_S)
        assert stack.router is not None
        backends = [
            process
            for worker in stack.workers.values()
            if worker.pid is not None
            for process in tree(worker.pid)
        ]
        processes = {"router": tree(stack.router.process.pid), "backends": backends}
        yield System(name, plan.router_http, processes, 0)


@contextlib.asynccontextmanager
async def vllm(
    name: str, model: Path, run_dir: Path, port: int, *, step_s: float
) -> AsyncIterator[System]:
    """vLLM's router before a prefill and a decode backend of bench/mock_backend.py."""
    del model
    prefill, decode = f"127.0.0.1:{port + 1}", f"127.0.0.1:{port + 2}"
    with contextlib.ExitStack() as stack:
        backends = [
            stack.enter_context(_mock(address, step_s, run_dir)) for address in (prefill, decode)
        ]
        log_path = run_dir / f"{name}.log"
        command = [
            str(client("vllm-router") / "vllm-router"),
            *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
            *("--vllm-pd-disaggregation", "--prefill", f"http://{prefill}"),
            *("--decode", f"http://{decode}", "--max-concurrent-requests", "4096"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(port + 3)),
        ]
        router = stack.enter_context(server(command, None, log_path))
        wait_healthy(router, f"127.0.0.1:{port}", log_path)
        found = {
            "router": tree(router.pid),
            "backends": [process for each in backends for process in tree(each.pid)],
        }
        yield System(name, f"127.0.0.1:{port}", found, 0)


@contextlib.contextmanager
def _mock(address: str, step_s: float, run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    port = address.rpartition(":")[2]
    command = [sys.executable, "-m", "bench.mock_backend", port, str(step_s)]
    log_path = run_dir / f"mock-{port}.log"
    with server(command, None, log_path) as process:
        wait_healthy(process, address, log_path)
        yield process
