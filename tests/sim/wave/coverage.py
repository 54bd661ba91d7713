"""Which (state, message, fault) triples can happen, and why the others cannot.

A triple is counted when the message arrives, or where it would have gone when it is
lost. Of several faults on one message the first that befell it counts.
"""

from collections.abc import Iterator

from tests.sim.wave.words import (
    FAULTS,
    FROM_RANK,
    MESSAGES,
    STATES,
    TO_RANK,
    At,
    Fault,
    Message,
    index,
)

Triple = tuple[At, Message, Fault]

PAUSED, PAUSING, STARTING, RUNNING, HELD, ENDED = list(At)[:6]
LIVE = (PAUSED, PAUSING, STARTING, RUNNING, HELD)
ON_THE_WAY = (Fault.LOST, Fault.DELAYED, Fault.DUPLICATED, Fault.REORDERED, Fault.CUT)
AT_A_COORDINATOR = (*ON_THE_WAY, Fault.STOPPED, Fault.CLOCK)
RANK = (At.RANK_SLEEPS, At.RANK_STEPS, At.RANK_HOLDS)
FRONT = (At.FRONT_BELIEVES_PAUSED, At.FRONT_BELIEVES_RUNNING)


def _coordinator() -> Iterator[Triple]:
    for message in (Message.FIRST_REQUEST, *FROM_RANK):
        for at in LIVE:
            yield at, message, Fault.NONE
            yield from ((at, message, fault) for fault in AT_A_COORDINATOR)
    for message in FROM_RANK:
        yield from ((at, message, Fault.RESTARTED) for at in LIVE)
    yield ENDED, Message.FIRST_REQUEST, Fault.NONE
    yield from ((ENDED, Message.FIRST_REQUEST, fault) for fault in AT_A_COORDINATOR)
    late = (
        Fault.DELAYED, Fault.DUPLICATED, Fault.REORDERED,
        Fault.STOPPED, Fault.CLOCK, Fault.RESTARTED,
    )  # fmt: skip
    yield from ((ENDED, message, fault) for message in FROM_RANK for fault in late)


def _process() -> Iterator[Triple]:
    for fault in (Fault.NONE, Fault.STOPPED, Fault.CLOCK):
        yield ENDED, Message.TICK, fault
        yield ENDED, Message.GROUP_STARTED, fault
        for at in LIVE:
            yield at, Message.TICK, fault
            yield at, Message.RANK_DIED, fault
            yield at, Message.RANK_STARTED, fault
            yield at, Message.RESIZED, fault


def _rank() -> Iterator[Triple]:
    for at in RANK:
        for message in (Message.START, Message.ADD, Message.ABORT):
            yield at, message, Fault.NONE
            yield at, message, Fault.STOPPED
        yield from ((at, Message.START, fault) for fault in ON_THE_WAY)
    for fault in (Fault.NONE, Fault.STOPPED):
        yield At.RANK_SLEEPS, Message.PAUSE, fault
        yield At.RANK_STEPS, Message.PAUSE, fault
        yield At.RANK_HOLDS, Message.RESUME, fault
    yield from ((At.RANK_DEAD, message, Fault.RESTARTED) for message in TO_RANK)


def _front() -> Iterator[Triple]:
    for at in FRONT:
        yield at, Message.PUBLISH, Fault.NONE
        yield from ((at, Message.PUBLISH, fault) for fault in ON_THE_WAY)


REACHABLE: frozenset[Triple] = frozenset([*_coordinator(), *_process(), *_rank(), *_front()])


def targets() -> list[Triple]:
    """What a fault can be aimed at."""
    return [triple for triple in sorted(REACHABLE) if triple[2] and triple[0] is not At.RANK_DEAD]


POSSIBLE: dict[tuple[At, Message], list[Fault]] = {}
"""Which faults each message can meet in each state."""
for _at, _message, _fault in targets():
    POSSIBLE.setdefault((_at, _message), []).append(_fault)


def rows(coverage: list[int]) -> Iterator[tuple[Triple, int]]:
    """Each triple with its count."""
    for at in At:
        for message in Message:
            for fault in Fault:
                yield (at, message, fault), coverage[index(at, message, fault)]


def empty() -> list[int]:
    """A table with nothing counted."""
    return [0] * (STATES * MESSAGES * FAULTS)
