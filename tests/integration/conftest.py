"""Integration tests run on uvloop, as every service does: its transports are not asyncio's."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The one loop that they run on."""
    del config, item
    return {"uvloop": uvloop.new_event_loop}
