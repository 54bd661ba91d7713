"""One request, top to bottom: decode room, prefill, its token, hand-over, decode.

Read this file first. It is the sequence diagram.
"""

import asyncio
import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from services.router import tracing
from services.router.attempts import TAKEN_OUT, Call, Trail, refuse_impossible, rest_of, room_tokens
from services.router.grants import POOL_WAIT_LOST_S
from services.router.held import Held, Owner
from splitwave.core.deadline import Deadline
from splitwave.core.demands import RequestShape
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, TokenLogprob
from splitwave.core.handoff import Handoff
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.session import Submit
from splitwave.runtime import tracing_names as names

ROOM_SHARE = 0.5
"""Share of the time left that an attempt may wait for decode room."""
PREFILL_SHARE = 0.7
"""Share of the time left that a prefill may take, its queue included."""
OFFERS_MAX = 3
"""Decode workers to which one handoff is offered."""
LEASE_MARGIN_S = 0.5
"""Lease time below which a handoff is not offered any more: the pull would come too late."""


class Sink(Protocol):
    """Where one request's tokens go. Called from the session's frame loop: never waits."""

    last_at_s: float
    """When the latest tokens came, on the loop's clock; 0 before the first. Set by who writes."""

    @property
    def token_ids(self) -> Sequence[int]:
        """What the client has been given."""

    def write(
        self, offset: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> bool:
        """Take tokens that begin at `offset`; True if the client wants no more of them.

        Raises OffsetBroken for a gap or a repeat.
        """

    def wants_prompt(self) -> int | None:
        """How many log probabilities of each prompt token are still wanted; None: none at all."""

    def prompt(self, rows: Sequence[TokenLogprob]) -> None:
        """Take log probabilities of the prompt's tokens, the first token's not among them."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a generation ended well. `finish_reason` is STOP too if the sink wanted no more."""

    finish_reason: FinishReason
    stop_token_id: int | None = None
    waves: Sequence[str] = ()
    """Traceparents of the wave segments of its first and last step in decode, if it is traced."""


class Running(Protocol):
    """An attempt that a decode worker has accepted."""

    handoff_bytes: int
    handoff_s: float
    """What its handoff has cost; 0 until it has been pulled, however the attempt ends."""

    async def finish(self) -> Finish:
        """Wait for its end. Raises what it failed with; cancels it if the caller is cancelled."""


class Room(Protocol):
    """A taken grant: one seat and KV blocks in a decode group. Given back unless it was spent."""

    @property
    def worker_id(self) -> str:
        """The decode worker."""

    @property
    def grant_id(self) -> str:
        """Names the room there."""

    @property
    def kv_layout(self) -> str:
        """Digest that a handoff's must equal."""

    def __enter__(self) -> object: ...
    def __exit__(self, *_: object) -> None: ...

    async def submit(self, submit: Submit, held: Held, sink: Sink) -> Running:
        """Spend the grant; return once the worker has accepted, or raise why it has not.

        `held` follows the offer, whatever becomes of the caller meanwhile.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomNeed:
    """What an attempt needs of a decode group."""

    tokens: int
    waits_until: Deadline
    keep_until: Deadline
    """How long the room may be needed before it is submitted to: the request's own deadline."""
    kv_layout: str = ""
    """Only groups of this layout; empty: any."""
    avoid: frozenset[str] = frozenset()
    """Workers that are not asked."""
    priority: int = 0
    """Smaller is served first where requests wait."""
    pool_wait_s: float = math.inf
    """How long to wait for any worker to be there; no longer than the router is set to."""
    shape: RequestShape | None = None
    """Only groups that are certified for it; None: any."""


class Fleet(Protocol):
    """All workers, as a request sees them."""

    async def decode_room(self, need: RoomNeed) -> Room:
        """Take room in a decode group. Raises OVERLOADED or POOL_UNAVAILABLE."""

    def hold(self, handoff_id: str) -> AbstractContextManager[Held]:
        """Own a handoff until decode has accepted it; released in the background otherwise."""

    async def prefill(
        self, call: PrefillCall, held: Held, deadline: Deadline, avoid: set[str]
    ) -> PrefillResult:
        """Place and compute a prompt; workers that take no more are passed over.

        `avoid`: workers that get it only where there is no other. Those that could not be
        reached are added, and passed over too.
        """

    def spend_resume(self) -> None:
        """Take one attempt from the budget, or raise RESUME_BUDGET_EXHAUSTED."""


async def generate(
    call: Call, fleet: Fleet, sink: Sink, trail: Trail, room: Room | None = None
) -> Finish:
    """Serve one request; `sink` receives its tokens in order, `trail` what it took.

    `room`: of the first attempt, if it was taken already. A new attempt goes on from what
    the client has: it prefills the prompt and `sink.token_ids`, so nothing that was shown can
    be contradicted. Raises ServingError.
    """
    refuse_impossible(call.request)
    try:
        async with asyncio.timeout_at(call.deadline.at_s):
            while True:
                trail.attempts += 1
                step = _Attempt(call, fleet, sink, trail)
                try:
                    with step.span():
                        return await _attempt(step, room)
                except ServingError as error:
                    trail.failed(error, step.rest)  # Raises if this was the end.
                fleet.spend_resume()
                room = None
    except TimeoutError:
        raise ServingError(Reason.DEADLINE_EXCEEDED, "the deadline passed") from None


class _Attempt:
    """What the steps of one attempt share."""

    def __init__(self, call: Call, fleet: Fleet, sink: Sink, trail: Trail) -> None:
        self.call, self.fleet, self.sink, self.trail = call, fleet, sink, trail
        self.rest = rest_of(call.request, sink.token_ids)
        self.room_tokens = room_tokens(call, self.rest)

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def pool_wait_s(self) -> float:
        """How long it waits for any decode worker to be there, at most."""
        goes_on = self.trail.attempts > 1 or self.sink.token_ids
        return POOL_WAIT_LOST_S if goes_on else math.inf

    def share(self, fraction: float) -> Deadline:
        now_s = self.now_s
        return Deadline(now_s + self.call.deadline.share_s(now_s, fraction))

    def hold(self) -> AbstractContextManager[Held]:
        return self.fleet.hold(self.trail.next_id(self.call))

    def span(self) -> tracing.Step:
        about = {
            "splitwave.attempt": self.trail.attempts,
            "splitwave.choice": self.call.choice,
            "splitwave.offset": self.rest.offset,
        }
        return tracing.span(names.ATTEMPT, about)


async def _attempt(step: _Attempt, room: Room | None) -> Finish:
    if step.rest.ends_in_prefill:
        with step.hold() as held:
            finish, _ = await _first_token(step, held, kv_layout="")
        if finish is None:
            raise ServingError(Reason.INTERNAL, "prefill went on where it had to end")
        return finish
    room = room or await _decode_room(step)
    with room, step.hold() as held:
        finish, handoff = await _first_token(step, held, room.kv_layout)
        if finish is not None:
            return finish
        if handoff is None:
            raise ServingError(Reason.INTERNAL, "prefill held nothing where decode had to follow")
        with tracing.call(names.DECODE) as span:
            running = await _hand_over(step, room, held, handoff)
            try:
                finish = await _decode(step, running)
            finally:
                span.set_attribute("splitwave.handoff.bytes", running.handoff_bytes)
            tracing.link(finish.waves)
            return finish


async def _decode_room(step: _Attempt) -> Room:
    began_s = step.now_s
    try:
        with tracing.span(names.GRANT, {"splitwave.room_tokens": step.room_tokens}) as span:
            room = await step.fleet.decode_room(
                RoomNeed(
                    tokens=step.room_tokens,
                    waits_until=step.share(ROOM_SHARE),
                    pool_wait_s=step.pool_wait_s,
                    keep_until=step.call.deadline,
                    priority=step.call.request.priority,
                    shape=RequestShape.of(step.call.request),
                )
            )
            span.set_attribute(names.DECODE_WORKER, room.worker_id)
            return room
    finally:
        step.trail.grant_wait_s += step.now_s - began_s


async def _first_token(
    step: _Attempt, held: Held, kv_layout: str
) -> tuple[Finish | None, Handoff | None]:
    """Prefill and show what it sampled; return how the generation ended with it, or its handoff."""
    began_s = step.now_s
    step.trail.at_work = True
    try:
        with tracing.call(names.PREFILL, {"splitwave.handoff.id": held.handoff_id}):
            result = await step.fleet.prefill(
                _prefill_call(step, held, kv_layout),
                held,
                step.share(PREFILL_SHARE),
                step.trail.avoid_prefill,
            )
            tracing.link(result.waves)
    except ServingError as error:
        if error.reason in TAKEN_OUT:
            step.trail.lost_prefill(error, held.worker_id, held.epoch)
        raise
    finally:
        step.trail.prefill_s += step.now_s - began_s
    step.trail.at_work = False
    step.trail.cached_tokens = max(step.trail.cached_tokens, result.cached_tokens)
    _show_prompt(step, result)
    return _show_first(step, result), result.handoff


def _prefill_call(step: _Attempt, held: Held, kv_layout: str) -> PrefillCall:
    return PrefillCall(
        request_id=step.call.request.request_id,
        handoff_id=held.handoff_id,
        token_ids=step.rest.token_ids,
        sampling=step.rest.sampling,
        keep_first_token=step.rest.keeps_first_token,
        kv_layout=kv_layout,
        priority=step.call.request.priority,
        prompt_logprobs=_wanted_of_prompt(step),
        traceparent=tracing.traceparent(),
    )


def _wanted_of_prompt(step: _Attempt) -> int | None:
    """What is asked of prefill alone; of a prompt's first token nothing is known."""
    alone = len(step.call.request.token_ids) == 1
    return None if alone else step.sink.wants_prompt()


def _show_prompt(step: _Attempt, result: PrefillResult) -> None:
    if step.sink.wants_prompt() is None:
        return
    rows = result.prompt_logprobs or ()
    if len(rows) != len(step.call.request.token_ids) - 1:
        raise ServingError(Reason.INTERNAL, "prefill gave not one log probability a prompt token")
    step.sink.prompt(rows)


def _show_first(step: _Attempt, result: PrefillResult) -> Finish | None:
    if (result.token_id is not None) != step.rest.keeps_first_token:
        message = "prefill kept or left out the first token against what was asked"
        raise ServingError(Reason.INTERNAL, message)
    if result.token_id is None:
        return None
    rows = [] if result.logprob is None else [result.logprob]
    step.sink.last_at_s = step.now_s
    wants_no_more = step.sink.write(step.rest.offset, [result.token_id], rows)
    if result.finish_reason is not None:
        return Finish(result.finish_reason, result.stop_token_id)
    return Finish(FinishReason.STOP) if wants_no_more else None


async def _hand_over(step: _Attempt, room: Room, held: Held, handoff: Handoff) -> Running:
    """Offer the handoff until a decode worker takes it over, while its lease lives."""
    lease_ends = Deadline(step.now_s + handoff.lease_remaining_s - LEASE_MARGIN_S)
    avoid: set[str] = set()
    attempt_id = held.handoff_id
    for offer in itertools.count(1):
        worker = {names.DECODE_WORKER: room.worker_id}
        try:
            running = await room.submit(_submit(step, room, attempt_id, handoff), held, step.sink)
            tracing.event(names.ACCEPTED, worker)
            return running
        except ServingError as refusal:
            tracing.event("refused", {**worker, "error.type": refusal.reason.value})
            last = offer == OFFERS_MAX or lease_ends.passed(step.now_s)
            if last or held.owner is not Owner.ROUTER or not refusal.reason.worker_elsewhere:
                raise
            if refusal.reason is not Reason.GRANT_UNKNOWN:
                avoid.add(room.worker_id)
            room = await _room_elsewhere(step, lease_ends, handoff.kv_layout, avoid, refusal)
        attempt_id = step.trail.next_id(step.call)
    raise AssertionError("the last offer returns or raises")


async def _room_elsewhere(
    step: _Attempt, lease_ends: Deadline, kv_layout: str, avoid: set[str], refusal: ServingError
) -> Room:
    """Room for a handoff that was refused. With none, the refusal stands: prefill again."""
    need = RoomNeed(
        tokens=step.room_tokens,
        waits_until=min(lease_ends, step.share(ROOM_SHARE), key=lambda x: x.at_s),
        keep_until=step.call.deadline,
        priority=step.call.request.priority,
        kv_layout=kv_layout,
        avoid=frozenset(avoid),
        pool_wait_s=step.pool_wait_s,
        shape=RequestShape.of(step.call.request),
    )
    try:
        return await step.fleet.decode_room(need)
    except ServingError as none_left:
        raise refusal from none_left


def _submit(step: _Attempt, room: Room, attempt_id: str, handoff: Handoff) -> Submit:
    rest = rest_of(step.call.request, step.sink.token_ids)
    return Submit(
        attempt_id=attempt_id,
        request_id=step.call.request.request_id,
        grant_id=room.grant_id,
        handoff=handoff,
        token_ids=rest.token_ids,
        offset=rest.offset,
        sampling=rest.sampling,
        remaining_s=step.call.deadline.remaining_s(step.now_s),
        stall_max_s=step.call.stall_max_s,
        traceparent=tracing.traceparent(),
        priority=step.call.request.priority,
    )


async def _decode(step: _Attempt, running: Running) -> Finish:
    step.trail.at_work = True
    try:
        finish = await running.finish()  # The session's frame loop feeds the sink; no task a token.
    finally:
        step.trail.handoff_s += running.handoff_s
        step.trail.handoff_bytes += running.handoff_bytes
    step.trail.at_work = False
    return finish
