"""Who uses NIXL's agent in a worker: one thread at a time, where it has no thread of its own."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from splitwave.engine.vllm.connector.transfer import _WRAPPED_STATE, HandoffWorker

WAIT_S = 10.0


class Agent:
    """Sees whether two threads use it at once; `polled` once it was asked for notifications."""

    def __init__(self) -> None:
        self.overlaps = 0
        self.polled = threading.Event()
        self._busy = False

    def _use(self) -> None:
        self.overlaps += self._busy
        self._busy = True
        time.sleep(0.002)
        self._busy = False

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self._use()
        self.polled.set()
        return {}

    def add_remote_agent(self, metadata: bytes) -> str:
        self._use()
        return "p0"

    def check_xfer_state(self, handle: int) -> str:
        self._use()
        return "DONE"


def worker(monkeypatch: pytest.MonkeyPatch, agent: Agent, role: str) -> HandoffWorker:
    """The worker half of a connector around an agent, without vLLM's own set-up."""

    def begin(self: HandoffWorker, *_: object) -> None:
        for name in _WRAPPED_STATE:
            setattr(self, name, {})
        self.nixl_wrapper = agent

    monkeypatch.setattr(NixlPullConnectorWorker, "__init__", begin)
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_role=role))
    return HandoffWorker(config, "engine", None)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_a_handshake_and_a_step_do_not_use_the_agent_at_once(
    monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setenv("SPLITWAVE_NIXL_PROGRESS_THREAD", "0")
    agent = Agent()
    half = worker(monkeypatch, agent, role)

    def each(call: Callable[[], object]) -> None:
        for _ in range(20):
            call()

    with ThreadPoolExecutor(1) as executor:
        shaking = executor.submit(each, lambda: half.nixl_wrapper.add_remote_agent(b""))
        each(lambda: half.nixl_wrapper.check_xfer_state(1))
        shaking.result()

    assert agent.overlaps == 0
    half.nixl_wrapper.close()


@pytest.mark.parametrize(
    ("role", "faults", "polls"),
    [
        ("kv_producer", "", True),
        ("kv_producer", "no_step_polls", False),
        ("kv_consumer", "", False),
    ],
)
def test_only_who_is_read_polls_while_a_step_computes(
    monkeypatch: pytest.MonkeyPatch, role: str, faults: str, polls: bool
) -> None:
    monkeypatch.setenv("SPLITWAVE_NIXL_PROGRESS_THREAD", "0")
    monkeypatch.setenv("SPLITWAVE_FAULTS", faults)
    agent = Agent()
    half = worker(monkeypatch, agent, role)

    assert agent.polled.wait(WAIT_S if polls else 0.3) is polls
    half.nixl_wrapper.close()


def test_an_agent_with_a_thread_of_its_own_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPLITWAVE_NIXL_PROGRESS_THREAD", "1")
    agent = Agent()

    assert worker(monkeypatch, agent, "kv_consumer").nixl_wrapper is agent


@pytest.mark.parametrize("hangs", [False, True])
def test_what_a_poll_that_hangs_holds_goes_with_the_process(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setenv("SPLITWAVE_NIXL_PROGRESS_THREAD", "0")
    freed: list[str] = []
    monkeypatch.setattr(NixlPullConnectorWorker, "_finish_shutdown", lambda _: freed.append("all"))
    agent, go_on = Agent(), threading.Event()
    half = worker(monkeypatch, agent, "kv_producer")
    if hangs:
        monkeypatch.setattr(agent, "get_new_notifs", lambda: go_on.wait(WAIT_S) and {})
        time.sleep(0.2)

    began_s = time.monotonic()
    half._finish_shutdown()  # noqa: SLF001  # called by vLLM's shutdown
    took_s = time.monotonic() - began_s
    go_on.set()

    assert freed == ([] if hangs else ["all"])
    assert took_s < 0.5 * WAIT_S
