"""From a command line to an exit code: the same few lines for every service."""

import asyncio
import logging
import os
import resource
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar  # Any: asyncio itself types what a coroutine yields so

import uvloop

from splitwave.runtime import logs
from splitwave.runtime.config import (
    EXIT_BAD_CONFIG,
    BadSetting,
    ConfigError,
    ProcessConfig,
    check_complete,
    load,
    to_toml,
    wants_print,
)
from splitwave.runtime.serve import Fatal, stop_on_signal

log = logging.getLogger(__name__)

C = TypeVar("C", bound=ProcessConfig)
T = TypeVar("T")


def main(
    kind: type[C],
    arguments: Sequence[str] | None,
    run: Callable[[C], int],
    check: Callable[[C, Mapping[str, str]], None] | None = None,
) -> int:
    """Read the config, print it if asked to, else run; returns the exit code.

    `check` raises ConfigError for what the config alone cannot judge. What is not set and has to
    be is told beside a printed config, and ends anything else.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    printing = wants_print(arguments)
    try:
        config, sources = load(kind, kind.service, arguments, os.environ)
        if check is not None:
            check(config, sources)
        if not printing:
            check_complete(config, sources)
    except ConfigError as error:
        sys.stderr.write(f"splitwave {kind.service}: {error}\n")
        return EXIT_BAD_CONFIG
    return _print(config, sources) if printing else run(config)


def _print(config: ProcessConfig, sources: Mapping[str, str]) -> int:
    sys.stdout.write(to_toml(config, sources))
    try:
        check_complete(config, sources)
    except ConfigError as error:
        sys.stderr.write(f"splitwave {config.service}: it cannot start so: {error}\n")
    return 0


def run_until_stopped(
    config: ProcessConfig, body: Callable[[asyncio.Event], Awaitable[int]]
) -> int:
    """Run `body` on uvloop; its event is set by SIGTERM or SIGINT. Returns the exit code.

    Bad settings that only showed later, and what is Fatal, become a log line and a code.
    """
    logs.configure(config.service, log_format=config.log_format, level=config.log_level)
    raise_file_limit()

    async def guarded() -> int:
        async with stop_on_signal() as stop:
            return await body(stop)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(guarded())
    except (ConfigError, BadSetting) as error:
        log.error("%s", error)
        return EXIT_BAD_CONFIG
    except Fatal as error:
        log.error("%s", error)
        return error.exit_code


def raise_file_limit() -> int:
    """Allow as many open files, each connection being one, as the system lets us; return how many.

    Shells give 1024 by default, which a router's streams pass long before any limit of ours.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # Where the hard limit is no number, as on macOS.
        return soft
    return hard


async def unless_stopped(starting: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Await a start; None if the stop came first, and then the start is cancelled and gone."""
    start = asyncio.ensure_future(starting)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({start, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return start.result() if start.done() else None
    finally:
        for task in (start, stopping):
            task.cancel()
        await asyncio.gather(start, stopping, return_exceptions=True)
