"""`splitwave waves`: how the ranks of each group step together, live."""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence

import grpc.aio

from services.cli.given import addresses, seconds, why_no_worker
from splitwave.core.errors import ServingError
from splitwave.core.wave_record import RankWave, WaveStatus
from splitwave.core.worker import WorkerDescription
from splitwave.wire.channel import CHANNEL_OPTIONS
from splitwave.wire.client import describe_worker

WORKERS_DEFAULT = "127.0.0.1:8091,127.0.0.1:8092"
ANSWER_TIMEOUT_S = 5.0
WATCH_S = 0.5

_CLEAR = "\x1b[H\x1b[2J\x1b[3J"
"""Home, clear the screen and what scrolled off it (ECMA-48, and xterm's ED 3)."""
_COLUMNS = "{:>4}  {:<8}  {:>6}  {:>7}  {:>7}  {:>8}  {:>6}  {:>7}  {:>9}  {:>7}  {:>8}  {:>7}"
_HEADINGS = (
    "rank", "does", "wave", "waiting", "running", "steps", "dummy", "votes", "tokens", "skew",
    "wake", "silent",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument(
        "--workers", type=addresses, default=WORKERS_DEFAULT, metavar="HOST:PORT[,HOST:PORT...]",
        help="gRPC addresses of prefill and decode workers (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--watch", nargs="?", type=seconds, const=WATCH_S, metavar="SECONDS",
        help=f"draw it again and again (every {WATCH_S:g} s) until Ctrl-C",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Print the waves; 1 if no worker answers."""
    if arguments.watch is None:
        words, answered = asyncio.run(_read(arguments.workers))
        print(words)
        return 0 if answered else 1
    clear = _CLEAR if sys.stdout.isatty() else ""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            words, _ = asyncio.run(_read(arguments.workers))
            print(clear + words, flush=True)
            time.sleep(arguments.watch)
    return 0


async def _read(workers: Sequence[str]) -> tuple[str, bool]:
    """What all workers say, and whether any does."""
    found = await asyncio.gather(*(_describe(address) for address in workers))
    return "\n\n".join(words for words, _ in found), any(answered for _, answered in found)


async def _describe(address: str) -> tuple[str, bool]:
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        try:
            worker = await describe_worker(channel, ANSWER_TIMEOUT_S)
        except ServingError as error:
            return f"{why_no_worker(address, error)}; name others: --workers", False
    return "\n".join(text_of(worker)), True


def text_of(worker: WorkerDescription) -> Iterator[str]:
    """Lines about one worker's group."""
    head = f"{worker.worker_id} ({worker.role}, group {worker.group_id}, epoch {worker.epoch})"
    waves = worker.waves
    if waves is None:
        yield f"{head}: no waves, its {worker.ranks} rank(s) step each by itself"
        return
    yield f"{head}: {waves.state}, wave {waves.wave}"
    yield f"  {_starts(waves)}; {waves.messages} messages"
    yield "  " + _COLUMNS.format(*_HEADINGS)
    for rank in waves.ranks:
        yield "  " + _COLUMNS.format(*_row(rank))


def _starts(waves: WaveStatus) -> str:
    by_why = ", ".join(f"{count} {why}" for why, count in sorted(waves.starts_by_why.items()))
    last = f", last by {waves.why}" if waves.why else ""
    return f"{waves.waves} waves started by {sum(waves.starts_by_why.values())} broadcasts" + (
        f" ({by_why}{last})" if by_why else ""
    )


def _row(rank: RankWave) -> Sequence[object]:
    work = rank.work
    steps = sum(work.steps_by_kind.values())
    does = "held" if rank.held else "steps" if rank.stepping else "sleeps"
    return (
        rank.rank,
        does if rank.silence_s >= 0 else "unheard",
        rank.wave,
        rank.waiting,
        rank.running,
        steps,
        f"{work.dummy_steps / steps:.0%}" if steps else "-",
        work.votes,
        work.tokens,
        work.padded_tokens - work.tokens,
        f"{rank.wake_s * 1e3:.1f}ms" if rank.wake_s else "-",
        f"{rank.silence_s:.1f}s" if rank.silence_s >= 0 else "-",
    )
