"""The choices of one request: room for all of them or none, then each served on its own."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any  # asyncio itself types what a coroutine yields so

from services.router import tracing
from services.router.attempts import Call, Trail, refuse_impossible, rest_of, room_tokens
from services.router.generate import ROOM_SHARE, Finish, Fleet, Room, RoomNeed, generate
from services.router.grants import POOL_WAIT_S
from services.router.sink import TextSink
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.core.sampling_limits import SEED_MAX, SEED_MIN
from splitwave.runtime import tracing_names as names

ROUND_S = 1.0
"""How long the first try to get room for all may take; each further one has twice the time."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion of a request."""

    call: Call
    sink: TextSink
    trail: Trail


Finished = Callable[[Choice, Finish], None]


def sampling_of_choice(sampling: Sampling, choice: int) -> Sampling:
    """Each choice has a seed of its own: the request's plus the choice's index, in 64 bits."""
    if sampling.seed is None or choice == 0:
        return sampling
    span = SEED_MAX - SEED_MIN + 1
    return replace(sampling, seed=(sampling.seed - SEED_MIN + choice) % span + SEED_MIN)


async def serve_choices(
    choices: Sequence[Choice], fleet: Fleet, finished: Finished, chance: Callable[[], float]
) -> None:
    """Serve all choices; `finished` hears of each as it ends. Raises what the first one fails with.

    Whichever fails ends the others, and so does a cancellation.
    """
    if len(choices) == 1:
        (only,) = choices
        finished(only, await generate(only.call, fleet, only.sink, only.trail))
        return
    for choice in choices:
        refuse_impossible(choice.call.request)
    with ExitStack() as kept:
        rooms = await _rooms(choices, fleet, chance)
        for room in rooms:
            if room is not None:
                kept.enter_context(room)  # Given back here if its choice never gets to it.
        await all_or_none(
            _serve(choice, fleet, finished, room)
            for choice, room in zip(choices, rooms, strict=True)
        )


async def all_or_none(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first failure ends the rest, and is raised."""
    first, *others = works
    if not others:
        await first
        return
    try:
        async with asyncio.TaskGroup() as group:
            for work in (first, *others):
                group.create_task(work)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _serve(choice: Choice, fleet: Fleet, finished: Finished, room: Room | None) -> None:
    finished(choice, await generate(choice.call, fleet, choice.sink, choice.trail, room))


async def _rooms(
    choices: Sequence[Choice], fleet: Fleet, chance: Callable[[], float]
) -> list[Room | None]:
    """Room for each choice that needs any, taken together.

    Two requests that each hold what the other lacks would wait for ever. So all that was
    got is given back after a while of chance, and taken anew; the while doubles, so that
    a request which only has to wait its turn gets it in the end.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    deadline = choices[0].call.deadline
    until_s = began_s + deadline.share_s(began_s, ROOM_SHARE)
    round_s = ROUND_S
    try:
        with tracing.span(names.GRANT):
            while True:
                waits_s = loop.time() + round_s * (0.5 + chance())
                waits_until = Deadline(min(until_s, waits_s))
                try:
                    return await _round(choices, fleet, waits_until)
                except ServingError as error:
                    if loop.time() >= _patience(error, began_s, until_s):
                        raise _named(error, len(choices)) from error
                round_s *= 2
    finally:
        for choice in choices:
            choice.trail.grant_wait_s += loop.time() - began_s


async def _round(
    choices: Sequence[Choice], fleet: Fleet, waits_until: Deadline
) -> list[Room | None]:
    needs = [_need(choice, waits_until) for choice in choices]
    asks = [asyncio.ensure_future(fleet.decode_room(need)) if need else None for need in needs]
    asked = [ask for ask in asks if ask is not None]
    try:
        await asyncio.gather(*asked)
    except BaseException:
        for ask in asked:
            ask.cancel()
            ask.add_done_callback(_give_back)
        raise
    return [None if ask is None else ask.result() for ask in asks]


def _give_back(ask: "asyncio.Future[Room]") -> None:
    if not ask.cancelled() and ask.exception() is None:
        with ask.result():
            pass


def _need(choice: Choice, waits_until: Deadline) -> RoomNeed | None:
    rest = rest_of(choice.call.request, ())
    if rest.ends_in_prefill:
        return None
    return RoomNeed(
        tokens=room_tokens(choice.call, rest),
        waits_until=waits_until,
        keep_until=choice.call.deadline,
    )


def _patience(error: ServingError, began_s: float, until_s: float) -> float:
    """Until when room is tried for again after a round that failed so."""
    if error.reason is Reason.POOL_UNAVAILABLE:
        return min(until_s, began_s + POOL_WAIT_S)
    return until_s if error.reason is Reason.OVERLOADED else began_s


def _named(error: ServingError, count: int) -> ServingError:
    if error.reason is not Reason.OVERLOADED:
        return error
    message = f"n: no room for {count} completions at once; ask for fewer, or later"
    return ServingError(Reason.OVERLOADED, message, retry_after_s=error.retry_after_s or ROUND_S)
