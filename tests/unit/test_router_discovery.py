"""Which workers a router serves, and how it learns of changes."""

import asyncio
import socket
from collections.abc import Sequence

import pytest

from services.router.discovery import AddressError, Share, Workers, follow
from tests.sim import virtual_loop

Entries = list[tuple[int, int, int, str, tuple[str, int]]]


class Names:
    """A name server that the test plays. None: it does not answer."""

    def __init__(self, *answers: Sequence[str] | None) -> None:
        self._answers = list(answers)

    async def getaddrinfo(self, host: str, port: int, *, type: int) -> Entries:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is None:
            raise socket.gaierror("no answer")
        return [(socket.AF_INET, type, 0, "", (address, port)) for address in answer]


async def told(text: str, share: Share, names: Names, rounds: int) -> list[list[str]]:
    """What `follow` tells over some rounds of ten seconds."""
    seen: list[list[str]] = []
    asyncio.get_running_loop().getaddrinfo = names.getaddrinfo  # type: ignore[method-assign,assignment]  # the test's loop
    task = asyncio.create_task(follow(Workers(text), share, seen.append, every_s=10.0))
    await asyncio.sleep(10.0 * rounds - 5.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return seen


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:x", "host:0", "host:70000", "dns:name", "a:1,,b:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError, match="write HOST:PORT"):
        Workers(text)


def test_a_fixed_list_is_told_once() -> None:
    assert virtual_loop.run(told("b:2, a:1,b:2", Share(), Names(None), 3)) == [["a:1", "b:2"]]


def test_a_name_stands_for_all_its_addresses_beside_fixed_ones() -> None:
    names = Names(["10.0.0.2", "10.0.0.1"])

    (seen,) = virtual_loop.run(told("dns:pool:9,z:1", Share(), names, 3))

    assert seen == ["10.0.0.1:9", "10.0.0.2:9", "z:1"]


def test_an_address_of_the_newer_protocol_is_bracketed() -> None:
    assert virtual_loop.run(told("dns:pool:9", Share(), Names(["::1"]), 1)) == [["[::1]:9"]]


def test_workers_that_come_and_go_are_told_without_a_restart() -> None:
    names = Names(["10.0.0.1"], ["10.0.0.1", "10.0.0.2"], ["10.0.0.2"])

    seen = virtual_loop.run(told("dns:pool:9", Share(), names, 5))

    assert seen == [["10.0.0.1:9"], ["10.0.0.1:9", "10.0.0.2:9"], ["10.0.0.2:9"]]


def test_a_name_server_that_fails_leaves_what_was_known() -> None:
    names = Names(["10.0.0.1"], None, None)

    assert virtual_loop.run(told("dns:pool:9", Share(), names, 4)) == [["10.0.0.1:9"]]


def test_a_router_serves_its_share_of_the_workers() -> None:
    text = ",".join(f"w{i}:1" for i in range(8))
    shares = [
        virtual_loop.run(
            told(text, Share(router_index=i, routers=4, workers_max=2), Names(None), 1)
        )
        for i in range(4)
    ]

    assert sorted(address for (share,) in shares for address in share) == sorted(text.split(","))
