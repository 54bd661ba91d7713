"""Names of what the simulation counts: faults, messages and the states of their receivers."""

import enum
from typing import Final


class Fault(enum.IntEnum):
    """What befell a message, or its receiver, on the way."""

    NONE = 0
    LOST = 1
    DELAYED = 2
    DUPLICATED = 3
    REORDERED = 4
    CUT = 5
    """Lost in a partition."""
    STOPPED = 6
    """It waited while its receiver was stopped."""
    RESTARTED = 7
    """Its sender, or who it was for, has been restarted since."""
    CLOCK = 8
    """The receiver's clock has jumped since its last message."""


class Message(enum.IntEnum):
    """What travels, and what happens to a coordinator beside."""

    FIRST_REQUEST = 0
    START_WAVE = 1
    WAVE_COMPLETE = 2
    SLEEPS = 3
    """Report: the rank sleeps."""
    STEPS = 4
    """Report: the rank steps."""
    HOLDS = 5
    """Report: the rank is held by the operator."""
    START = 6
    PUBLISH = 7
    ADD = 8
    ABORT = 9
    PAUSE = 10
    RESUME = 11
    TICK = 12
    RANK_STARTED = 13
    RANK_DIED = 14
    RESIZED = 15
    GROUP_STARTED = 16


class At(enum.IntEnum):
    """Who receives, and in which state."""

    COORDINATOR_PAUSED = 0
    COORDINATOR_PAUSING = 1
    COORDINATOR_STARTING = 2
    COORDINATOR_RUNNING = 3
    COORDINATOR_HELD = 4
    COORDINATOR_ENDED = 5
    RANK_SLEEPS = 6
    RANK_STEPS = 7
    RANK_HOLDS = 8
    RANK_DEAD = 9
    FRONT_BELIEVES_PAUSED = 10
    FRONT_BELIEVES_RUNNING = 11


LOST: Final[int] = int(Fault.LOST)
CUT: Final[int] = int(Fault.CUT)
FAULTS: Final[int] = len(Fault)
MESSAGES: Final[int] = len(Message)
STATES: Final[int] = len(At)

REPORTS = (Message.SLEEPS, Message.STEPS, Message.HOLDS)
FROM_RANK = (Message.START_WAVE, Message.WAVE_COMPLETE, *REPORTS)
TO_RANK = (Message.START, Message.ADD, Message.ABORT, Message.PAUSE, Message.RESUME)
LOSSY = (Message.FIRST_REQUEST, *FROM_RANK, Message.START, Message.PUBLISH)
"""Messages of the wave protocol. Requests travel as a service's own traffic does: none is lost."""


def index(at: int, message: int, fault: int) -> int:
    """Place of a triple in a coverage table."""
    return (at * MESSAGES + message) * FAULTS + fault


class Violation(AssertionError):
    """An invariant does not hold."""
