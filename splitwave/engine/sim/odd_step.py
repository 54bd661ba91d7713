"""The fault `out_of_mode_step`: one step of rank 0 that is of no mode's kind."""

import os

from splitwave.core.mode_guard import REQUESTS_KEPT_MAX, StepViolation, ViolatingRequest
from splitwave.engine.sim.sequence import Sequence, Step
from splitwave.engine.sim.settings import SimSettings

KIND = "odd"
RESTARTS = "SPLITWAVE_RESTARTS"
"""How often the worker has started over (splitwave.runtime.again)."""


class OddSteps:
    """Which steps of one rank are odd, and how many were."""

    def __init__(self, settings: SimSettings, rank: int) -> None:
        planted = rank == 0 and os.environ.get(RESTARTS, "0") == "0"
        self._rank = rank
        self._at_step = settings.faults.out_of_mode_step if planted else 0
        self.unsent: list[StepViolation] = []
        self.count = 0

    def look(self, number: int, step: Step, generating: list[Sequence]) -> None:
        """A step has ended, the rank's `number`-th."""
        if number != self._at_step:
            return
        self.count += 1
        seen = [(sequence, 1) for sequence in generating] + step.chunks
        requests = tuple(
            ViolatingRequest(
                engine_request_id=sequence.request_id,
                length_tokens=sequence.continuation.length,
                step_tokens=tokens,
            )
            for sequence, tokens in seen[:REQUESTS_KEPT_MAX]
        )
        self.unsent.append(
            StepViolation(
                rank=self._rank, step=number, kind=KIND, tokens=step.tokens, requests=requests
            )
        )

    def take(self) -> list[StepViolation]:
        """What was not told yet."""
        unsent, self.unsent = self.unsent, []
        return unsent
