"""Metrics of a prefill worker. docs/operations.md lists them, from the declarations here."""

from collections.abc import Iterator

from prometheus_client import Metric

from services.prefill.floor import Floor
from splitwave.runtime.metrics import counter, gauge, histogram

QUEUED_TOKENS = gauge(
    "splitwave_prefill_queued_tokens", "Prompt tokens queued or being computed.", "rank"
)
QUEUED_TOKENS_MAX = gauge(
    "splitwave_prefill_queued_tokens_max", "Prompt tokens that one rank may have queued."
)
PROMPTS = gauge(
    "splitwave_prefill_prompts", "Prompts by state: computing (in the next batch) or queued.",
    "rank", "state",
)  # fmt: skip
BATCH_TOKENS_MAX = gauge(
    "splitwave_prefill_batch_tokens_max", "Prompt tokens of one step of one rank."
)
BLOCKS_MAX = gauge("splitwave_prefill_blocks_max", "KV blocks of one rank.")
LEASE_BLOCKS = gauge("splitwave_prefill_lease_blocks", "KV blocks under lease.", "rank")
LEASES_LIVE = gauge("splitwave_prefill_leases_live", "Leases that have not ended.")
LEASES_STARTED = counter("splitwave_prefill_leases_started", "Leases that were started.")
LEASES_ENDED = counter(
    "splitwave_prefill_leases_ended",
    "Leases by how they ended: pulled, released or expired.",
    "end",
)
ANSWERS = counter("splitwave_prefill_answers", "Prompts computed.")
FAILURES = counter("splitwave_prefill_failures", "Prompts that failed, by reason.", "reason")
QUEUE_S = histogram("splitwave_prefill_queue_seconds", "Time of a prompt in its rank's queue.")
COMPUTE_S = histogram(
    "splitwave_prefill_compute_seconds", "Time of a prompt from the queue to its first token."
)
DRAINING = gauge("splitwave_prefill_draining", "1 once the worker takes no new prompts, else 0.")

FAMILIES = (
    QUEUED_TOKENS, QUEUED_TOKENS_MAX, PROMPTS, BATCH_TOKENS_MAX, BLOCKS_MAX, LEASE_BLOCKS,
    LEASES_LIVE, LEASES_STARTED, LEASES_ENDED, ANSWERS, FAILURES, QUEUE_S, COMPUTE_S, DRAINING,
)  # fmt: skip


def families(floor: Floor) -> Iterator[Metric]:
    """Every family, from the tables as they are now."""
    group, queues, leases = floor.group, floor.queues, floor.leases
    yield QUEUED_TOKENS.by_rank(queues.tokens)
    yield QUEUED_TOKENS_MAX.of(queues.tokens_max)
    yield PROMPTS.by(
        {
            (str(rank), state): count
            for rank, (queued, computing) in enumerate(queues.prompts())
            for state, count in (("queued", queued), ("computing", computing))
        }
    )
    yield BATCH_TOKENS_MAX.of(group.batch_max_tokens)
    yield BLOCKS_MAX.of(group.blocks_per_rank)
    yield LEASE_BLOCKS.by_rank(leases.blocks_held)
    yield LEASES_LIVE.of(leases.live)
    yield LEASES_STARTED.of(leases.started)
    yield LEASES_ENDED.by_one({end.value: count for end, count in leases.ends.items()})
    yield ANSWERS.of(floor.answered)
    yield FAILURES.by_one({reason.value: count for reason, count in floor.failures.items()})
    yield QUEUE_S.spread(floor.queue_s)
    yield COMPUTE_S.spread(floor.compute_s)
    yield DRAINING.of(floor.draining)
