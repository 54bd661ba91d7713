"""A /metrics port. A service counts where it works; families are made when they are scraped."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

Collect = Callable[[], Iterable[Metric]]


class _Scraped(Collector):
    """What a registry asks on each scrape."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def render(collect: Collect) -> bytes:
    """The families in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Scraped(collect))
    return generate_latest(registry)


@contextlib.asynccontextmanager
async def metrics_port(listen: str, collect: Collect) -> AsyncIterator[None]:
    """Serve /metrics on `listen` (host:port) within the block; empty: serve nothing."""
    if not listen:
        yield
        return

    async def scrape(_request: web.Request) -> web.Response:
        return web.Response(body=render(collect), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/metrics", scrape)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, _, port = listen.rpartition(":")
    try:
        await web.TCPSite(runner, host, int(port)).start()
        yield
    finally:
        await runner.cleanup()
