"""A client of OpenAI's completions API that keeps the time of every event."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from bench.workload import Ask


@dataclass(slots=True)
class Sample:
    """One request as its client saw it. Times are seconds of `time.perf_counter`."""

    ask: Ask
    sent_s: float
    text_s: list[float] = field(default_factory=list)
    """When events with text came."""
    ended_s: float = 0.0
    tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        """Time to the first text."""
        return (self.text_s[0] - self.sent_s) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        """Times between events with text."""
        pairs = zip(self.text_s, self.text_s[1:], strict=False)
        return [(later - earlier) * 1e3 for earlier, later in pairs]

    @property
    def tpot_ms(self) -> float:
        """Time per token behind the first."""
        return (self.text_s[-1] - self.text_s[0]) / max(1, self.tokens - 1) * 1e3


class _Choice(msgspec.Struct):
    text: str = ""


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[_Choice] = []  # msgspec copies an empty default
    usage: _Usage | None = None
    error: dict[str, object] | None = None


_decode = msgspec.json.Decoder(_Event).decode


async def drive(address: str, model: str, asks: Sequence[Ask]) -> list[Sample]:
    """Send a round of requests: each stream one after the other, all streams at once."""
    streams: dict[int, list[Ask]] = {}
    for ask in asks:
        streams.setdefault(ask.stream, []).append(ask)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://{address}", connector=connector) as http:
        done = await asyncio.gather(*(_stream(http, model, each) for each in streams.values()))
    return [sample for samples in done for sample in samples]


async def _stream(http: aiohttp.ClientSession, model: str, asks: Sequence[Ask]) -> list[Sample]:
    return [await request(http, model, ask) for ask in asks]


async def request(http: aiohttp.ClientSession, model: str, ask: Ask) -> Sample:
    """Send one and keep the time of its events. RuntimeError if it does not come whole."""
    body = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.completion_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sample = Sample(ask, time.perf_counter())
    async with http.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                _take(sample, _decode(line[6:]))
    sample.ended_s = time.perf_counter()
    if sample.tokens != ask.completion_tokens:
        raise RuntimeError(f"{sample.tokens} tokens came where {ask.completion_tokens} were asked")
    return sample


def _take(sample: Sample, event: _Event) -> None:
    if event.error is not None:
        raise RuntimeError(f"a stream failed: {event.error}")
    if any(choice.text for choice in event.choices):
        sample.text_s.append(time.perf_counter())
    if event.usage is not None:
        sample.tokens = event.usage.completion_tokens
