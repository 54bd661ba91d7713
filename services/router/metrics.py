"""Metrics of a router.

splitwave_router_requests_live             requests being served
splitwave_router_requests_admitted_total   requests let in
splitwave_router_requests_total{outcome}   requests by how they ended: finished, or the reason
splitwave_router_tokens_total              completion tokens given to clients
splitwave_router_rooms_waiting             requests that wait for decode room
splitwave_router_workers{role}             workers that new work may go to
splitwave_router_handoffs_left_total       handoffs that could not be released; leases end them
"""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from services.router.front_door import FrontDoor


def families(door: FrontDoor) -> Iterator[Metric]:
    """Every family, from the counts as they are now."""
    name = "splitwave_router"
    yield GaugeMetricFamily(
        f"{name}_requests_live", "Requests being served.", value=door.admission.live
    )
    yield CounterMetricFamily(f"{name}_requests_admitted", "Requests let in.", value=door.admitted)
    requests = CounterMetricFamily(
        f"{name}_requests", "Requests by how they ended.", labels=["outcome"]
    )
    for outcome, count in door.outcomes.items():
        requests.add_metric([outcome], count)
    yield requests
    yield CounterMetricFamily(f"{name}_tokens", "Tokens given to clients.", value=door.tokens)
    yield GaugeMetricFamily(
        f"{name}_rooms_waiting", "Requests waiting for room.", value=door.fleet.rooms.waiting
    )
    workers = GaugeMetricFamily(
        f"{name}_workers", "Workers that new work may go to.", labels=["role"]
    )
    for role, count in door.fleet.usable().items():
        workers.add_metric([role.value], count)
    yield workers
    yield CounterMetricFamily(
        f"{name}_handoffs_left",
        "Handoffs that could not be released.",
        value=door.fleet.releases.left_to_expiry,
    )
