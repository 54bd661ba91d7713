"""Episodes that bring a group into each state.

Each names the messages that it makes likely, with the state that they find their receiver in.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tests.sim.wave.schedule import Action, Draw, Op
from tests.sim.wave.words import REPORTS, At, Fault, Message

SEATS = 6
FRONTS_MAX = 3

PAUSED, PAUSING, STARTING, RUNNING, HELD, ENDED = list(At)[:6]
SLEEPS, STEPS, HOLDS = REPORTS
FIRST_REQUEST, START_WAVE, WAVE_COMPLETE = list(Message)[:3]

Aim = tuple[At, Message]


class Episode(NamedTuple):
    """Some actions from a time on, and the aims that they make worth while."""

    share: int
    """How often it is drawn."""
    acts: Callable[[Draw, int], list[Action]]
    aims: tuple[Aim, ...]
    span_us: int
    rare: tuple[Aim, ...] = ()
    """What few episodes bring about: aimed at nearly each time."""


def at_all(states: Iterable[At], *messages: Message) -> tuple[Aim, ...]:
    """Every one of these messages in every one of these states."""
    return tuple((at, message) for at in states for message in messages)


def add(draw: Draw, at_us: int, tokens: int = 5) -> Action:
    """A request of up to so many tokens from any front to any rank."""
    return Action(at_us, Op.ADD, draw.below(FRONTS_MAX), draw.below(SEATS), 1 + draw.below(tokens))


def lose(at_us: int, message: Message, when: At, copies: int = SEATS) -> list[Action]:
    """The next messages of a kind are lost, if they find the coordinator in that state."""
    return [Action(at_us, Op.ARM, message, Fault.LOST, when)] * copies


def _requests(draw: Draw, at_us: int) -> list[Action]:
    """A few requests within milliseconds, and an abort."""
    later_us = at_us + draw.us(3_000)
    return [
        add(draw, at_us),
        add(draw, later_us),
        add(draw, at_us + draw.us(20_000)),
        Action(later_us + draw.us(9_000), Op.ABORT, draw.below(FRONTS_MAX), draw.below(2)),
    ]


def _stale_front(draw: Draw, at_us: int) -> list[Action]:
    """A front-end that knows nothing sends a request, and its notice is lost."""
    front = draw.below(FRONTS_MAX)
    return [
        Action(at_us, Op.RESTART_FRONT, front),
        *lose(at_us, FIRST_REQUEST, PAUSED, 1),
        Action(at_us + 1, Op.ADD, front, draw.below(SEATS), 1 + draw.below(5)),
        Action(at_us + draw.us(9_000), Op.ADD, front, draw.below(SEATS), 1),
        Action(at_us + 40_000, Op.RESTART_FRONT, 1),
        *lose(at_us + 40_000, FIRST_REQUEST, PAUSED, 1),
        Action(at_us + 40_001, Op.ADD, 1, draw.below(SEATS), 2),
    ]


def _long_wave(draw: Draw, at_us: int) -> list[Action]:
    """A wave of some length, and a front-end that believes the group paused meanwhile."""
    front = draw.below(FRONTS_MAX)
    then_us = at_us + 5_000 + draw.us(20_000)
    actions = [
        Action(at_us, Op.ADD, draw.below(FRONTS_MAX), draw.below(SEATS), 12 + draw.below(12)),
        Action(then_us, Op.RESTART_FRONT, front),
        Action(then_us + 1, Op.ADD, front, draw.below(SEATS), 4),
        Action(then_us + draw.us(5_000), Op.RESTART_FRONT, 1),
        Action(then_us + 5_001, Op.ADD, 1, draw.below(SEATS), 4),
    ]
    if draw.chance() < 0.5:
        actions += [Action(then_us, Op.PAUSE), Action(at_us + 60_000, Op.RESUME)]
    return actions


def _slow_start(draw: Draw, at_us: int) -> list[Action]:
    """One rank's start, or its word that it steps, is lost: the coordinator waits for it."""
    wait_us = at_us + 5_000 + draw.us(100_000)
    lost = [Action(at_us, Op.ARM, Message.START, Fault.LOST, At.RANK_SLEEPS)]
    if draw.chance() < 0.5:
        lost = lose(at_us, STEPS, STARTING, 1)
    return [
        *lost,
        add(draw, at_us + 1, 3),
        Action(wait_us, Op.RESTART_FRONT, 0),
        Action(wait_us + 1, Op.ADD, 0, draw.below(SEATS), 2),
        Action(wait_us + 2, Op.RESTART_FRONT, 1),
        Action(wait_us + 3, Op.ADD, 1, draw.below(SEATS), 2),
        Action(wait_us + draw.us(5_000), Op.PAUSE if draw.chance() < 0.4 else Op.RESUME),
        Action(wait_us + 50_000, Op.RESUME),
    ]


def _death_in_hold(draw: Draw, at_us: int) -> list[Action]:
    """A rank dies on its way into an operator's hold, or in it."""
    actions = [
        add(draw, at_us, 3),
        Action(at_us + draw.us(4_000), Op.PAUSE),
        Action(at_us + 60_000, Op.RESUME),
    ]
    if draw.chance() < 0.6:
        actions.append(Action(at_us + 30_000, Op.KILL, draw.below(SEATS)))
    elif draw.chance() < 0.8:
        actions.append(Action(at_us + 60_001, Op.KILL, draw.below(SEATS)))
    return actions


def _hold(draw: Draw, at_us: int) -> list[Action]:
    """The operator pauses the group, at work or asleep; requests come, and are resumed."""
    held_us = at_us + 15_000 + draw.us(20_000)
    resumed_us = held_us + 20_000 + draw.us(30_000)
    unheard = Action(at_us, Op.ARM, HOLDS, Fault.LOST, -1)
    return [
        *([unheard] if draw.chance() < 0.4 else []),
        add(draw, at_us),
        Action(at_us + draw.us(6_000), Op.PAUSE, draw.below(2)),
        add(draw, held_us),
        add(draw, held_us + draw.us(5_000)),
        Action(held_us + 10_000, Op.ABORT, draw.below(FRONTS_MAX), draw.below(2)),
        Action(resumed_us, Op.RESUME),
        *([Action(resumed_us + 1, Op.KILL, draw.below(SEATS))] if draw.chance() < 0.15 else []),
    ]


def _long_hold(draw: Draw, at_us: int) -> list[Action]:
    """The operator pauses the group for two seconds; requests come at its end."""
    ends_us = at_us + 2_000_000
    return [
        Action(at_us, Op.PAUSE, draw.below(2)),
        *[add(draw, ends_us - 1 - draw.us(200_000)) for _ in range(4)],
        Action(ends_us, Op.RESUME),
    ]


def _unseen_hold(draw: Draw, at_us: int) -> list[Action]:
    """An operator's pause of sleepers, whose stepping for it goes unreported."""
    return [
        *lose(at_us, STEPS, PAUSED),
        Action(at_us + 1, Op.PAUSE, draw.below(2)),
        Action(at_us + 40_000, Op.RESUME),
    ]


def _unseen_resume(draw: Draw, at_us: int) -> list[Action]:
    """Work is resumed and done, twice, and the coordinator is told nothing of it."""
    actions = []
    for held_us in (at_us, at_us + 90_000):
        change = Op.KILL if draw.chance() < 0.15 else Op.RESUME
        actions += [
            Action(held_us, Op.PAUSE),
            add(draw, held_us + 20_000),
            *lose(held_us + 20_000, STEPS, HELD),
            Action(held_us + 40_000, change, draw.below(SEATS)),
            Action(held_us + 40_001, Op.RESUME),
        ]
    return actions


def _unseen_hold_in_doubt(draw: Draw, at_us: int) -> list[Action]:
    """The same of a hold, while the coordinator waits for one rank to say that it sleeps."""
    return [
        *lose(at_us, SLEEPS, RUNNING, 1),
        *lose(at_us, SLEEPS, STARTING, 1),
        Action(at_us + 1, Op.ADD, 0, draw.below(SEATS), 3),
        *lose(at_us + 1, STEPS, PAUSING),
        Action(at_us + 60_000, Op.PAUSE),
        Action(at_us + 90_000, Op.RESUME),
    ]


def _unseen_rest(draw: Draw, at_us: int) -> list[Action]:
    """An operator's hold has ended, and nothing told the coordinator; then the group changes."""
    return [
        Action(at_us, Op.PAUSE),
        *lose(at_us + 20_000, SLEEPS, HELD),
        *lose(at_us + 20_000, STEPS, HELD),
        Action(at_us + 30_000, Op.RESUME),
        _change(draw, at_us + 50_000),
    ]


def _change(draw: Draw, at_us: int) -> Action:
    """A sleeping rank is replaced, or the group's size changes."""
    if draw.chance() < 0.5:
        return Action(at_us, Op.RESIZE, (-2, -1, 1, 2)[draw.below(4)])
    return Action(at_us, Op.KILL, draw.below(SEATS))


def _unseen_end(draw: Draw, at_us: int) -> list[Action]:
    """A wave ends unheard; then a rank is replaced and gets work, or the group's size changes."""
    seat = draw.below(SEATS)
    actions = [
        *lose(at_us, WAVE_COMPLETE, RUNNING, 1),
        *lose(at_us, SLEEPS, RUNNING),
        Action(at_us + 1, Op.ADD, 0, draw.below(SEATS), 6),
        Action(at_us + 85_000 + draw.us(20_000), Op.ADD, draw.below(FRONTS_MAX), seat, 3),
    ]
    if draw.chance() < 0.6:
        return [*actions, Action(at_us + 45_000, Op.KILL, seat)]
    return [*actions, Action(at_us + 45_000, Op.RESIZE, (-2, -1, 1, 2)[draw.below(4)])]


def _unheard_sleeper(draw: Draw, at_us: int) -> list[Action]:
    """One rank's word that it sleeps is lost: the coordinator waits for it, and doubts."""
    doubt_us = at_us + 60_000
    actions = [
        *lose(at_us, SLEEPS, RUNNING, 1),
        *lose(at_us, SLEEPS, STARTING, 1),
        add(draw, at_us + 1, 2),
    ]
    if draw.chance() < 0.5:
        actions.append(_change(draw, doubt_us))
    else:
        if draw.chance() < 0.6:
            actions += lose(at_us, STEPS, PAUSING)
        actions.append(Action(doubt_us, Op.PAUSE))
        actions.append(Action(doubt_us + 10_000 + draw.us(50_000), Op.RESUME))
        if draw.chance() < 0.5:
            actions.append(Action(doubt_us + draw.us(1_000), Op.KILL, draw.below(SEATS)))
    actions.append(add(draw, doubt_us + 40_000 + draw.us(50_000), 2))
    return actions


def _death(draw: Draw, at_us: int) -> list[Action]:
    """A rank dies at work, or waiting for the operator."""
    died_us = at_us + 500 + draw.us(8_000)
    actions = [
        add(draw, at_us, 9),
        add(draw, at_us, 9),
        Action(died_us, Op.KILL, draw.below(SEATS)),
        add(draw, died_us + 6_000 + draw.us(20_000)),
        add(draw, died_us + 6_000 + draw.us(20_000)),
    ]
    if draw.chance() < 0.4:
        actions.append(Action(at_us + 1, Op.PAUSE, draw.below(2)))
    return actions


def _unpublished(draw: Draw, at_us: int) -> list[Action]:
    """Requests come and go, and no front-end is told."""
    lost = Action(at_us, Op.ARM, Message.PUBLISH, Fault.LOST, -1)
    return [*([lost] * (4 * FRONTS_MAX)), add(draw, at_us + 1), add(draw, at_us + draw.us(9_000))]


def _replacement(draw: Draw, at_us: int) -> list[Action]:
    """A sleeping rank is replaced while nothing, or something, is to be done."""
    actions = [Action(at_us, Op.KILL, draw.below(SEATS))]
    if draw.chance() < 0.6:
        actions.append(add(draw, at_us + 10_000 + draw.us(25_000)))
    return actions


def _resize(draw: Draw, at_us: int) -> list[Action]:
    """The group grows or shrinks, asleep, starting or at work."""
    actions = [
        Action(at_us + draw.us(1_500), Op.RESIZE, (-2, -1, 1, 2)[draw.below(4)]),
        Action(at_us + 30_000, Op.RESIZE, (-2, -1, 1, 2)[draw.below(4)]),
    ]
    if draw.chance() < 0.8:
        actions.append(add(draw, at_us, 9))
    return actions


_FRONTS = at_all((At.FRONT_BELIEVES_PAUSED, At.FRONT_BELIEVES_RUNNING), Message.PUBLISH)
_AWAKE = at_all(
    (STARTING, RUNNING), FIRST_REQUEST, START_WAVE, WAVE_COMPLETE, SLEEPS, STEPS, Message.TICK
)
_ASLEEP = at_all(
    (PAUSED, PAUSING), FIRST_REQUEST, START_WAVE, WAVE_COMPLETE, SLEEPS, STEPS, Message.TICK
)
_RANKS = at_all((At.RANK_SLEEPS, At.RANK_STEPS), Message.START, Message.ADD, Message.ABORT)
_RANKS_HELD = (
    *at_all((At.RANK_HOLDS,), Message.START, Message.ADD, Message.ABORT, Message.RESUME),
    *at_all((At.RANK_SLEEPS, At.RANK_STEPS), Message.PAUSE),
)

EPISODES = (
    Episode(3, _requests, (*_AWAKE, *_ASLEEP, *_RANKS, *_FRONTS, *_FRONTS), 80_000),
    Episode(2, _stale_front, at_all((PAUSED,), SLEEPS, STEPS, FIRST_REQUEST, START_WAVE), 80_000,
            at_all((PAUSED, PAUSING, STARTING), START_WAVE) * 2),
    Episode(4, _long_wave,
            at_all((RUNNING,), FIRST_REQUEST, START_WAVE, WAVE_COMPLETE, SLEEPS, STEPS, HOLDS,
                   Message.TICK), 90_000),
    Episode(1, _slow_start,
            at_all((STARTING,), FIRST_REQUEST, START_WAVE, WAVE_COMPLETE, SLEEPS, HOLDS,
                   Message.TICK, Message.RESIZED), 160_000),
    Episode(4, _death_in_hold, (), 120_000,
            (*at_all((ENDED,), WAVE_COMPLETE, HOLDS, SLEEPS, START_WAVE),
             *at_all((HELD,), HOLDS, Message.RANK_DIED))),
    Episode(3, _hold,
            (*_RANKS_HELD, *at_all((HELD,), FIRST_REQUEST, HOLDS, STEPS, Message.TICK) * 2,
             *at_all((PAUSED, PAUSING, STARTING, RUNNING), HOLDS)), 120_000,
            (*at_all((HELD,), FIRST_REQUEST, HOLDS, STEPS), (At.RANK_HOLDS, Message.START))),
    Episode(1, _long_hold, at_all((HELD,), FIRST_REQUEST, HOLDS), 2_050_000),
    Episode(3, _unseen_hold, at_all((PAUSED,), Message.TICK), 100_000,
            at_all((PAUSED,), WAVE_COMPLETE, HOLDS)),
    Episode(5, _unseen_resume, at_all((HELD,), SLEEPS, STEPS), 180_000,
            at_all((HELD,), HOLDS, START_WAVE, WAVE_COMPLETE, Message.RANK_DIED, START_WAVE,
                   WAVE_COMPLETE, FIRST_REQUEST, Message.TICK)),
    Episode(2, _unseen_hold_in_doubt, at_all((PAUSING,), HOLDS), 120_000,
            at_all((PAUSING,), WAVE_COMPLETE)),
    Episode(2, _unseen_rest, (), 160_000, at_all((HELD,), Message.RANK_STARTED, Message.RESIZED)),
    Episode(3, _unseen_end, at_all((RUNNING,), FIRST_REQUEST, Message.RANK_DIED), 130_000,
            at_all((RUNNING,), Message.RANK_STARTED, Message.RESIZED)),
    Episode(5, _unheard_sleeper, at_all((PAUSING,), SLEEPS, HOLDS, START_WAVE, STEPS), 170_000,
            at_all((PAUSING,), FIRST_REQUEST, Message.RANK_STARTED, Message.RESIZED,
                   Message.RESIZED, Message.RESIZED, Message.RANK_DIED, WAVE_COMPLETE,
                   Message.TICK)),
    Episode(2, _death,
            at_all((ENDED,), FIRST_REQUEST, Message.TICK, Message.GROUP_STARTED, START_WAVE,
                   WAVE_COMPLETE, SLEEPS, STEPS, HOLDS), 100_000,
            at_all((PAUSED, STARTING, RUNNING, HELD), Message.RANK_DIED)),
    Episode(1, _unpublished, (), 60_000),
    Episode(2, _replacement, at_all((PAUSED,), SLEEPS, Message.TICK), 100_000,
            at_all((PAUSED, STARTING), Message.RANK_STARTED)),
    Episode(2, _resize, at_all((PAUSED,), SLEEPS, Message.TICK), 100_000,
            at_all((PAUSED, STARTING, RUNNING), Message.RESIZED)),
)  # fmt: skip
DRAWN = [episode for episode in EPISODES for _ in range(episode.share)]
