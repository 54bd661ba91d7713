"""Guards NIXL where it has no progress thread of its own, and polls it while a step computes.

Without that thread a pull advances only when the engine that is read polls, which it does between
its steps. On a CPU one prefill step can take a minute, and every stream whose KV is here would
stand still for as long. A poll costs some tenths of a millisecond, twenty times a second at most.
"""

import threading
import time
from collections.abc import Callable
from typing import Any  # NIXL's agent is untyped

Notifications = dict[str, list[bytes]]
"""By the name of the agent that sent them."""


CLOSE_WAIT_S = 1.0
"""How long the end of the polling is waited for."""


class SharedAgent:
    """A NIXL agent for the engine's thread, for that of its handshakes, and for one that polls.

    An agent without a progress thread may be used by one thread at a time. What the poller
    receives is kept for the engine, so that nothing is told twice or lost.
    """

    def __init__(self, agent: Any, poll_s: float | None) -> None:  # NIXL's
        """Poll every `poll_s` while the engine does not; None: nobody reads here, never poll."""
        self._agent = agent
        self._lock = threading.RLock()
        self._kept: Notifications = {}
        self._polled_s = time.monotonic()
        self._closing = threading.Event()
        self.polls = 0
        """Polls that the engine did not make itself."""
        self.failure: BaseException | None = None
        """What ended the polling, to be raised in the engine's own next poll."""
        self._thread: threading.Thread | None = None
        if poll_s is not None:
            self._thread = threading.Thread(
                target=self._run, args=(poll_s,), name="nixl: poll", daemon=True
            )
            self._thread.start()

    def __getattr__(self, name: str) -> Any:  # whatever the agent has
        """The agent's own attribute; a method holds the lock while it runs."""
        found = getattr(self._agent, name)
        return self._locked(found) if callable(found) else found

    def _locked(self, method: Callable[..., Any]) -> Callable[..., Any]:  # the agent's
        def call(*args: Any, **kwargs: Any) -> Any:  # the agent's
            with self._lock:
                return method(*args, **kwargs)

        return call

    def get_new_notifs(self) -> Notifications:
        """Notifications since the last call, those that came to the poller included."""
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self._receive()
            kept, self._kept = self._kept, {}
            return kept

    def close(self) -> bool:
        """Stop polling: the agent is about to go. False if a poll hangs, and the agent with it."""
        self._closing.set()
        if self._thread is None:
            return True
        self._thread.join(CLOSE_WAIT_S)
        return not self._thread.is_alive()

    def _receive(self) -> None:
        for sender, messages in self._agent.get_new_notifs().items():
            self._kept.setdefault(sender, []).extend(messages)
        self._polled_s = time.monotonic()

    def _run(self, poll_s: float) -> None:
        while not self._closing.wait(poll_s):
            with self._lock:
                if time.monotonic() - self._polled_s < poll_s:
                    continue  # The engine steps, and polls itself.
                try:
                    self._receive()
                except Exception as error:  # noqa: BLE001  # NIXL's are many; the engine raises it
                    self.failure = error
                    return
                self.polls += 1
