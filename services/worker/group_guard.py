"""How a worker's group stands, and what follows from a step outside its mode."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from opentelemetry.context import Context
from prometheus_client import Metric

from splitwave.core.errors import Reason, ServingError
from splitwave.core.mode import lookup
from splitwave.core.mode_guard import Action, ModeGuard, Standing, StepViolation
from splitwave.core.wave_record import WaveStatus
from splitwave.core.worker import Certification, RankCounters
from splitwave.engine.port import GroupDescription, StepOutputs
from splitwave.runtime.metrics import counter, gauge
from splitwave.runtime.tracing import OFF, Past, Tracing, Value

log = logging.getLogger(__name__)

VIOLATION_SPAN = "splitwave.mode.violation"

STANDING = gauge(
    "splitwave_group_standing",
    "1 for how the group stands (certified, uncertified, decertified, degraded), 0 for the others.",
    "role", "standing",
)  # fmt: skip
CERTIFICATE = gauge(
    "splitwave_group_certificate_info", "1; the labels say which certificate the group has.",
    "role", "certificate", "level",
)  # fmt: skip
VIOLATIONS = counter(
    "splitwave_group_mode_violations", "Executed steps of a kind outside the group's mode.", "role"
)

GUARD_FAMILIES = (STANDING, CERTIFICATE, VIOLATIONS)


class Decertified(Exception):
    """The group has run a step outside its mode and has drained: its epoch is over."""


class Guarded(Protocol):
    """A worker, as its guard moves it."""

    def hold(self) -> None:
        """Take no new work until `serve_on`."""

    def serve_on(self) -> None:
        """Take new work again, unless it drains."""

    def refuse(self) -> None:
        """Take no new work any more."""

    async def drained(self) -> None:
        """Return once nothing is outstanding; cancelled when there is no more time."""


class GroupGuard:
    """One group's standing from its start to its end; `run` must be running meanwhile."""

    def __init__(
        self,
        worker: Guarded,
        group: GroupDescription,
        clock: Callable[[], float],
        patience_s: float,
        traces: Tracing = OFF,
    ) -> None:
        """The group is uncertified until `certify` says otherwise."""
        self._certification = Certification()
        self._worker = worker
        self._group = group
        self._now_s = clock
        self._patience_s = patience_s
        self._traces = traces
        self._guard = self._new_guard(Standing.UNCERTIFIED)
        self._drain = asyncio.Event()

    def _new_guard(self, standing: Standing) -> ModeGuard:
        return ModeGuard(lookup(self._group.mode).step_kinds, standing, self._patience_s)

    def certify(self, certification: Certification) -> None:
        """What the group is certified for, or why it is not. Call it before `run`."""
        self._certification = certification
        if certification.certificate_id:
            self._guard = self._new_guard(Standing.CERTIFIED)

    @property
    def standing(self) -> Standing:
        """How the group stands now."""
        return self._guard.standing

    @property
    def takes_work(self) -> bool:
        """False once it is decertified, unless it serves on."""
        return self._guard.takes_work

    @property
    def certification(self) -> Certification:
        """What the group is certified for, and its steps outside the mode."""
        return dataclasses.replace(
            self._certification,
            violations=tuple(self._guard.violations),
            violating_steps=self._guard.violating_steps,
        )

    def why(self) -> ServingError:
        """What work is told that a decertified group gives up."""
        first = self._guard.violations[0]
        message = f"group {self._group.group_id} is decertified: {first}"
        return ServingError(Reason.GROUP_DECERTIFIED, message)

    def on_step(self, step: StepOutputs) -> None:
        """Take in what a rank recorded in one of its steps."""
        for violation in step.violations:
            self._act(self._guard.on_violation(violation, self._now_s()))
            self._tell(violation)

    def look(self, waves: WaveStatus | None, counted: Sequence[RankCounters]) -> None:
        """Time has passed: take in what ranks have counted, so that nothing that they did not
        record is missed. Call it now and then."""
        told = [] if waves is None else [(x.rank, x.work.steps_by_kind) for x in waves.ranks]
        for rank, steps_by_kind in (*told, *((x.rank, x.steps_by_kind) for x in counted)):
            known = len(self._guard.violations)
            self._act(self._guard.on_counts(rank, steps_by_kind, self._now_s()))
            for violation in self._guard.violations[known:]:
                self._tell(violation)
        self._act(self._guard.tick(self._now_s()))

    def judge(self, epoch: int, action: Action, why: str) -> Standing:
        """Take in what somebody who sees the pool says. Raises EPOCH_MISMATCH."""
        if epoch != self._group.epoch:
            raise ServingError(
                Reason.EPOCH_MISMATCH, f"epoch {epoch} is over, this is {self._group.epoch}"
            )
        log.warning("judged: %s", action, extra={"why": why})
        guard, drains = self._guard, action is Action.DRAIN
        self._act(guard.on_told_to_drain() if drains else guard.on_told_to_serve_on())
        return self.standing

    async def run(self, grace_s: float) -> None:
        """Drain the worker when that is decided; then raise Decertified."""
        await self._drain.wait()
        self._worker.refuse()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._worker.drained(), grace_s)
        raise Decertified(self.why().message)

    def families(self) -> Iterator[Metric]:
        """Its metrics."""
        role = self._group.role.value
        yield STANDING.by({(role, x.value): float(x is self.standing) for x in Standing})
        about = self._certification
        yield CERTIFICATE.by({(role, about.certificate_id or "none", about.level or "none"): 1})
        yield VIOLATIONS.by_one({role: self._guard.violating_steps})

    def _act(self, action: Action | None) -> None:
        if action is None:
            return
        log.error("mode guard: %s", action, extra={"standing": self.standing.value})
        if action is Action.HOLD:
            self._worker.hold()
        elif action is Action.SERVE_ON:
            self._worker.serve_on()
        else:
            self._drain.set()

    def _tell(self, violation: StepViolation) -> None:
        """Log and trace a violating step: ids, lengths and features, no text."""
        about: dict[str, Value] = {
            "splitwave.group": self._group.group_id,
            "splitwave.epoch": self._group.epoch,
            "splitwave.mode": self._group.mode,
            "splitwave.rank": violation.rank,
            "splitwave.step": violation.step,
            "splitwave.step.kind": violation.kind,
            "splitwave.step.tokens": violation.tokens,
            "splitwave.step.requests": [x.engine_request_id for x in violation.requests],
            "splitwave.step.lengths": [str(x.length_tokens) for x in violation.requests],
            "splitwave.step.sampling": ["+".join(x.sampling) for x in violation.requests],
            "splitwave.standing": self.standing.value,
        }
        log.error("a step outside the mode: %s", violation, extra={"violation": about})
        if not self._traces.enabled:
            return
        now_s = self._now_s()
        span = Past(
            name=VIOLATION_SPAN, began_s=now_s, ended_s=now_s, attributes=about,
            error=Reason.GROUP_DECERTIFIED.value,
        )  # fmt: skip
        self._traces.record(span, Context())
