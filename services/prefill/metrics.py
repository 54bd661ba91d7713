"""Metrics of a prefill worker.

splitwave_prefill_queued_tokens{rank}     prompt tokens queued or being computed
splitwave_prefill_lease_blocks{rank}      KV blocks under lease
splitwave_prefill_leases_live             leases that have not ended
splitwave_prefill_leases_ended_total{end} leases by how they ended: pulled, released, expired
splitwave_prefill_answers_total           prompts computed
splitwave_prefill_failures_total{reason}  prompts that failed, by reason
"""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from services.prefill.floor import Floor


def families(floor: Floor) -> Iterator[Metric]:
    """Every family, from the tables as they are now."""
    queued = GaugeMetricFamily(
        "splitwave_prefill_queued_tokens", "Prompt tokens queued or computed.", labels=["rank"]
    )
    blocks = GaugeMetricFamily(
        "splitwave_prefill_lease_blocks", "KV blocks under lease.", labels=["rank"]
    )
    for rank, tokens in enumerate(floor.queues.tokens):
        queued.add_metric([str(rank)], tokens)
        blocks.add_metric([str(rank)], floor.leases.blocks_held[rank])
    yield queued
    yield blocks
    yield GaugeMetricFamily(
        "splitwave_prefill_leases_live", "Leases that have not ended.", value=floor.leases.live
    )
    ended = CounterMetricFamily(
        "splitwave_prefill_leases_ended", "Leases by how they ended.", labels=["end"]
    )
    for end, count in floor.leases.ends.items():
        ended.add_metric([end.value], count)
    yield ended
    yield CounterMetricFamily(
        "splitwave_prefill_answers", "Prompts computed.", value=floor.answered
    )
    failed = CounterMetricFamily(
        "splitwave_prefill_failures", "Prompts that failed, by reason.", labels=["reason"]
    )
    for reason, count in floor.failures.items():
        failed.add_metric([reason.value], count)
    yield failed
