"""A compiled decode group runs a step outside its mode, an eager one stands beside it.

`python -m tests.e2e.decertified_driver MODEL DIR` starts a prefill worker, two decode workers and a
router as processes of their own, sends requests, and writes what it saw to DIR/report.json.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any  # JSON

import grpc.aio

from splitwave.core.errors import ServingError
from splitwave.core.generation import Sampling
from splitwave.core.worker import WorkerDescription
from splitwave.runtime.tracing_files import read_spans
from splitwave.wire.channel import CHANNEL_OPTIONS
from splitwave.wire.client import Ask, describe_worker, generate
from tests.e2e.live_stack import free_ports

READY_S = 400.0
STREAMS = 12
TOKENS = 900
"""So many that a quiet machine is not done with them in the grace of a drain, a second."""
SEATS = 4
"""A rank's: fewer than there are streams, so that they wait for room within the grid."""
STEPS_AGAIN = 10


class Processes:
    """The four programs, each with a log."""

    def __init__(self, model: Path, out: Path) -> None:
        self._model, self._out = model, out
        self.first_port = free_ports(16)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def address(self, index: int) -> str:
        """host:port of the `index`-th program."""
        return f"127.0.0.1:{self.first_port + index}"

    def start(self, name: str, index: int, *flags: str, **environment: str) -> None:
        """Start one program."""
        service = name.rstrip("01")
        command = [
            sys.executable, "-m", f"services.{service}", "--listen", self.address(index),
            "--model-path", str(self._model), "--drain-unready-s", "0", "--drain-grace-s", "1",
            "--trace-exporter", "file", "--trace-dir", str(self._out / "traces"),
            "--allow-uncertified", "true", "--log-format", "json", *flags,
        ]  # fmt: skip
        with (self._out / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | environment
            )

    def worker(self, name: str, index: int, *flags: str, **environment: str) -> None:
        """Start a worker with side channel ports of its own."""
        port = self.first_port + 8 + 2 * index
        self.start(
            name, index, "--worker-id", name, "--log-dir", str(self._out / name),
            "--engine-settings", f"side_channel_port={port}", "--decertified-patience-s", "60",
            *flags, **environment,
        )  # fmt: skip

    def stop(self) -> dict[str, int]:
        """Stop all; returns their exit codes."""
        for process in reversed(self.running.values()):
            process.terminate()
        return {name: process.wait(60) for name, process in self.running.items()}


async def described(address: str) -> WorkerDescription | None:
    """What a worker says; None while it does not."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        try:
            return await describe_worker(channel, 5.0, counters=True)
        except ServingError:
            return None


async def until_described(addresses: list[str]) -> list[WorkerDescription]:
    """Wait until every worker answers."""
    until_s = time.monotonic() + READY_S
    while True:
        found = [await described(address) for address in addresses]
        if all(found):
            return [x for x in found if x is not None]
        assert time.monotonic() < until_s, "the workers did not start"
        await asyncio.sleep(0.5)


async def stream(channel: grpc.aio.Channel, number: int, tokens: int) -> dict[str, Any]:
    """One request, from its first token to its end."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompt = [65 + place % 26 for place in range(40)]
    ask = Ask(prompt=prompt, sampling=sampling, request_id=f"stream-{number}")
    ids: list[int] = []
    try:
        async for answer in generate(channel, ask, 120.0):
            ids += answer.token_ids
            attempts = answer.attempts
    except ServingError as error:
        return {"tokens": ids, "error": error.reason.value, "message": error.message}
    return {"tokens": ids, "attempts": attempts}


async def ready(channel: grpc.aio.Channel) -> None:
    """Wait until a request is served."""
    until_s = time.monotonic() + READY_S
    while "error" in await stream(channel, 0, 4):
        assert time.monotonic() < until_s, "the stack does not serve"
        await asyncio.sleep(0.5)


async def until_it_serves_again(
    channel: grpc.aio.Channel, decode: list[str]
) -> tuple[list[dict[str, Any]], list[WorkerDescription]]:
    """Ask until the first group has run some steps: its router finds it again in its own time."""
    until_s = time.monotonic() + READY_S
    answers: list[dict[str, Any]] = []
    while True:
        asked = (stream(channel, 100 + len(answers) + n, 20) for n in range(STREAMS))
        answers += await asyncio.gather(*asked)
        loaded = await until_described(decode)
        if sum(loaded[0].rank_counters[0].steps_by_kind.values()) > STEPS_AGAIN:
            return answers, loaded
        assert time.monotonic() < until_s, "no request came to the group that started over"


async def drive(processes: Processes, out: Path) -> dict[str, Any]:
    """Run the scenario."""
    decode = [processes.address(1), processes.address(2)]
    before = await until_described([processes.address(0), *decode])
    async with grpc.aio.insecure_channel(processes.address(3), options=CHANNEL_OPTIONS) as channel:
        await ready(channel)
        answers = await asyncio.gather(*(stream(channel, n, TOKENS) for n in range(1, STREAMS + 1)))
        after = await until_described(decode)
        again, loaded = await until_it_serves_again(channel, decode)
    return {
        "answers": answers,
        "again": again,
        "epochs": [[x.epoch for x in before[1:]], [x.epoch for x in after]],
        "standing": [x.load.standing.value for x in after],
        "kinds": [[dict(r.steps_by_kind) for r in x.rank_counters] for x in loaded],
        "violating_steps": [x.certification.violating_steps for x in loaded],
    }


def main() -> None:
    """Start everything, write the report."""
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    processes = Processes(model, out)
    compiled = ("--mode", "decode_cpu_compiled", "--engine-settings", f"seats_max={SEATS}")
    try:
        processes.worker("prefill", 0)
        processes.worker("decode0", 1, *compiled, SPLITWAVE_FAULTS="out_of_mode_step")
        processes.worker("decode1", 2, "--engine-settings", f"seats_max={SEATS}")
        processes.start(
            "router", 3, "--prefill", processes.address(0),
            "--decode", f"{processes.address(1)},{processes.address(2)}",
        )  # fmt: skip
        report = asyncio.run(drive(processes, out))
    finally:
        codes = processes.stop()
    spans = list(read_spans(out / "traces"))
    report["codes"] = codes
    report["violations"] = [
        dict(span.attributes) for span in spans if span.name == "splitwave.mode.violation"
    ]
    report["attempt_errors"] = sorted(
        {str(x.attributes.get("error.type")) for x in spans if x.name == "splitwave.attempt"}
    )
    (out / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
