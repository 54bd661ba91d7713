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
from services.router.line import Turn
from services.router.sink import TextSink
from splitwave.core.deadline import Deadline
from splitwave.core.demands import RequestShape
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.core.sampling_limits import SEED_MAX, SEED_MIN
from splitwave.runtime import tracing_names as names

ROUND_S = 1.0
"""How long the first try to get room for all may take; each further one has twice the time."""
TURN_S_MAX = 30.0
"""How long one request may try while others wait for their turn."""


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


class Turns:
    """Whose turn it is to take room for several choices: one request of a router at a time, by
    priority, then in the order of arrival.

    Requests that each hold what the others lack would wait for ever. Those of other routers
    may still do so: all that was got is given back after a while of chance, and taken anew;
    the while doubles, so that a request which only has to wait gets its room in the end.
    """

    def __init__(self, chance: Callable[[], float], pool_wait_s: float = POOL_WAIT_S) -> None:
        """`chance` returns numbers in [0, 1); `pool_wait_s`: while no worker is there."""
        self._chance = chance
        self._pool_wait_s = pool_wait_s
        self._turn = Turn()

    async def rooms(self, choices: Sequence[Choice], fleet: Fleet) -> list[Room | None]:
        """Room for each choice that needs any. Raises OVERLOADED or POOL_UNAVAILABLE."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        patience_s = choices[0].call.deadline.share_s(began_s, ROOM_SHARE)
        priority = choices[0].call.request.priority
        try:
            with tracing.span(names.GRANT):
                async with asyncio.timeout(patience_s), self._turn.mine(priority):
                    until_s = min(began_s + patience_s, loop.time() + TURN_S_MAX)
                    return await self._take(choices, fleet, until_s)
        except TimeoutError:
            error = ServingError(Reason.OVERLOADED, "others wait for room as well")
            raise _named(error, len(choices)) from None
        finally:
            for choice in choices:
                choice.trail.grant_wait_s += loop.time() - began_s

    async def _take(
        self, choices: Sequence[Choice], fleet: Fleet, until_s: float
    ) -> list[Room | None]:
        """Try in rounds, each longer than the one before."""
        loop = asyncio.get_running_loop()
        alone_until_s, round_s = loop.time() + self._pool_wait_s, ROUND_S
        while True:
            round_ends_s = loop.time() + round_s * (0.5 + self._chance())
            waits_until = Deadline(min(until_s, round_ends_s))
            pool_wait_s = max(0.0, alone_until_s - loop.time())
            try:
                return await _round(choices, fleet, waits_until, pool_wait_s)
            except ServingError as error:
                now_s = loop.time()
                refused = not waits_until.passed(now_s)  # At once: waiting does not help.
                if refused or now_s >= _patience(error, alone_until_s, until_s):
                    raise _named(error, len(choices)) from error
            round_s *= 2


async def serve_choices(
    choices: Sequence[Choice], fleet: Fleet, finished: Finished, turns: Turns
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
        rooms = await turns.rooms(choices, fleet)
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


async def _round(
    choices: Sequence[Choice], fleet: Fleet, waits_until: Deadline, pool_wait_s: float
) -> list[Room | None]:
    needs = [_need(choice, waits_until, pool_wait_s) for choice in choices]
    asks = [asyncio.ensure_future(fleet.decode_room(need)) if need else None for need in needs]
    asked = [ask for ask in asks if ask is not None]
    try:
        await asyncio.gather(*asked)
    except BaseException:
        for ask in asked:
            if ask.done():
                _give_back(ask)
            else:
                ask.cancel()
                ask.add_done_callback(_give_back)  # It may have got its room all the same.
        raise
    return [None if ask is None else ask.result() for ask in asks]


def _give_back(ask: "asyncio.Future[Room]") -> None:
    if not ask.cancelled() and ask.exception() is None:
        with ask.result():
            pass


def _need(choice: Choice, waits_until: Deadline, pool_wait_s: float) -> RoomNeed | None:
    rest = rest_of(choice.call.request, ())
    if rest.ends_in_prefill:
        return None
    return RoomNeed(
        tokens=room_tokens(choice.call, rest),
        waits_until=waits_until,
        keep_until=choice.call.deadline,
        priority=choice.call.request.priority,
        pool_wait_s=pool_wait_s,
        shape=RequestShape.of(choice.call.request),
    )


def _patience(error: ServingError, alone_until_s: float, until_s: float) -> float:
    """Until when room is tried for again after a round that failed so."""
    if error.reason is Reason.POOL_UNAVAILABLE:
        return min(until_s, alone_until_s)
    return until_s if error.reason is Reason.OVERLOADED else 0.0


def _named(error: ServingError, count: int) -> ServingError:
    if error.reason is not Reason.OVERLOADED:
        return error
    message = f"n: no room for {count} completions at once; ask for fewer, or later"
    return ServingError(Reason.OVERLOADED, message, retry_after_s=error.retry_after_s or ROUND_S)
