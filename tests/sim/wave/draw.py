"""Schedules from seeds: episodes, some of whose messages meet a fault, and traffic beside."""

import functools

from tests.sim.wave.coverage import POSSIBLE
from tests.sim.wave.episodes import DRAWN, FRONTS_MAX, SEATS, Episode
from tests.sim.wave.scarce import SCARCE
from tests.sim.wave.schedule import Action, Draw, Op, Schedule
from tests.sim.wave.words import FROM_RANK, At, Fault, Message

EPISODES_A_SCHEDULE = 15
AIMS_AN_EPISODE = 14
TRAFFIC = 8
"""Requests and aborts beside the episodes."""
KINDS = tuple(kind for kind in Fault if kind)
SHARES = {
    Fault.LOST: 4, Fault.DELAYED: 4, Fault.DUPLICATED: 3, Fault.REORDERED: 3,
    Fault.CUT: 3, Fault.STOPPED: 1, Fault.RESTARTED: 2, Fault.CLOCK: 5,
}  # fmt: skip
"""How often each kind is aimed: a stop befalls many messages, a jump of the clock one."""


def draw(seed: int) -> Schedule:
    """The schedule of a seed: at least 3 ranks, 2 fronts and 3 kinds of fault."""
    one = Draw(seed)
    kinds = one.random.sample(KINDS, 4 + one.below(4))
    actions: list[Action] = []
    at_us = 5_000
    for _ in range(EPISODES_A_SCHEDULE):
        episode = DRAWN[one.below(len(DRAWN))]
        actions.append(Action(at_us - 1, Op.CLEAR))
        actions += _aimed(one, episode, kinds, at_us)
        actions += episode.acts(one, at_us + 1)
        at_us += episode.span_us + one.us(50_000)
    actions += [_traffic(one, at_us) for _ in range(TRAFFIC)]
    actions += [_plain(one, kind, at_us) for kind in kinds]
    actions.sort()
    interval = (1, 2, 4, 16)[one.below(4)]
    return Schedule(
        seed, 3 + one.below(3), 2 + one.below(2), interval, 200 + one.us(4_000), tuple(actions)
    )


def _aimed(one: Draw, episode: Episode, kinds: list[Fault], at_us: int) -> list[Action]:
    """Faults that wait for the messages of an episode."""
    frozen = frozenset(kinds)
    aims = [aim for aim in episode.rare if one.chance() < 0.8]
    if episode.aims:
        aims += [episode.aims[one.below(len(episode.aims))] for _ in range(AIMS_AN_EPISODE)]
    actions = []
    for at, message in aims:
        possible = _possible(at, message, frozen)
        if possible:
            kind = possible[one.below(len(possible))]
            copies = SEATS if message == Message.START and one.chance() < 0.2 else 1
            actions += [Action(at_us, Op.ARM, message, kind, at, _size_us(one, kind))] * copies
            if at is At.COORDINATOR_ENDED and message in FROM_RANK:
                # Only from beyond the grave does a word of this rank arrive then.
                actions.append(Action(at_us, Op.ARM, message, Fault.RESTARTED, at))
    return actions


@functools.cache
def _possible(at: At, message: Message, kinds: frozenset[Fault]) -> list[Fault]:
    """Faults that the message can meet there, each as often as it is to be drawn."""
    return [
        kind
        for kind in POSSIBLE[at, message]
        if kind in kinds
        for _ in range(SHARES[kind] * SCARCE.get((at, message, kind), 1))
    ]


def _traffic(one: Draw, ends_us: int) -> Action:
    at_us = one.below(ends_us)
    if one.chance() < 0.2:
        return Action(at_us, Op.ABORT, one.below(FRONTS_MAX), one.below(3))
    target = one.below(SEATS) if one.chance() < 0.5 else -1
    return Action(at_us, Op.ADD, one.below(FRONTS_MAX), target, 1 + one.below(6))


def _size_us(one: Draw, kind: Fault) -> int:
    if kind == Fault.CLOCK:
        return one.us(100_000_000) * (1 if one.chance() < 0.4 else -1)
    return one.us(300_000) if kind in (Fault.STOPPED, Fault.CUT) else 0


def _plain(one: Draw, kind: Fault, ends_us: int) -> Action:
    """A fault at a time, whatever is under way."""
    at_us = one.below(ends_us)
    size_us = _size_us(one, kind)
    if kind == Fault.CUT:
        op = Op.CUT_RANK if one.chance() < 0.7 else Op.CUT_FRONT
        return Action(at_us, op, one.below(SEATS), size_us)
    if kind == Fault.STOPPED:
        op = Op.STOP_COORDINATOR if one.chance() < 0.5 else Op.STOP_RANK
        return Action(at_us, op, one.below(SEATS), size_us)
    if kind == Fault.RESTARTED:
        if one.chance() < 0.3:
            return Action(at_us, Op.RESTART_FRONT, one.below(FRONTS_MAX))
        return Action(at_us, Op.KILL, one.below(SEATS))
    if kind == Fault.CLOCK:
        return Action(at_us, Op.JUMP, 0, size_us)
    return Action(at_us, Op.ARM, Message.STEPS, kind, -1)
