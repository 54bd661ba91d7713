"""What a prefill worker tells of a prompt's trace: made when it is over, from its timestamps."""

from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind

from services.worker.spans import WorkerSpans
from splitwave.core.prefill import PrefillResult
from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing import Past

if TYPE_CHECKING:
    from services.prefill.floor import Call


NOTHING = PrefillResult()
"""What a call that failed has come to."""


class PrefillSpans(WorkerSpans):
    """Spans of calls and of their leases."""

    def waves_of(self, call: "Call", now_s: float) -> tuple[str, ...]:
        """Traceparents of the wave segments of its first and last step, which was now."""
        began_s = call.queued.started_s or call.queued.arrived_s
        return self._worked(call.call.traceparent, began_s, now_s)

    def served(
        self, call: "Call", now_s: float, error: str | None, result: PrefillResult = NOTHING
    ) -> None:
        """The call is over: answered, failed or stopped."""
        parent = self._traces.wanted(call.call.traceparent)
        if parent is None:
            return
        queued = call.queued
        serve = Past(
            name=names.PREFILL_SERVE,
            began_s=queued.arrived_s,
            ended_s=now_s,
            kind=SpanKind.SERVER,
            error=error,
            links=result.waves,
            attributes={
                **self._about(),
                names.REQUEST_ID: call.call.request_id,
                "splitwave.handoff.id": call.call.handoff_id,
                "splitwave.rank": queued.rank,
                "splitwave.prompt_tokens": queued.tokens,
                "splitwave.cached_tokens": result.cached_tokens,
                "splitwave.held": call.held_s is not None,
            },
        )
        call.span = self._traces.record(serve, parent)
        started_s = queued.started_s
        if started_s is None and error is None:
            started_s = queued.arrived_s
        steps = [(names.PREFILL_QUEUE, queued.arrived_s, started_s)]
        if started_s is not None:
            steps.append((names.PREFILL_COMPUTE, started_s, None))
        for name, began_s, ended_s in steps:
            step = Past(
                name=name,
                began_s=began_s,
                ended_s=now_s if ended_s is None else ended_s,
                error=error if ended_s is None else None,
            )
            self._traces.record(step, call.span)

    def lease_ended(self, call: "Call", now_s: float, end: str, traceparent: str) -> None:
        """The lease has ended; `traceparent` names the span of whoever ended it, if one did."""
        if call.span is None or call.held_s is None:
            return
        lease = Past(
            name=names.LEASE,
            began_s=call.held_s,
            ended_s=now_s,
            attributes={names.LEASE_END: end, "splitwave.blocks": call.blocks},
            events=((end, now_s),),
            link=traceparent,
        )
        self._traces.record(lease, call.span)
        call.span = None
