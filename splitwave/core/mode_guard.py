"""Whether a group may serve: its certificate, and each executed step of a kind outside its mode.

`ModeGuard` is one group's in one epoch, `PoolGuard` one router's view of a pool. Both are state
machines without clock or I/O: the worker's shell and the router's act on what they return.
"""

import enum
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

VIOLATIONS_KEPT_MAX = 16
REQUESTS_KEPT_MAX = 64
"""Of one violating step."""
PLACE_KEPT_S = 1800.0
"""How long a group that left its pool while it was out keeps its place: a readiness gate takes it
from the list of workers until it has loaded its weights again, and it is out all that time."""


class Standing(enum.StrEnum):
    """What a group's service is worth."""

    CERTIFIED = "certified"
    UNCERTIFIED = "uncertified"
    """It serves without a valid certificate, because it was told to."""
    DECERTIFIED = "decertified"
    """It has run a step outside its mode: no new work in this epoch."""
    DEGRADED = "degraded"
    """Decertified too, but it serves on: too many of its pool are out already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViolatingRequest:
    """One request of a violating step. No text, no token ids."""

    engine_request_id: str
    length_tokens: int
    """Prompt and output so far."""
    step_tokens: int
    """Tokens of it that the step computed."""
    sampling: tuple[str, ...] = ()
    """Names of the sampling features that it uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepViolation:
    """One executed step of a kind that the group's mode does not name, as its rank recorded it."""

    rank: int
    step: int
    """Which of the rank's executed steps, counted from 1, dummy steps included."""
    kind: str
    tokens: int
    """Tokens computed for requests; 0 in a dummy step."""
    requests: tuple[ViolatingRequest, ...] = ()
    """At most REQUESTS_KEPT_MAX of them."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ran its step {self.step} as {self.kind}, with {self.tokens} tokens"
            f" of {len(self.requests)} requests"
        )


class Action(enum.StrEnum):
    """What the worker has to do."""

    HOLD = "hold"
    """Take no new work until more is known."""
    DRAIN = "drain"
    """Take no new work for good, finish what runs, and end the epoch."""
    SERVE_ON = "serve_on"
    """Take new work again."""


class ModeGuard:
    """The standing of one group in one epoch.

    Invariants:
      G1  the standing never comes back: (un)certified -> decertified -> degraded
      G2  new work is taken unless it is decertified
      G3  a decertified group drains: when it is told to, or when nobody has told it to serve on
          for `patience_s`
    """

    def __init__(self, step_kinds: Collection[str], standing: Standing, patience_s: float) -> None:
        assert standing in (Standing.CERTIFIED, Standing.UNCERTIFIED)
        self._step_kinds = frozenset(step_kinds)
        self._patience_s = patience_s
        self._held_at_s = 0.0
        self._recorded: Counter[tuple[int, str]] = Counter()
        self._counted: Counter[tuple[int, str]] = Counter()
        self.standing: Standing = standing
        self.draining = False
        """True once it has been told, or has decided, to drain."""
        self.violations: list[StepViolation] = []
        """The first VIOLATIONS_KEPT_MAX."""

    @property
    def takes_work(self) -> bool:
        """G2."""
        return self.standing is not Standing.DECERTIFIED

    @property
    def violating_steps(self) -> int:
        """All of them: of each kind and rank those recorded or those counted, whichever is more."""
        keys = self._recorded.keys() | self._counted.keys()
        return sum(max(self._recorded[key], self._counted[key]) for key in keys)

    def on_violation(self, violation: StepViolation, now_s: float) -> Action | None:
        """A rank has recorded a step outside the mode."""
        key = (violation.rank, violation.kind)
        self._recorded[key] += 1
        if self._recorded[key] <= self._counted[key]:
            self._replace(violation)
            return None
        return self._note(violation, now_s)

    def on_counts(self, rank: int, steps_by_kind: Mapping[str, int], now_s: float) -> Action | None:
        """A rank's own counts, which hold its violations too: none is missed, none counts twice."""
        action = None
        for kind, count in steps_by_kind.items():
            key = (rank, kind)
            if kind in self._step_kinds or count <= self._counted[key]:
                continue
            self._counted[key] = count
            if count > self._recorded[key]:
                step = sum(steps_by_kind.values())
                unseen = StepViolation(rank=rank, step=step, kind=kind, tokens=0)
                action = self._note(unseen, now_s) or action
        return action

    def _replace(self, violation: StepViolation) -> None:
        """The record of a step that had only been counted so far."""
        for index, known in enumerate(self.violations):
            if (known.rank, known.kind) == (violation.rank, violation.kind) and not known.tokens:
                self.violations[index] = violation
                return

    def _note(self, violation: StepViolation, now_s: float) -> Action | None:
        if len(self.violations) < VIOLATIONS_KEPT_MAX:
            self.violations.append(violation)
        if self.standing in (Standing.DECERTIFIED, Standing.DEGRADED):
            return None
        self.standing, self._held_at_s = Standing.DECERTIFIED, now_s
        return Action.HOLD

    def on_told_to_drain(self) -> Action | None:
        """Somebody who sees the pool lets this group go. Others may drain it for their reasons."""
        if self.standing is not Standing.DECERTIFIED or self.draining:
            return None
        self.draining = True
        return Action.DRAIN

    def on_told_to_serve_on(self) -> Action | None:
        """Somebody who sees the pool cannot spare this group. A drain is not undone."""
        if self.standing is not Standing.DECERTIFIED or self.draining:
            return None
        self.standing = Standing.DEGRADED
        return Action.SERVE_ON

    def tick(self, now_s: float) -> Action | None:
        """Time has passed."""
        if now_s - self._held_at_s >= self._patience_s:
            return self.on_told_to_drain()
        return None


def decertified_max(groups: int, share_max: float) -> int:
    """How many groups of a pool may be out at once for a step outside their mode.

    Of several groups always one; of a group alone none, unless the share is 1.
    """
    most = math.floor(groups * share_max)
    return max(most, 1) if groups > 1 and share_max > 0 else most


@dataclass(slots=True)
class _Group:
    """One group as a router sees it."""

    epoch: int
    standing: Standing
    is_out: bool = False
    """It was told to drain, and has not come back in a later epoch."""
    is_told: bool = False
    """It was told, in this epoch."""
    left_at_s: float | None = None
    """When it left the pool, if it has not been seen since."""

    def is_followed_by(self, epoch: int) -> bool:
        """True if a group of this name and epoch is another one, or this one's next life."""
        # Where it has left, another may be now, whose epochs are its own.
        return epoch > self.epoch or (self.left_at_s is not None and epoch < self.epoch)


class PoolGuard:
    """What becomes of the decertified groups of one pool, as one router sees it.

    Invariants:
      P1  at most `decertified_max` groups are out at once
      P2  each decertified group is told once an epoch: to drain, or to serve on
      P3  of the groups that have left the pool those are known that are out, for PLACE_KEPT_S
    """

    def __init__(self, share_max: float) -> None:
        self._share_max = share_max
        self._groups: dict[str, _Group] = {}

    @property
    def out(self) -> int:
        """Groups that were told to drain and have not come back."""
        return sum(group.is_out for group in self._groups.values())

    @property
    def out_max(self) -> int:
        """How many may be."""
        return decertified_max(len(self._groups), self._share_max)

    def observe(self, name: str, epoch: int, standing: Standing, now_s: float) -> Action | None:
        """A group has said how it stands; what it is to be told, if anything now."""
        self._expire(now_s)
        group = self._groups.get(name)
        if group is None or group.is_followed_by(epoch):
            group = self._groups[name] = _Group(epoch, standing)
        if epoch < group.epoch:
            return None
        group.standing, group.left_at_s = standing, None
        if standing is not Standing.DECERTIFIED:
            group.is_out = False  # Another router was first to tell it: it serves on.
            return None
        if group.is_told:
            return None
        group.is_told = True
        if self.out >= self.out_max:
            return Action.SERVE_ON
        group.is_out = True
        return Action.DRAIN

    def untold(self, name: str) -> None:
        """What the group was to be told did not reach it: the next observation decides anew."""
        group = self._groups.get(name)
        if group is not None:
            group.is_told = group.is_out = False

    def forget(self, name: str, now_s: float) -> None:
        """The group is no longer of this pool; if it is out, it may be back."""
        group = self._groups.get(name)
        if group is not None and group.is_out:
            group.left_at_s = now_s
        else:
            self._groups.pop(name, None)

    def _expire(self, now_s: float) -> None:
        """P3."""
        for name, group in list(self._groups.items()):
            if group.left_at_s is not None and now_s - group.left_at_s >= PLACE_KEPT_S:
                del self._groups[name]

    def check(self) -> None:
        """Assert the invariants; only for a pool that has not shrunk."""
        assert self.out <= self.out_max, "P1"
