"""One process that asks: its share of a cell's requests, with the time of every event kept.

    python -m bench.split.client SPEC.json

It says `ready` on stdout, reads from stdin when the cell begins (seconds of the monotonic clock,
which all processes of a host share), and writes what it saw to the spec's `out`.
"""

import asyncio
import contextlib
import enum
import json
import random
import sys
import time
from array import array
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import uvloop

from bench.split.balance import Balancer, Board
from bench.split.settings import Load
from bench.split.trace import Trace

REASON_CHARS = 200


class Status(enum.IntEnum):
    """How a request ended for its client."""

    DONE = 0
    FAILED = 1
    """Refused, broken off, or with another number of tokens."""
    UNFINISHED = 2
    """Cut off when the cell's time was over."""


@dataclass(slots=True)
class Asked:
    """One request. Times are seconds since the cell began."""

    number: int
    due_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    events_s: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: int = 0
    status: Status = Status.UNFINISHED
    reason: str = ""


class Spec(msgspec.Struct, kw_only=True):
    """What a client is told."""

    seed: int
    kind: str
    value: float
    prompt_tokens: int
    completion_tokens: int
    token_ids: tuple[int, int]
    warm_s: float
    until_s: float
    """The last request is sent before this."""
    end_s: float
    """What has not ended by then is cut off."""
    model: str
    addresses: list[str]
    board: str
    client: int
    clients: int
    out: str

    def trace(self) -> Trace:
        """What is asked by all clients together."""
        return Trace(
            seed=self.seed,
            load=Load(kind=self.kind, value=self.value),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            token_ids=self.token_ids,
            warm_s=self.warm_s,
            until_s=self.until_s,
        )


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []  # msgspec copies an empty default
    error: dict[str, object] | None = None


_decode = msgspec.json.Decoder(_Event).decode


class Refused(Exception):
    """The system did not serve a request."""


class Client:
    """Sends this client's requests and keeps what comes."""

    def __init__(self, spec: Spec, http: aiohttp.ClientSession, begin_s: float) -> None:
        self._spec = spec
        self._trace = spec.trace()
        self._http = http
        self._begin_s = begin_s
        board = Board(Path(spec.board), spec.clients, len(spec.addresses))
        self._balancer = Balancer(board, spec.client, random.Random(f"{spec.seed}/{spec.client}"))
        self.asked: list[Asked] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def now_s(self) -> float:
        """Since the cell began."""
        return time.monotonic() - self._begin_s

    async def run(self) -> None:
        """Ask until the cell is over; what has not ended then is cut off."""
        sending = self._open() if self._spec.kind == "poisson" else self._closed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._spec.end_s - self.now_s()):
                await sending
                while self._tasks:
                    await asyncio.wait(self._tasks)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _open(self) -> None:
        """Each request when it is due, whatever became of those before it."""
        due = self._trace.arrivals_s()
        mine = range(self._spec.client, len(due), self._spec.clients)
        for number in mine:
            prompt = self._trace.prompt(number)  # Before it is due: drawing it takes a while.
            await self._until(due[number])
            self._start(self._ask(Asked(number, due[number]), prompt))

    async def _closed(self) -> None:
        starts = self._trace.starts_s()
        for stream in range(self._spec.client, len(starts), self._spec.clients):
            self._start(self._stream(stream, starts[stream]))

    async def _stream(self, stream: int, due_s: float) -> None:
        """One request after the other."""
        turn = 0
        await self._until(due_s)
        while self.now_s() < self._spec.until_s:
            number = self._trace.number(stream, turn)
            prompt = self._trace.prompt(number)
            asked = Asked(number, self.now_s())
            await self._ask(asked, prompt)
            if asked.status is Status.FAILED:
                await asyncio.sleep(0.1)  # A system that is gone is not asked in a tight loop.
            turn += 1

    def _start(self, asking: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(asking)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until(self, at_s: float) -> None:
        if (left_s := at_s - self.now_s()) > 0:
            await asyncio.sleep(left_s)

    async def _ask(self, asked: Asked, prompt: list[int]) -> None:
        """One request to its end, which is kept, whatever it is."""
        self.asked.append(asked)
        place = self._balancer.take()
        asked.sent_s = self.now_s()
        try:
            await self._read(asked, prompt, self._spec.addresses[place])
            wanted = self._spec.completion_tokens
            if asked.tokens != wanted:
                raise Refused(f"{asked.tokens} tokens came where {wanted} were asked for")
            asked.status = Status.DONE
        except (Refused, aiohttp.ClientError, msgspec.DecodeError, OSError, ValueError) as error:
            asked.status = Status.FAILED
            asked.reason = f"{type(error).__name__}: {error}"[:REASON_CHARS]
        finally:
            asked.ended_s = self.now_s()
            self._balancer.give(place)

    async def _read(self, asked: Asked, prompt: list[int], address: str) -> None:
        body = {
            "model": self._spec.model,
            "prompt": prompt,
            "max_tokens": self._spec.completion_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            # Every token then has an event, also one that is no text or half a letter.
            "return_token_ids": True,
        }
        async with self._http.post(f"http://{address}/v1/completions", json=body) as response:
            if response.status != 200:
                raise Refused(f"status {response.status}: {await response.text()}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self._take(asked, _decode(line[6:]))

    def _take(self, asked: Asked, event: _Event) -> None:
        if event.error is not None:
            raise Refused(str(event.error.get("message", event.error)))
        tokens = sum(len(choice.token_ids or ()) for choice in event.choices)
        if tokens:
            asked.events_s.append(self.now_s())
            asked.tokens += tokens


def save(path: Path, asked: list[Asked], cpu_s: float, wall_s: float) -> None:
    """Keep what was seen: columns, and the events of all requests one behind the other."""
    events = [np.asarray(each.events_s, dtype=np.float64) for each in asked]
    np.savez(
        path,
        number=np.array([each.number for each in asked], dtype=np.int64),
        due_s=np.array([each.due_s for each in asked]),
        sent_s=np.array([each.sent_s for each in asked]),
        ended_s=np.array([each.ended_s for each in asked]),
        tokens=np.array([each.tokens for each in asked], dtype=np.int64),
        status=np.array([each.status for each in asked], dtype=np.int64),
        reason=np.array([each.reason for each in asked], dtype=np.str_),
        events=np.array([len(each) for each in events], dtype=np.int64),
        events_s=np.concatenate(events) if events else np.zeros(0),
        used_s=np.array([cpu_s, wall_s]),
    )


async def run(spec: Spec, begin_s: float) -> list[Asked]:
    """Ask all that this client has to ask."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        client = Client(spec, http, begin_s)
        await client.run()
    return client.asked


def main() -> int:
    """Be one client."""
    spec = msgspec.convert(json.loads(Path(sys.argv[1]).read_text()), Spec)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    begin_s = float(sys.stdin.readline())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        before_s, began_s = time.process_time(), time.monotonic()
        asked = runner.run(run(spec, begin_s))
        cpu_s, wall_s = time.process_time() - before_s, time.monotonic() - began_s
    save(Path(spec.out), asked, cpu_s, wall_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
