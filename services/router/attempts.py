"""What is left of a request, and whether it may be tried once more."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Request, Sampling, attempt_id, first_token_is_kept

ATTEMPTS_MAX = 4
"""Prefills that one request may cost, the first included."""
DEATHS_MAX = 2
"""Workers that died or left their mode while a request ran there, before it is suspected of being
the cause."""
TAKEN_OUT = frozenset({Reason.WORKER_LOST, Reason.GROUP_DECERTIFIED})
"""Ends of a worker, or of its group's epoch, that one request can bring about."""
PROMPT_MIN_TOKENS = 2
"""A shorter prompt cannot have its first token made by decode, whose steps begin at 1 or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One choice of one request, as `generate` serves it."""

    request: Request
    key: str
    """Made by the router and unique, since ids of attempts and handoffs begin with it; clients
    choose request ids, and two may choose the same."""
    deadline: Deadline
    stall_max_s: float
    choice: int = 0
    reserve_tokens: int = 256
    """Completion tokens whose KV is reserved at the first attempt, at most."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What one attempt has to do."""

    token_ids: Sequence[int]
    """The prompt and the tokens that the client has."""
    offset: int
    """How many tokens the client has."""
    sampling: Sampling
    """With the budgets that are left."""

    @property
    def keeps_first_token(self) -> bool:
        """True if prefill's token is shown."""
        return first_token_is_kept(self.sampling)

    @property
    def ends_in_prefill(self) -> bool:
        """True if prefill's token is the last, so that no decode group is needed."""
        return self.keeps_first_token and self.sampling.max_tokens == 1


def rest_of(request: Request, shown: Sequence[int]) -> Rest:
    """The rest of a request whose client has `shown`.

    Seeds, penalties and min_tokens start afresh behind them: a resumed generation
    continues what was shown, but need not equal the one that was interrupted.
    """
    if not shown:
        return Rest(request.token_ids, 0, request.sampling)
    sampling = replace(
        request.sampling,
        max_tokens=request.sampling.max_tokens - len(shown),
        min_tokens=max(0, request.sampling.min_tokens - len(shown)),
    )
    assert sampling.max_tokens > 0
    return Rest([*request.token_ids, *shown], len(shown), sampling)


def room_tokens(call: Call, rest: Rest) -> int:
    """Tokens whose KV is reserved in decode for an attempt.

    A resumed request is let in only with room for all that is left of it, so that
    running out of blocks cannot interrupt it again.
    """
    budget = rest.sampling.max_tokens
    return len(rest.token_ids) + (budget if rest.offset else min(budget, call.reserve_tokens))


def refuse_impossible(request: Request) -> None:
    """Raise for what split serving cannot do, by name."""
    if len(request.token_ids) >= PROMPT_MIN_TOKENS or first_token_is_kept(request.sampling):
        return
    raise ServingError(
        Reason.UNSUPPORTED_FEATURE,
        "prompt: one token is too short for seed, min_tokens or penalties, whose first token"
        " must come from decode; give a longer prompt or leave them out",
    )


class NoAnswer(ServingError):
    """A worker did not answer in its share of the time: lost to us, but not seen to die."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.WORKER_LOST, message)


class Unreached(NoAnswer):
    """A worker could not be reached: it never had the call, so its end is not that one's doing."""


@dataclass(slots=True)
class Trail:
    """What the attempts of one request have come to. Times are seconds."""

    attempts: int = 0
    deaths: int = 0
    """Workers that it may have taken out."""
    at_work: bool = False
    """True while a worker has the request, so that its death, or its step outside the mode, may be
    the request's doing."""
    avoid_prefill: set[str] = field(default_factory=set)
    """Prefill workers that were lost with it, or could not be reached."""
    grant_wait_s: float = 0.0
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    handoff_bytes: int = 0
    cached_tokens: int = 0
    retried: list[Reason] = field(default_factory=list)
    """What each attempt but the last failed with."""
    _ids: int = 0
    _dead: set[tuple[str, int]] = field(default_factory=set)
    """Prefill workers that were lost with it, and in which epoch: each dies once in it."""

    def lost_prefill(self, error: ServingError, worker_id: str, epoch: int) -> None:
        """A prefill worker was lost with it, maybe once more before the router knew of its end."""
        self.avoid_prefill.add(worker_id)
        if (worker_id, epoch) in self._dead:
            self.at_work = False
        if not isinstance(error, NoAnswer):
            self._dead.add((worker_id, epoch))

    def next_id(self, call: Call) -> str:
        """A fresh id for a handoff, and for the submission that carries it."""
        self._ids += 1
        return attempt_id(call.key, call.choice, self._ids)

    def failed(self, error: ServingError, rest: Rest) -> None:
        """Count the failure of an attempt at `rest`; raise if the request ends with it."""
        died = error.reason in TAKEN_OUT and not isinstance(error, NoAnswer)
        if died and self.at_work:
            self.deaths += 1
        self.at_work = False
        if self.deaths >= DEATHS_MAX:
            raise ServingError(
                Reason.REQUEST_QUARANTINED,
                f"{self.deaths} workers died or left their mode as it ran; it is not tried again",
            ) from error
        if error.reason is Reason.OUTSIDE_ENVELOPE and rest.offset:
            # What was asked for is within; only with what was shown is it too long to prefill.
            raise ServingError(
                self.retried[-1], f"interrupted, and too long to go on: {error.message}"
            ) from error
        # The fleet as a whole has no room: it says so after asking everyone.
        final = error.reason is Reason.OVERLOADED or not error.reason.resumable
        if final or self.attempts >= ATTEMPTS_MAX:
            raise error
        self.retried.append(error.reason)
