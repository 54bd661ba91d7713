"""A whole stack behind its gateway, started for the accuracy check and stopped after it."""

import asyncio
import contextlib
import json
import os
import re
import signal
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from splitwave.core.fingerprint import Fingerprint
from splitwave.engine.vllm.switches import PROBE

READY = b"ready:"
READY_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 60.0
TAIL_CHARS = 3000
_STEPS = re.compile(r"^splitwave_engine_steps_total\{.*\} ([0-9.e+]+)$", re.M)


class GatewayFailed(Exception):
    """The stack did not start; the message has the end of what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a stack is started and where it listens."""

    words: Sequence[str]
    http: str
    """host:port of its OpenAI API."""
    metrics: Sequence[str]
    """host:port of its workers' /metrics."""
    model: str
    """Served model name."""
    model_path: str
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """By role the file into which its worker writes the group's fingerprint."""


@contextlib.asynccontextmanager
async def running(command: Command, environment: Mapping[str, str]) -> AsyncIterator[None]:
    """A ready stack with these variables and no others. Raises GatewayFailed."""
    await asyncio.to_thread(_forget, command)
    process = await asyncio.create_subprocess_exec(
        *command.words,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    said = bytearray()
    ready = asyncio.Event()
    reading = asyncio.create_task(_read(process, said, ready))
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait(
            {reading, waiting}, timeout=READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not ready.is_set():
            raise GatewayFailed(
                f"the stack did not start:\n{said.decode(errors='replace')[-TAIL_CHARS:]}"
            )
        yield
    finally:
        waiting.cancel()
        await _stop(process)
        await asyncio.wait({reading}, timeout=STOP_TIMEOUT_S)


def _forget(command: Command) -> None:
    """Leave nothing that an earlier stack said."""
    for path in command.fingerprints.values():
        Path(path).unlink(missing_ok=True)


def stack_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Of the variables that the battery was started with, those that its stacks have too.

    All that engines, workers and routers read; the plan says in full what `splitwave up` reads.
    """
    return {
        name: value
        for name, value in environ.items()
        if name != PROBE and not name.startswith("SPLITWAVE_UP_")
    }


async def _read(process: asyncio.subprocess.Process, said: bytearray, ready: asyncio.Event) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        said += line
        if line.startswith(READY):
            ready.set()


async def _stop(process: asyncio.subprocess.Process) -> None:
    """As Ctrl-C does; by force if that takes too long."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def read_fingerprints(command: Command) -> dict[str, Fingerprint]:
    """By role what the running stack's engines are. Raises GatewayFailed if one has not said."""
    found = {}
    for role, path in command.fingerprints.items():
        try:
            found[role] = Fingerprint(json.loads(Path(path).read_text()))
        except (OSError, ValueError) as error:
            raise GatewayFailed(f"the {role} worker did not say what it runs: {error}") from error
    return found


async def steps_run(command: Command) -> int:
    """Steps that all ranks of the stack have executed, by their own counts."""
    return sum([await asyncio.to_thread(_steps_at, address) for address in command.metrics])


def _steps_at(address: str) -> int:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10.0) as response:
        text = response.read().decode()
    return int(sum(float(value) for value in _STEPS.findall(text)))
