"""Metrics: families that are declared once, histograms that cost next to nothing, a /metrics port.

A service counts where it works, in plain integers; families are made when they are
scraped. A `Family` is a contract with dashboards and alerts: docs/operations.md lists
them all, from these declarations.
"""

import contextlib
import enum
import resource
import time
from bisect import bisect_left
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from importlib.metadata import version

from aiohttp import web
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

Collect = Callable[[], Awaitable[Iterable[Metric]]]
"""Makes the families, now. It may wait for others, but bounded: a scrape is never held up."""

CONTENT_TYPE = CONTENT_TYPE_LATEST

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds of histograms of what takes a step or two."""
LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
"""Bounds of histograms of what takes a request."""


class Histogram:
    """Counts by upper bound. One observation is a bisection and two additions."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LONG_S) -> None:
        assert list(bounds) == sorted(bounds)
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        """How many fell into each bucket; the last is above every bound."""
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or the same value several times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Kind(enum.StrEnum):
    """What a family's values are."""

    GAUGE = enum.auto()
    COUNTER = enum.auto()
    HISTOGRAM = enum.auto()


@dataclass(frozen=True, slots=True)
class Family:
    """One metric by its name, without the suffix that its kind adds."""

    name: str
    kind: Kind
    means: str
    """For people: the HELP line, and the table in docs/operations.md."""
    labels: tuple[str, ...] = ()

    @property
    def samples(self) -> tuple[str, ...]:
        """Names that queries use."""
        match self.kind:
            case Kind.GAUGE:
                return (self.name,)
            case Kind.COUNTER:
                return (f"{self.name}_total",)
            case Kind.HISTOGRAM:
                return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")

    def of(self, value: float) -> Metric:
        """The family with its one value."""
        return self.by({(): value})

    def by(self, values: Mapping[tuple[str, ...], float]) -> Metric:
        """The family with a value for each combination of labels, in their declared order."""
        assert self.kind is not Kind.HISTOGRAM
        kind = GaugeMetricFamily if self.kind is Kind.GAUGE else CounterMetricFamily
        metric = kind(self.name, self.means, labels=self.labels)
        for labels, value in values.items():
            assert len(labels) == len(self.labels)
            metric.add_metric(labels, value)
        return metric

    def by_one(self, values: Mapping[str, float]) -> Metric:
        """The same for a family of one label."""
        return self.by({(label,): value for label, value in values.items()})

    def by_rank(self, values: Sequence[float]) -> Metric:
        """The same for a family whose one label is the rank."""
        assert self.labels == ("rank",)
        return self.by({(str(rank),): value for rank, value in enumerate(values)})

    def spread(self, histogram: Histogram) -> Metric:
        """The family of a histogram."""
        assert self.kind is Kind.HISTOGRAM
        buckets, below = [], 0
        for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound is None else str(float(bound)), below))
        return HistogramMetricFamily(
            self.name, self.means, buckets=buckets, sum_value=histogram.total
        )


def gauge(name: str, means: str, *labels: str) -> Family:
    """Declare a value that goes up and down."""
    return Family(name, Kind.GAUGE, means, labels)


def counter(name: str, means: str, *labels: str) -> Family:
    """Declare a count since the start; its samples end in _total."""
    return Family(name, Kind.COUNTER, means, labels)


def histogram(name: str, means: str) -> Family:
    """Declare a spread of values."""
    return Family(name, Kind.HISTOGRAM, means)


_VERSION = version("splitwave")  # Read now: it stands in a file.
INFO = gauge("splitwave_process_info", "1; the labels say what runs.", "service", "version")
READY = gauge("splitwave_process_ready", "1 while the process takes new work, else 0.")
CPU = counter("splitwave_process_cpu_seconds", "CPU time of the process, engines excluded.")
MEMORY = gauge("splitwave_process_resident_max_bytes", "Most memory that the process has had.")

PROCESS_FAMILIES = (INFO, READY, CPU, MEMORY)


def process_families(service: str, *, ready: bool) -> Iterator[Metric]:
    """What every service exports of itself. Reads no file, so it cannot wait."""
    yield INFO.by({(service, _VERSION): 1})
    yield READY.of(ready)
    yield CPU.of(time.process_time())
    yield MEMORY.of(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


class _Made(Collector):
    """Families that were made already, as a registry wants to see them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def render(families: Iterable[Metric]) -> bytes:
    """Families in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Made(families))
    return generate_latest(registry)


async def scrape(collect: Collect) -> web.Response:
    """Answer GET /metrics."""
    return web.Response(body=render(await collect()), headers={"Content-Type": CONTENT_TYPE})


@contextlib.asynccontextmanager
async def metrics_port(listen: str, collect: Collect) -> AsyncIterator[None]:
    """Serve /metrics on `listen` (host:port) within the block; empty: serve nothing."""
    if not listen:
        yield
        return

    async def answer(_request: web.Request) -> web.Response:
        return await scrape(collect)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, _, port = listen.rpartition(":")
    try:
        await web.TCPSite(runner, host, int(port)).start()
        yield
    finally:
        await runner.cleanup()
