"""What every way into the router shares: who is let in, what is checked, how it ended."""

import asyncio
import functools
import itertools
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from services.router import tracing
from services.router.attempts import Call, Trail, rest_of, room_tokens
from services.router.budget import Admission
from services.router.choices import Choice, Turns, all_or_none, sampling_of_choice, serve_choices
from services.router.fleet import WorkerFleet
from services.router.generate import Finish
from services.router.history import History
from services.router.order import Ending, Order, Viewer
from services.router.refusals import Refusals
from services.router.request_facts import first_token_s, request_facts, request_texts
from services.router.sink import TextSink
from services.router.tracing import Operation, RequestTrace
from splitwave.core.deadline import Deadline
from splitwave.core.demands import RequestShape
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, Request, Sampling, features
from splitwave.core.sampling_limits import SamplingLimits
from splitwave.core.worker import Role
from splitwave.runtime.tracing import OFF
from splitwave.runtime.tracing_names import FINISHED
from splitwave.text import ChatOptions, TextStream, Tokenizer

REQUEST_ID_CHARS_MAX = 128
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
    trace_text: bool = False
    """Prompts and completions stand in spans."""


class FrontDoor:
    """Checks requests, serves them, and counts each exactly once.

    Invariant I5: admitted requests are live, or have one outcome.
    """

    def __init__(self, settings: DoorSettings, tokenizer: Tokenizer, fleet: WorkerFleet) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.fleet = fleet
        self.admission = Admission(settings.live_max)
        self.traces = OFF
        self._turns = Turns(fleet.rooms.chance, fleet.rooms.pool_wait_s)
        self.admitted = 0
        self.outcomes: Counter[str] = Counter()
        self.refusals = Refusals()
        self.history = History()
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

    def ready(self) -> bool:
        """True while a request could be served."""
        return self.fleet.ready() and not self.admission.closed

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
            return tracing.current().request_id or self._new_id()
        if not _is_id(given):
            raise ServingError(
                Reason.INVALID_REQUEST,
                f"request_id: use 1 to {REQUEST_ID_CHARS_MAX} printable ASCII characters,"
                " no spaces; or leave it out",
            )
        return given

    def _new_id(self) -> str:
        return f"{self.settings.router_id}-{next(self._keys)}"

    async def prompt_ids(
        self, prompt: str | Sequence[int], *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        """Token ids of a prompt. Raises INVALID_REQUEST for what the model cannot take."""
        if isinstance(prompt, str):
            prompt = await self.encode(prompt, special=add_special_tokens)
        if not prompt:
            raise _invalid("prompt: empty; give some text, or token ids")
        self._check_ids(prompt, "prompt")
        return prompt

    def _check_ids(self, token_ids: Sequence[int], name: str) -> None:
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self.tokenizer.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise _invalid(
                f"{name}: token id {wrong} is not at least 0 and below the model's vocabulary of"
                f" {self.tokenizer.vocab_size}; use the model's own tokenizer"
            )

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text; `special`: with the tokenizer's special tokens around it."""
        return await self.tokenizer.encode_async(text, add_special_tokens=special)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens shown. Raises INVALID_REQUEST for unknown ids."""
        if token_ids:
            self._check_ids(token_ids, "tokens")
        return await self.tokenizer.decode_async(token_ids, skip_special_tokens=False)

    async def chat_prompt(
        self, messages: Sequence[Mapping[str, object]], options: ChatOptions
    ) -> str:
        """A conversation as the model's template puts it; UNSUPPORTED_FEATURE without one."""
        if self.tokenizer.chat is None:
            raise ServingError(
                Reason.UNSUPPORTED_FEATURE,
                "messages: the model has no chat template; send a prompt to /v1/completions",
            )
        return await self.tokenizer.chat.render_async(messages, options)

    def sampling_limits(self, prompt: Sequence[int]) -> SamplingLimits:
        """What may be asked for beside a prompt. Raises INVALID_REQUEST if it leaves nothing."""
        limits = self.fleet.limits()
        if limits is None:
            raise self.fleet.absence(Role.DECODE, retry_after_s=1.0)
        left = limits.model_len_max_tokens - len(prompt)
        if left < 1:
            raise _invalid(
                f"prompt: {len(prompt)} tokens leave nothing of the context of"
                f" {limits.model_len_max_tokens} tokens for a completion; shorten it"
            )
        return SamplingLimits(
            tokens_max=left,
            certified_max=limits.output_max_tokens,
            vocab_size=self.tokenizer.vocab_size,
        )

    def _check_fits(self, order: Order) -> None:
        """Raise INVALID_REQUEST for more completions at once than the decode pool ever holds."""
        if order.choices == 1:
            return  # Alone it is held against the model's context, which every pool can hold.
        call = self._call(order, 0, key="", began_s=0.0)
        rest = rest_of(call.request, ())
        most = self.fleet.completions_max(room_tokens(call, rest))
        if most is not None and order.choices > most and not rest.ends_in_prefill:
            raise _invalid(
                f"n: {order.choices} completions at once are more than the {most} for which the"
                " decode pool has room when it is empty; ask for fewer"
            )

    # Service.

    def traced(
        self, operation: Operation, headers: Mapping[str, str], request_id: str = ""
    ) -> AbstractContextManager[RequestTrace]:
        """Trace one call of an API, from its first byte on; `request_id` is what the client gave.

        Begun by whoever takes the call, so that a call which is refused has its trace too.
        """
        if not tracing.within() and not _is_id(request_id):
            request_id = self._new_id()
        origin = tracing.Origin(self.settings.model, request_id, headers)
        return tracing.request(self.traces, operation, origin)

    async def complete(self, orders: Sequence[Order], viewer: Viewer) -> None:
        """Serve the prompts of one call, all or none. Raises ServingError."""
        began_s = asyncio.get_running_loop().time()
        servings = [_Serving(self, order, viewer, began_s) for order in orders]
        request_id, headers = orders[0].request_id, orders[0].trace_headers
        with self.traced(tracing.UNNAMED, headers, request_id) as trace:
            trace.about(request_id)
            for order in orders:
                self._check_fits(order)
                self.fleet.refuse_outside(_shape(order))
            try:
                with self.admission.admit(sum(order.choices for order in orders)):
                    trace.admitted = True
                    await all_or_none(self._serve(serving) for serving in servings)
            finally:
                self._tell(trace, servings, began_s)

    def _tell(self, trace: RequestTrace, servings: Sequence["_Serving"], began_s: float) -> None:
        if not trace.recording:
            return
        trace.tell(request_facts(servings))
        first_s = first_token_s(servings)
        if first_s is not None:
            trace.tell({"gen_ai.response.time_to_first_chunk": first_s - began_s})
            trace.event("first_token", first_s)
        if self.settings.trace_text:
            trace.tell(request_texts(servings, self.tokenizer))

    async def _serve(self, serving: "_Serving") -> None:
        order = serving.order
        self.admitted += 1
        live = self.history.begin(order.request_id, len(order.token_ids), serving.choices)
        outcome, why = Reason.CANCELLED.value, ""  # Unless we learn better.
        try:
            await serve_choices(serving.choices, self.fleet, serving.finished, self._turns)
            outcome = FINISHED
        except ServingError as error:
            outcome, why = error.reason.value, error.message
            raise
        except Exception as error:
            outcome = Reason.INTERNAL.value
            _log.exception("our bug", extra={"request_id": order.request_id})
            raise ServingError(Reason.INTERNAL, "the router failed; its log says why") from error
        finally:
            self.outcomes[outcome] += 1
            self.history.end(live, outcome)
            tracing.current().ended(outcome, why)

    def calls(self, order: Order, began_s: float) -> list[Call]:
        """One call for each choice, under one key."""
        key = f"{order.request_id}#{self.settings.router_id}.{next(self._keys)}"
        return [self._call(order, choice, key, began_s) for choice in range(order.choices)]

    def _call(self, order: Order, choice: int, key: str, began_s: float) -> Call:
        settings = self.settings
        limit_s = settings.timeout_s
        timeout_s = limit_s if order.timeout_s is None else min(limit_s, order.timeout_s)
        sampling = sampling_of_choice(order.sampling, choice)
        return Call(
            request=Request(order.request_id, order.token_ids, sampling, order.priority),
            key=key,
            deadline=Deadline(began_s + timeout_s),
            stall_max_s=settings.stall_max_s,
            choice=choice,
            reserve_tokens=settings.reserve_tokens,
        )

    def shown_stop(self, stop_token_id: int | None) -> int | None:
        """A stop token is named to the client; the end of sequence is not."""
        return None if stop_token_id in self._eos_token_ids else stop_token_id


class _Serving:
    """One order being served."""

    def __init__(self, door: FrontDoor, order: Order, viewer: Viewer, began_s: float) -> None:
        self._door, self._viewer, self._began_s = door, viewer, began_s
        self.order = order
        self.finish_reasons: list[str] = []
        self.choices = [
            Choice(call, self._sink(call.choice), Trail()) for call in door.calls(order, began_s)
        ]

    def _sink(self, choice: int) -> TextSink:
        order, index = self.order, self.order.first_choice + choice
        return TextSink(
            TextStream(self._door.tokenizer, order.text, order.token_ids),
            functools.partial(self._viewer.part, index),
            functools.partial(self._viewer.prompt, index),
            order.prompt_logprobs,
        )

    def finished(self, choice: Choice, finish: Finish) -> None:
        """Show the end of a choice."""
        now_s = asyncio.get_running_loop().time()
        sink, began_s = choice.sink, self._began_s
        text = sink.finish()
        stopped = sink.stop_string is not None
        ending = Ending(
            finish_reason=FinishReason.STOP if stopped else finish.finish_reason,
            stop_string=sink.stop_string,
            stop_token_id=None if stopped else self._door.shown_stop(finish.stop_token_id),
            text=text,
            prompt_tokens=len(self.order.token_ids),
            completion_tokens=sink.shown_tokens,
            trail=choice.trail,
            first_token_s=(sink.first_at_s or now_s) - began_s,
            total_s=now_s - began_s,
        )
        self.finish_reasons.append(ending.finish_reason.value)
        self._viewer.end(self.order.first_choice + choice.call.choice, ending)


def _shape(order: Order) -> RequestShape:
    """What of an order has to lie within an envelope."""
    return RequestShape(len(order.token_ids), order.sampling.max_tokens, features(order.sampling))


def _is_id(given: str) -> bool:
    return len(given) <= REQUEST_ID_CHARS_MAX and re.fullmatch("[!-~]+", given) is not None


def _invalid(message: str) -> ServingError:
    return ServingError(Reason.INVALID_REQUEST, message)
