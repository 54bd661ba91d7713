"""The spans of a request, and what each says. docs/tracing.md has this table; a test compares."""

from dataclasses import dataclass
from typing import Final

REQUEST: Final = "request"
"""Stands here for the root, whose name is its operation and model, such as `chat demo`."""
ATTEMPT: Final = "splitwave.attempt"
GRANT: Final = "splitwave.grant"
PREFILL: Final = "splitwave.prefill"
DECODE: Final = "splitwave.decode"
PREFILL_SERVE: Final = "splitwave.prefill.serve"
PREFILL_QUEUE: Final = "splitwave.prefill.queue"
PREFILL_COMPUTE: Final = "splitwave.prefill.compute"
LEASE: Final = "splitwave.prefill.lease"
DECODE_SERVE: Final = "splitwave.decode.serve"
HANDOFF: Final = "splitwave.handoff"
CONFIRM: Final = "splitwave.handoff.confirm"
TOKENS: Final = "splitwave.decode.tokens"

OUTCOME: Final = "splitwave.outcome"
REQUEST_ID: Final = "splitwave.request_id"
ROUTER_SPANS: Final = "splitwave.router_spans"
FINISHED: Final = "finished"
"""The outcome of a request that ended well; others are called by their reason."""
ASKED: Final = "asked"
PREFILL_WORKER: Final = "splitwave.prefill_worker"
ACCEPTED: Final = "accepted"
DECODE_WORKER: Final = "splitwave.decode_worker"
LEASE_END: Final = "splitwave.lease.end"
CLOSED: Final = "closed"
"""End of a lease that the worker's own end cut short."""


@dataclass(frozen=True, slots=True)
class SpanType:
    """One kind of span."""

    name: str
    service: str
    parents: tuple[str, ...]
    """Names of the span above it; none: the client's, if there is one."""
    covers: str
    says: tuple[str, ...]
    """Its attributes, those of every failed span (error.type) apart."""


SPANS: Final = (
    SpanType(
        REQUEST, "router", (), "a request, from its first byte to its last",
        (
            REQUEST_ID, OUTCOME, "splitwave.api", "splitwave.attempts", "splitwave.handoff.bytes",
            ROUTER_SPANS, "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model",
            "gen_ai.response.model", "gen_ai.request.max_tokens", "gen_ai.request.temperature",
            "gen_ai.request.top_p", "gen_ai.request.top_k", "gen_ai.request.seed",
            "gen_ai.request.frequency_penalty", "gen_ai.request.presence_penalty",
            "gen_ai.request.choice.count", "gen_ai.usage.input_tokens",
            "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.output_tokens",
            "gen_ai.response.finish_reasons", "gen_ai.response.time_to_first_chunk",
            "gen_ai.input.messages", "gen_ai.output.messages", "http.response.status_code",
        ),
    ),
    SpanType(
        ATTEMPT, "router", (REQUEST,),
        "one try at one choice; the second and later ones are resumes",
        ("splitwave.attempt", "splitwave.choice", "splitwave.offset"),
    ),
    SpanType(
        GRANT, "router", (ATTEMPT, REQUEST),
        "waiting for room in a decode group; for all of several choices at once",
        ("splitwave.room_tokens", DECODE_WORKER),
    ),
    SpanType(
        PREFILL, "router", (ATTEMPT,), "waiting for a place in a queue, and the call of the worker",
        ("splitwave.handoff.id",),
    ),
    SpanType(
        DECODE, "router", (ATTEMPT,), "from the first offer of the handoff to the last token",
        ("splitwave.handoff.bytes",),
    ),
    SpanType(
        PREFILL_SERVE, "prefill", (PREFILL,), "a prompt in the worker, until its answer",
        (
            REQUEST_ID, "splitwave.handoff.id", "splitwave.worker", "splitwave.group",
            "splitwave.epoch", "splitwave.standing", "splitwave.rank", "splitwave.prompt_tokens",
            "splitwave.cached_tokens", "splitwave.held",
        ),
    ),
    SpanType(PREFILL_QUEUE, "prefill", (PREFILL_SERVE,), "before the batch that took it", ()),
    SpanType(PREFILL_COMPUTE, "prefill", (PREFILL_SERVE,), "from then to the first token", ()),
    SpanType(
        LEASE, "prefill", (PREFILL_SERVE,),
        "the KV under lease, until it was pulled, released or expired",
        (LEASE_END, "splitwave.blocks"),
    ),
    SpanType(
        DECODE_SERVE, "decode", (DECODE,), "an attempt in the worker, from Accepted to its end",
        (
            REQUEST_ID, "splitwave.attempt_id", "splitwave.worker", "splitwave.group",
            "splitwave.epoch", "splitwave.standing", "splitwave.rank", "splitwave.offset",
            "splitwave.tokens", "splitwave.end",
        ),
    ),
    SpanType(
        HANDOFF, "decode", (DECODE_SERVE,), "the pull of the KV, up to the engine's first output",
        ("splitwave.handoff.id", "splitwave.handoff.bytes"),
    ),
    SpanType(
        CONFIRM, "decode", (DECODE_SERVE,),
        "asking the prefill worker whether the lease still lived",
        (),
    ),
    SpanType(TOKENS, "decode", (DECODE_SERVE,), "from the first token shown to the last", ()),
)  # fmt: skip

BY_NAME: Final = {kind.name: kind for kind in SPANS}
