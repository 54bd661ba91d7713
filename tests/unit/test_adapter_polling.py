"""The thread that polls NIXL while a step computes, with an agent that the test plays."""

import threading
import time
from collections.abc import Iterator

import pytest

from splitwave.engine.vllm.polling import Notifications, SharedAgent

POLL_S = 0.01
WAIT_S = 10.0


class Agent:
    """Hands out what has come, and sees whether two threads use it at once."""

    def __init__(self) -> None:
        self.came: list[Notifications] = []
        self.polled = threading.Event()
        self.overlaps = 0
        self.failure: Exception | None = None
        self._busy = False

    def _use(self) -> None:
        self.overlaps += self._busy
        self._busy = True
        time.sleep(0.002)
        self._busy = False

    def get_new_notifs(self) -> Notifications:
        self._use()
        if self.failure is not None:
            raise self.failure
        self.polled.set()
        return self.came.pop(0) if self.came else {}

    def transfer(self, handle: int, *, fast: bool) -> tuple[int, bool]:
        self._use()
        return handle, fast


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def shared(agent: Agent) -> Iterator[SharedAgent]:
    shared = SharedAgent(agent, POLL_S)
    yield shared
    shared.close()


def test_it_polls_while_the_engine_does_not(agent: Agent, shared: SharedAgent) -> None:
    for _ in range(3):
        agent.polled.clear()
        assert agent.polled.wait(WAIT_S)


def test_what_came_meanwhile_is_told_once_in_order_and_with_what_comes_now(
    agent: Agent, shared: SharedAgent
) -> None:
    agent.came = [{"d0": [b"a"]}, {"d1": [b"x"], "d0": [b"b"]}]
    while agent.came:
        time.sleep(POLL_S)
    agent.came = [{"d0": [b"c"]}]
    with shared._lock:  # noqa: SLF001  # the poller must not take it first
        told = shared.get_new_notifs()

    assert told == {"d0": [b"a", b"b", b"c"], "d1": [b"x"]}
    assert shared.get_new_notifs() == {}


def test_an_engine_that_polls_itself_is_left_alone(agent: Agent, shared: SharedAgent) -> None:
    until_s = time.monotonic() + 30 * POLL_S
    polls = shared.polls
    while time.monotonic() < until_s:
        shared.get_new_notifs()

    assert shared.polls - polls <= 1


def test_one_thread_uses_the_agent_at_a_time(agent: Agent, shared: SharedAgent) -> None:
    until_s = time.monotonic() + 30 * POLL_S
    while time.monotonic() < until_s:
        assert shared.transfer(7, fast=True) == (7, True)

    assert shared.polls > 0, "nobody else used it"
    assert agent.overlaps == 0


def test_what_the_poller_fails_with_is_the_engines(agent: Agent, shared: SharedAgent) -> None:
    agent.failure = RuntimeError("the backend is gone")
    while shared.failure is None:
        time.sleep(POLL_S)
    agent.failure = None  # The engine's own poll would go well.

    with pytest.raises(RuntimeError, match="the backend is gone"):
        shared.get_new_notifs()


def test_it_stops(agent: Agent) -> None:
    shared = SharedAgent(agent, POLL_S)
    shared.close()
    agent.polled.clear()

    assert not agent.polled.wait(10 * POLL_S)
