"""`splitwave status`: pools, groups and ranks, as a router or the workers themselves tell it."""

import argparse
import asyncio
import contextlib
import http.client
import sys
import time
from collections.abc import Sequence

import grpc.aio
import msgspec

from services.cli.given import address, addresses, answers_otherwise, seconds, why_no_worker
from services.cli.status_text import text_of
from services.router.status_page.view import GroupView, Status, group_view
from splitwave.core.errors import ServingError
from splitwave.core.worker import Role
from splitwave.wire.channel import CHANNEL_OPTIONS
from splitwave.wire.client import describe_worker

ROUTER_DEFAULT = "127.0.0.1:8080"
ANSWER_TIMEOUT_S = 5.0
WATCH_S = 1.0

_CLEAR = "\x1b[H\x1b[2J\x1b[3J"
"""Home, clear the screen and what scrolled off it (ECMA-48, and xterm's ED 3)."""


class NobodyThere(Exception):
    """No status can be had; the message says why and what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument(
        "--router", type=address, default=ROUTER_DEFAULT, metavar="HOST:PORT",
        help="HTTP address of a router (default: %(default)s)",
    )  # fmt: skip
    for role in Role:
        parser.add_argument(
            f"--{role}", type=addresses, metavar="HOST:PORT[,HOST:PORT...]",
            help=f"ask these {role} workers themselves, and no router",
        )  # fmt: skip
    parser.add_argument(
        "--watch", nargs="?", type=seconds, const=WATCH_S, metavar="SECONDS",
        help=f"draw it again and again (every {WATCH_S:g} s) until Ctrl-C",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print what /status.json says")


def run(arguments: argparse.Namespace) -> int:
    """Print the status; 1 if nobody is there."""
    if arguments.watch is not None:
        return _watch(arguments)
    try:
        print(_words(_read(arguments), arguments))
    except NobodyThere as error:
        print(f"splitwave status: {error}", file=sys.stderr)
        return 1
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    """Draw until Ctrl-C, which is how it ends well. A router may come and go meanwhile."""
    clear = _CLEAR if sys.stdout.isatty() and not arguments.json else ""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                words = _words(_read(arguments), arguments)
            except NobodyThere as error:
                words = str(error)
            print(clear + words, flush=True)
            time.sleep(arguments.watch)
    return 0


def _words(status: Status, arguments: argparse.Namespace) -> str:
    return msgspec.json.encode(status).decode() if arguments.json else text_of(status)


def _read(arguments: argparse.Namespace) -> Status:
    asked = {role: getattr(arguments, role.value) for role in Role}
    if any(asked.values()):
        pairs = [(role, where) for role, workers in asked.items() for where in workers or ()]
        return Status(router=None, groups=asyncio.run(_describe_all(pairs)))
    return read_router(arguments.router)


def read_router(where: str) -> Status:
    """What a router's /status.json says. Raises NobodyThere."""
    try:
        connection = http.client.HTTPConnection(where, timeout=ANSWER_TIMEOUT_S)
        connection.request("GET", "/status.json")
        response = connection.getresponse()
        body = response.read()
        connection.close()
    except http.client.HTTPException as error:
        raise NobodyThere(
            f"{where} answers, but not in HTTP; give the router's HTTP address with --router"
        ) from error
    except OSError as error:
        raise NobodyThere(
            f"no router answers at {where} ({error}); is `splitwave up` running? Name another with"
            " --router HOST:PORT, or ask the workers with --prefill and --decode"
        ) from error
    if response.status != 200:
        raise NobodyThere(f"{where} answers, but with HTTP {response.status}: no Splitwave router?")
    try:
        return msgspec.json.decode(body, type=Status)
    except msgspec.DecodeError as error:
        raise NobodyThere(f"{where} says what this version cannot read: {error}") from error


async def _describe_all(pairs: Sequence[tuple[Role, str]]) -> list[GroupView]:
    return list(await asyncio.gather(*(_describe(role, where) for role, where in pairs)))


async def _describe(role: Role, where: str) -> GroupView:
    """One worker; unreachable if it does not answer in time."""
    async with grpc.aio.insecure_channel(where, options=CHANNEL_OPTIONS) as channel:
        try:
            described = await describe_worker(channel, ANSWER_TIMEOUT_S, counters=True)
        except ServingError as error:
            if answers_otherwise(error):
                raise NobodyThere(why_no_worker(where, error)) from error
            return GroupView(role=role, address=where, state="unreachable")
    if described.role is not role:
        raise NobodyThere(f"{where} is a {described.role} worker; name it with --{described.role}")
    return group_view(where, described)
