"""What every way into the router shares: who is let in, what is checked, how it ended."""

import asyncio
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import Span, Status, StatusCode

from services.router import tracing
from services.router.attempts import Call, Trail
from services.router.budget import Admission
from services.router.fleet import WorkerFleet
from services.router.generate import Finish, generate
from services.router.sink import Part, TextSink
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, Request, Sampling
from splitwave.text import TextOptions, TextStream, Tokenizer

REQUEST_ID_CHARS_MAX = 128
FINISHED = "finished"
"""The outcome of a request that ended well; others are called by their reason."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorSettings:
    """What the router allows."""

    router_id: str
    model: str
    """Served name."""
    live_max: int = 4096
    timeout_s: float = 600.0
    """Limit of a request, and its deadline if it brings none."""
    stall_max_s: float = 30.0
    reserve_tokens: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One completion, checked and ready to be served."""

    request_id: str
    token_ids: Sequence[int]
    sampling: Sampling
    text: TextOptions
    priority: int = 0
    timeout_s: float | None = None
    """Time the caller gives; None: the router's limit."""
    trace_headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a completion ended well. Times are seconds, as the router saw them."""

    finish_reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    text: str
    """The last text, which had been held back."""
    prompt_tokens: int
    completion_tokens: int
    trail: Trail
    first_token_s: float
    total_s: float


class FrontDoor:
    """Checks requests, serves them, and counts each exactly once.

    Invariant I5: admitted requests are live, or have one outcome.
    """

    def __init__(self, settings: DoorSettings, tokenizer: Tokenizer, fleet: WorkerFleet) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.fleet = fleet
        self.admission = Admission(settings.live_max)
        self.admitted = 0
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0
        self._keys = itertools.count(1)
        self._eos_token_ids = tuple(sorted(tokenizer.eos_token_ids))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's end-of-sequence ids."""
        return self._eos_token_ids

    def ending_ids(self, sampling: Sampling) -> frozenset[int]:
        """Ids that end a completion, and are left out of its text."""
        eos = () if sampling.ignore_eos else self._eos_token_ids
        return frozenset((*sampling.stop_token_ids, *eos))

    # Checks.

    def models(self) -> dict[str, int]:
        """Served models with their context lengths in tokens; none while no worker is there."""
        limits = self.fleet.limits()
        if limits is None or not self.fleet.ready():
            return {}
        return {self.settings.model: limits.model_len_max_tokens}

    def check_model(self, model: str) -> None:
        """Raise MODEL_NOT_FOUND for another model than the served one; empty means that one."""
        if model not in ("", self.settings.model):
            raise ServingError(
                Reason.MODEL_NOT_FOUND,
                f"model: {model[:100]!r} is not served here; use {self.settings.model!r}",
            )

    def request_id(self, given: str) -> str:
        """The client's id, or a new one. Raises INVALID_REQUEST for one that cannot be logged."""
        if not given:
            return f"{self.settings.router_id}-{next(self._keys)}"
        if len(given) > REQUEST_ID_CHARS_MAX or not re.fullmatch("[!-~]+", given):
            raise ServingError(
                Reason.INVALID_REQUEST,
                f"request_id: use 1 to {REQUEST_ID_CHARS_MAX} printable ASCII characters,"
                " no spaces; or leave it out",
            )
        return given

    async def prompt_ids(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """Token ids of a prompt. Raises INVALID_REQUEST for what the model cannot take."""
        if isinstance(prompt, str):
            prompt = await self.tokenizer.encode_async(prompt)
        if not prompt:
            raise _invalid("prompt: empty; give some text, or token ids")
        lowest, highest = min(prompt), max(prompt)
        if lowest < 0 or highest >= self.tokenizer.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise _invalid(
                f"prompt: token id {wrong} is not at least 0 and below the model's vocabulary of"
                f" {self.tokenizer.vocab_size}; use the model's own tokenizer"
            )
        return prompt

    def tokens_left(self, prompt: Sequence[int]) -> int:
        """What a prompt leaves of the context, at least 1. Raises INVALID_REQUEST if nothing."""
        limits = self.fleet.limits()
        if limits is None:
            raise ServingError(
                Reason.POOL_UNAVAILABLE, "no decode worker is reachable", retry_after_s=1.0
            )
        left = limits.model_len_max_tokens - len(prompt)
        if left < 1:
            raise _invalid(
                f"prompt: {len(prompt)} tokens leave nothing of the context of"
                f" {limits.model_len_max_tokens} tokens for a completion; shorten it"
            )
        return left

    # Service.

    async def complete(self, order: Order, show: Callable[[Part], None]) -> Ending:
        """Serve one order; `show` gets its parts as they come. Raises ServingError."""
        began_s = asyncio.get_running_loop().time()
        stream = TextStream(self.tokenizer, order.text, order.token_ids)
        with self.admission.admit(), tracing.request_span("generate", order.trace_headers) as span:
            self.admitted += 1
            sink, trail = TextSink(stream, show), Trail()
            outcome = Reason.CANCELLED.value  # Unless we learn better.
            try:
                finish = await generate(self._call(order, began_s), self.fleet, sink, trail)
                outcome = FINISHED
                return self._ending(order, finish, sink, trail, began_s)
            except ServingError as error:
                outcome = error.reason.value
                raise
            except Exception as error:
                outcome = Reason.INTERNAL.value
                _log.exception("our bug", extra={"request_id": order.request_id})
                raise ServingError(
                    Reason.INTERNAL, "the router failed; its log says why"
                ) from error
            finally:
                self.outcomes[outcome] += 1
                self.tokens += sink.shown_tokens
                _describe(span, order, trail, outcome)

    def _call(self, order: Order, began_s: float) -> Call:
        limit_s = self.settings.timeout_s
        timeout_s = limit_s if order.timeout_s is None else min(limit_s, order.timeout_s)
        return Call(
            request=Request(order.request_id, order.token_ids, order.sampling, order.priority),
            key=f"{order.request_id}#{self.settings.router_id}.{next(self._keys)}",
            deadline=Deadline(began_s + timeout_s),
            stall_max_s=self.settings.stall_max_s,
            reserve_tokens=self.settings.reserve_tokens,
        )

    def _ending(
        self, order: Order, finish: Finish, sink: TextSink, trail: Trail, began_s: float
    ) -> Ending:
        now_s = asyncio.get_running_loop().time()
        text = sink.finish()
        stopped = sink.stop_string is not None
        return Ending(
            finish_reason=FinishReason.STOP if stopped else finish.finish_reason,
            stop_string=sink.stop_string,
            stop_token_id=None if stopped else self._shown_stop(finish.stop_token_id),
            text=text,
            prompt_tokens=len(order.token_ids),
            completion_tokens=sink.shown_tokens,
            trail=trail,
            first_token_s=(sink.first_at_s or now_s) - began_s,
            total_s=now_s - began_s,
        )

    def _shown_stop(self, stop_token_id: int | None) -> int | None:
        """A stop token is named to the client; the end of sequence is not."""
        return None if stop_token_id in self._eos_token_ids else stop_token_id


def _describe(span: Span, order: Order, trail: Trail, outcome: str) -> None:
    if not span.is_recording():
        return
    span.set_attributes(
        {
            "splitwave.request_id": order.request_id,
            "splitwave.attempts": trail.attempts,
            "splitwave.outcome": outcome,
            "splitwave.handoff_bytes": trail.handoff_bytes,
            "gen_ai.usage.input_tokens": len(order.token_ids),
        }
    )
    if outcome != FINISHED:
        span.set_status(Status(StatusCode.ERROR, outcome))


def _invalid(message: str) -> ServingError:
    return ServingError(Reason.INVALID_REQUEST, message)
