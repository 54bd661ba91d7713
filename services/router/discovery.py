"""Which workers there are: a fixed list, or a DNS name that is asked again and again."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from splitwave.core.placement import subset

DNS_PREFIX = "dns:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Which part of all workers one router serves."""

    router_index: int = 0
    routers: int = 1
    workers_max: int = 16


class AddressError(ValueError):
    """A worker address cannot be used; the message names it and the fix."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of one role, as the command line names them.

    `HOST:PORT[,HOST:PORT...]` is fixed; `dns:NAME:PORT` is every address of a name.
    """

    text: str

    def __post_init__(self) -> None:
        for part in self.parts:
            host, _, port = part.removeprefix(DNS_PREFIX).rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise AddressError(
                    f"{part!r} is no worker address; write HOST:PORT, or dns:NAME:PORT"
                )

    @property
    def parts(self) -> list[str]:
        """The addresses and names."""
        return [part.strip() for part in self.text.split(",")]

    @property
    def fixed(self) -> bool:
        """True if no name has to be resolved."""
        return not any(part.startswith(DNS_PREFIX) for part in self.parts)

    async def resolve(self) -> list[str]:
        """Every worker's address, sorted. Raises OSError if a name cannot be resolved."""
        found: set[str] = set()
        for part in self.parts:
            if not part.startswith(DNS_PREFIX):
                found.add(part)
                continue
            host, _, port = part.removeprefix(DNS_PREFIX).rpartition(":")
            loop = asyncio.get_running_loop()
            for entry in await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM):
                address = str(entry[4][0])
                found.add(f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
        return sorted(found)


async def follow(
    workers: Workers, share: Share, listed: Callable[[list[str]], None], every_s: float
) -> None:
    """Tell `listed` which workers to serve, at once and on change; for ever if there are names.

    A name that cannot be resolved leaves what was known: DNS may fail while workers serve.
    """
    before: list[str] | None = None
    while True:
        try:
            found = await workers.resolve()
        except (OSError, UnicodeError):  # The second is a name that no DNS can hold.
            found = before or []
        mine = subset(found, share.router_index, share.routers, share.workers_max)
        if mine != before:
            before = mine
            listed(mine)
        if workers.fixed:
            return
        await asyncio.sleep(every_s)
