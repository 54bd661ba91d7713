"""What every span of a worker says of it, and the waves that a request was worked on in."""

from collections.abc import Callable

from splitwave.core.mode_guard import Standing
from splitwave.engine.port import GroupDescription
from splitwave.runtime.tracing import Tracing, Value
from splitwave.runtime.wave_spans import WaveSpans


class WorkerSpans:
    """Spans of one worker's requests; the roles say which."""

    def __init__(
        self,
        traces: Tracing,
        worker_id: str,
        group: GroupDescription,
        waves: WaveSpans | None = None,
    ) -> None:
        self._traces = traces
        self._waves = waves
        self._worker: dict[str, Value] = {
            "splitwave.worker": worker_id,
            "splitwave.group": group.group_id,
            "splitwave.epoch": group.epoch,
        }
        self.standing: Callable[[], str] = lambda: Standing.UNCERTIFIED.value
        """How the group stands. Set by the worker."""

    def _about(self) -> dict[str, Value]:
        """Attributes that name the worker and its group as it stands now."""
        return {**self._worker, "splitwave.standing": self.standing()}

    def _worked(self, traceparent: str, began_s: float, ended_s: float) -> tuple[str, ...]:
        """Traceparents of the wave segments of a request's steps then; none if it is not traced."""
        if self._waves is None or not traceparent:
            return ()
        return self._waves.worked(traceparent, began_s, ended_s)
