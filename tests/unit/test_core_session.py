"""Two links over a connection that breaks: nothing is lost, nothing comes twice."""

from collections import deque

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from splitwave.core.session import Link, NumberGap, Unread, Welcome

KEPT_MAX = 6
A, B = 0, 1


class LinkMachine(RuleBasedStateMachine):
    """Two ends, each with a link, and what is on the way between them.

    `wire[x]` is what travels to end x, in order: (number, message), or (0, number) for
    an acknowledgement. A break cuts each direction somewhere; what came through before the
    cut may still be read after the reattach, as it is with buffers.
    """

    kind: type[Link[int]] = Link

    @initialize()
    def start(self) -> None:
        self.links = [self.kind(kept_max=KEPT_MAX), self.kind(kept_max=KEPT_MAX)]
        self.wire: list[deque[tuple[int, int]]] = [deque(), deque()]
        self.late: list[deque[tuple[int, int]]] = [deque(), deque()]
        self.sent: list[list[int]] = [[], []]
        self.got: list[list[int]] = [[], []]
        self.connected = True

    @rule(end=st.sampled_from([A, B]))
    def send(self, end: int) -> None:
        link = self.links[end]
        message = len(self.sent[end]) * 10 + end
        if link.sent - link.acked >= KEPT_MAX:
            with pytest.raises(Unread):
                link.send(message)
            return
        number = link.send(message)
        self.sent[end].append(message)
        assert number == len(self.sent[end])
        if self.connected:
            self.wire[1 - end].append((number, message))

    @precondition(lambda self: self.connected)
    @rule(end=st.sampled_from([A, B]))
    def acknowledge(self, end: int) -> None:
        self.wire[1 - end].append((0, self.links[end].received))

    @rule(end=st.sampled_from([A, B]), count=st.integers(1, 8))
    def deliver(self, end: int, count: int) -> None:
        for _ in range(count):
            source = self.wire[end] if self.connected else self.late[end]
            if source:
                self.read(end, *source.popleft())

    @rule(end=st.sampled_from([A, B]))
    def deliver_late(self, end: int) -> None:
        if self.late[end]:
            self.read(end, *self.late[end].popleft())

    def read(self, end: int, number: int, message: int) -> None:
        if number == 0:
            self.links[end].ack(message)
        elif self.links[end].receive(number):
            self.got[end].append(message)

    @precondition(lambda self: self.connected)
    @rule(cuts=st.tuples(st.integers(0, 4), st.integers(0, 4)))
    def connection_breaks(self, cuts: tuple[int, int]) -> None:
        for end in (A, B):
            self.late[end].extend(list(self.wire[end])[: cuts[end]])
            self.wire[end].clear()
        self.connected = False

    @precondition(lambda self: not self.connected)
    @rule()
    def reattach(self) -> None:
        """Each tells the other what it has received, which is what Hello and Welcome do."""
        received = [link.received for link in self.links]
        for end in (A, B):
            self.links[end].ack(received[1 - end])
            self.wire[1 - end].extend(self.links[end].replay())
        self.connected = True

    @invariant()
    def nothing_is_lost_or_repeated(self) -> None:
        for end in (A, B):
            self.links[end].check()
            assert self.got[1 - end] == self.sent[end][: len(self.got[1 - end])]

    def teardown(self) -> None:
        if not hasattr(self, "links"):
            return
        if not self.connected:
            self.reattach()
        for end in (A, B):
            self.deliver(end, len(self.wire[end]))
        assert self.got == [self.sent[B], self.sent[A]]


def check(kind: type[Link[int]], examples: int) -> None:
    machine = type("Machine", (LinkMachine,), {"kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=40, phases=[Phase.generate], database=None
        ),
    )


def test_what_was_sent_arrives_once_and_in_order_however_often_it_breaks() -> None:
    check(Link, examples=100)


class ForgetsWithoutAck(Link[int]):
    """K1: keeps one message less than is unacknowledged."""

    def send(self, message: int) -> int:
        number = super().send(message)
        if len(self._kept) > 3:
            self._kept.popleft()
        return number


class KeepsWithoutBound(Link[int]):
    """K2: a peer that does not read fills the memory."""

    def send(self, message: int) -> int:
        self._kept_max = len(self._kept) + 1
        return super().send(message)


class BelievesOldAcks(Link[int]):
    """An old acknowledgement takes the window back."""

    def ack(self, number: int) -> None:
        super().ack(number)
        self.acked = min(self.acked, number)


class ReplaysFromTheNext(Link[int]):
    """Replays all but the first that is unacknowledged."""

    def replay(self) -> list[tuple[int, int]]:
        return super().replay()[1:]


class TakesRepeats(Link[int]):
    """A replayed message counts as new."""

    def receive(self, number: int) -> bool:
        return super().receive(number) or True


class TakesGaps(Link[int]):
    """A lost message goes unnoticed."""

    def ack(self, number: int) -> None:
        super().ack(min(number + 1, self.sent))

    def receive(self, number: int) -> bool:
        new = number > self.received
        self.received = max(self.received, number)
        return new


@pytest.mark.parametrize(
    "mutant",
    [
        ForgetsWithoutAck,
        KeepsWithoutBound,
        BelievesOldAcks,
        ReplaysFromTheNext,
        TakesRepeats,
        TakesGaps,
    ],
)
def test_a_link_that_breaks_its_contract_is_caught(mutant: type[Link[int]]) -> None:
    with pytest.raises((AssertionError, NumberGap, IndexError, pytest.fail.Exception)):
        check(mutant, examples=200)


def test_a_skipped_number_is_a_broken_contract() -> None:
    link: Link[str] = Link(kept_max=4)

    assert link.receive(1)
    with pytest.raises(NumberGap, match="number 3 came after 1"):
        link.receive(3)


def test_an_acknowledgement_of_what_was_never_sent_is_a_broken_contract() -> None:
    link: Link[str] = Link(kept_max=4)
    link.send("a")

    with pytest.raises(NumberGap, match="2 was acknowledged, 1 is the last"):
        link.ack(2)


def test_a_reattach_after_the_peer_lost_its_memory_is_noticed_by_the_peer() -> None:
    """It asks for numbers that were acknowledged before: the replay cannot begin there."""
    link: Link[str] = Link(kept_max=4)
    for message in "abc":
        link.send(message)
    link.ack(2)
    link.ack(0)

    number, _ = link.replay()[0]

    with pytest.raises(NumberGap):
        Link[str](kept_max=4).receive(number)


@pytest.mark.parametrize(
    ("tokens", "ranks", "seats", "most"),
    [(1, 2, 3, 6), (16, 2, 3, 6), (65, 2, 3, 4), (9999, 2, 3, 2), (1, 0, 0, None), (1, 0, 3, None)],
)
def test_a_group_runs_as_many_completions_as_its_seats_and_blocks_hold(
    tokens: int, ranks: int, seats: int, most: int | None
) -> None:
    welcome = Welcome(
        worker_id="w", group_id="g", epoch=1, reattached=False, received_number=0, reattach_s=2.0,
        kv_layout="k", block_size_tokens=16, grant_blocks=4, model_len_max_tokens=160,
        blocks_per_rank=10, ranks=ranks, seats_per_rank=seats,
    )  # fmt: skip

    assert welcome.completions_max(tokens) == most
