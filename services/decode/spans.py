"""What a decode worker tells of an attempt's trace: made when it is over, from its timestamps.

So no token costs anything, whether or not its request is traced.
"""

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from services.decode.attempt import Attempt
from services.worker.spans import WorkerSpans
from splitwave.core.generation import FinishReason
from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing import NONE, Attributes, Past

_WELL = frozenset(FinishReason)


class DecodeSpans(WorkerSpans):
    """Spans of attempts that were accepted."""

    def first_step(self, attempt: Attempt, now_s: float) -> None:
        """Its first output came now."""
        attempt.waves = self._worked(attempt.submit.traceparent, now_s, now_s)

    def waves_of(self, attempt: Attempt) -> tuple[str, ...]:
        """Traceparents of the wave segments of its first and last step: none, one or two."""
        if not attempt.waves:
            return ()
        last = self._worked(attempt.submit.traceparent, attempt.progress_s, attempt.progress_s)
        return tuple(dict.fromkeys(attempt.waves + last))

    def ended(self, attempt: Attempt, end: str, now_s: float) -> None:
        """The attempt is over; `end` is its finish reason or why it failed."""
        parent = self._traces.wanted(attempt.submit.traceparent)
        if parent is None:
            return
        error = None if end in _WELL else end
        serve = Past(
            name=names.DECODE_SERVE,
            began_s=attempt.accepted_s,
            ended_s=now_s,
            kind=SpanKind.SERVER,
            error=error,
            events=(("last_token", attempt.progress_s),) if error and attempt.shown else (),
            links=self.waves_of(attempt),
            attributes={
                **self._about(),
                names.REQUEST_ID: attempt.submit.request_id,
                "splitwave.attempt_id": attempt.submit.attempt_id,
                "splitwave.rank": attempt.rank,
                "splitwave.offset": attempt.submit.offset,
                "splitwave.tokens": attempt.offset - attempt.submit.offset,
                "splitwave.end": end,
            },
        )
        self._steps(attempt, self._traces.record(serve, parent), now_s, error)

    def _steps(self, attempt: Attempt, parent: Context, now_s: float, error: str | None) -> None:
        """How far it came: the pull, its confirmation, the tokens."""
        arrived_s = attempt.accepted_s + attempt.handoff_s
        about: Attributes = {
            "splitwave.handoff.id": attempt.submit.handoff.handoff_id,
            "splitwave.handoff.bytes": attempt.handoff_bytes,
        }
        steps: list[tuple[str, float, float | None, Attributes]]
        steps = [(names.HANDOFF, attempt.accepted_s, None, about)]
        if attempt.handoff_bytes:
            steps[0] = (names.HANDOFF, attempt.accepted_s, arrived_s, about)
            steps.append((names.CONFIRM, arrived_s, attempt.shown_s, NONE))
        if attempt.shown_s is not None:
            steps.append((names.TOKENS, attempt.shown_s, None, NONE))
        for name, began_s, ended_s, attributes in steps:
            step = Past(
                name=name,
                began_s=began_s,
                ended_s=now_s if ended_s is None else ended_s,
                attributes=attributes,
                error=error if ended_s is None else None,
            )
            self._traces.record(step, parent)
