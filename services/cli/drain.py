"""`splitwave drain`: stop a worker's intake, and wait until it has finished what it had."""

import argparse
import asyncio
import sys
import time

import grpc.aio

from services.cli.given import address, seconds_or_none, why_no_worker
from splitwave.core.errors import ServingError
from splitwave.wire.channel import CHANNEL_OPTIONS
from splitwave.wire.client import drain_worker

CALL_TIMEOUT_S = 5.0
LOOK_EVERY_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument(
        "address", type=address, metavar="HOST:PORT", help="gRPC address of the worker"
    )
    parser.add_argument("--why", default="splitwave drain", help="for the worker's log")
    parser.add_argument("--wait", action="store_true", help="return once nothing is outstanding")
    parser.add_argument(
        "--timeout", type=seconds_or_none, default=600.0, metavar="SECONDS",
        help="longest wait (default: %(default)g)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Drain; 1 if the worker does not answer, 3 if the wait was too short."""
    try:
        outstanding = asyncio.run(_drain(arguments))
    except ServingError as error:
        print(f"splitwave drain: {why_no_worker(arguments.address, error)}", file=sys.stderr)
        return 1
    if arguments.wait and outstanding:
        print(
            f"splitwave drain: {outstanding} outstanding after {arguments.timeout:g} s",
            file=sys.stderr,
        )
        return 3
    print(f"draining: {outstanding} outstanding" if outstanding else "drained: nothing outstanding")
    return 0


async def _drain(arguments: argparse.Namespace) -> int:
    """What is still outstanding. Draining again changes nothing, so it is also how to look."""
    deadline_s = time.monotonic() + arguments.timeout
    async with grpc.aio.insecure_channel(arguments.address, options=CHANNEL_OPTIONS) as channel:
        outstanding = await drain_worker(channel, arguments.why, CALL_TIMEOUT_S)
        while arguments.wait and outstanding and time.monotonic() < deadline_s:
            await asyncio.sleep(LOOK_EVERY_S)
            outstanding = await drain_worker(channel, arguments.why, CALL_TIMEOUT_S)
    return outstanding
