"""One accepted submission, from Accepted to its end."""

import enum
from dataclasses import dataclass, field

from services.decode.session import Session
from splitwave.core.generation import TokenLogprob
from splitwave.core.session import Submit
from splitwave.engine.port import RequestOutput


class Custody(enum.Enum):
    """What has become of the handoff that Accepted made ours."""

    OURS = enum.auto()
    """To be confirmed, or to be released when nothing reads it."""
    CONFIRMING = enum.auto()
    """Prefill is being asked."""
    DONE = enum.auto()
    """Confirmed, expired, or its release is under way."""


@dataclass(slots=True, eq=False)
class Attempt:
    """What is known of one attempt."""

    submit: Submit
    session: Session
    engine_id: str
    """Names it in the engine and in the account of seats; never used twice in an epoch."""
    slot: int
    accepted_s: float
    offset: int
    """Offset of the next token to show."""
    progress_s: float
    """When its last token came; before the first one, when it was accepted."""
    custody: Custody = Custody.OURS
    heard: bool = False
    """The engine has given an output: whatever was to be pulled has been, or has failed."""
    shown: bool = False
    """The handoff was confirmed: tokens go straight into frames."""
    over: bool = False
    """It has ended for its router; only its handoff may still be looked after."""
    early_tokens: list[int] = field(default_factory=list)
    """Tokens that wait for the confirmation."""
    early_logprobs: list[TokenLogprob] = field(default_factory=list)
    last: RequestOutput | None = None
    """How the engine ended it well, while the confirmation is still out."""
    handoff_bytes: int = 0
    handoff_s: float = 0.0
    """From Accepted to the engine's first output."""
    rank: int = 0
    shown_s: float | None = None
    """When its first tokens could be shown."""
    waves: tuple[str, ...] = ()
    """Traceparent of the wave segment of its first step, if it is traced."""

    @property
    def deadline_s(self) -> float:
        """When the request's time is up, on the worker's clock."""
        return self.accepted_s + self.submit.remaining_s
