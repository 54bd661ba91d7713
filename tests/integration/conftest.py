"""Integration tests run on uvloop, as every service does: its transports are not asyncio's."""

import asyncio
from collections.abc import Callable, Iterator, Mapping

import grpc.aio
import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The one loop that they run on."""
    del config, item
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def grpc_stays_up() -> Iterator[None]:
    """Hold gRPC's poller thread for the whole run.

    It is joined when the last of its objects goes, wherever that happens to be: inside a
    loop that is a blocking call, and not one of ours.
    """
    asyncio.run(_init_grpc())
    yield
    grpc.aio.shutdown_grpc_aio()


async def _init_grpc() -> None:
    """Within a loop: without one, gRPC fails once other tests have run in this process."""
    grpc.aio.init_grpc_aio()
