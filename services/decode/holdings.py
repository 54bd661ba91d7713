"""What accepted attempts hold outside of their session: engine, seat and handoff.

A handoff that we accepted ends once: confirmed by the fence, or released on every other way
out, and then never while it may still be read. An attempt that is aborted before the engine
was heard waits for the engine's word that its pull has ended (`StepOutputs.pulls_ended`), and
its seat waits with it, since the transfer still writes into its blocks.
"""

import asyncio
from collections.abc import Callable

from services.decode.attempt import Attempt, Custody
from services.decode.config import DecodeConfig
from services.decode.peers import Peers, failure_of_a_call
from services.decode.releases import Releases
from services.decode.room import Room
from splitwave.core.errors import Reason, ServingError
from splitwave.engine.port import Engine, EngineRequest, Pull
from splitwave.runtime.outbox import Outbox

_EXPIRED = frozenset({Reason.HANDOFF_EXPIRED, Reason.EPOCH_MISMATCH})
"""Answers of the fence after which there is nothing left to release."""


class Holdings:
    """Engine requests, seats and handoffs of one worker's attempts.

    Invariants, asserted by `check`:
      A1  an attempt that the engine works on, or whose pull may still run, holds a seat
      A2  it is in one of the two states, never in both
    """

    def __init__(
        self,
        engine: Engine,
        peers: Peers,
        room: Room,
        config: DecodeConfig,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._room = room
        self._now_s = clock
        self._abort_wait_s = config.abort_wait_s
        self.outbox = Outbox()
        self.releases = Releases(peers)
        self.engaged: dict[str, Attempt] = {}
        """By engine id: those that the engine works on."""
        self._leaving: dict[str, tuple[Attempt, float]] = {}
        """Aborted before they were heard, and when the wait for the engine's word ends."""
        self._confirming: set[Attempt] = set()

    @property
    def letting_go(self) -> int:
        """Handoffs that are being let go of, for attempts that are over."""
        confirming = sum(attempt.over for attempt in self._confirming)
        return len(self._leaving) + confirming + self.releases.pending

    def engage(self, attempt: Attempt, rank: int) -> None:
        """Have the engine pull and decode."""
        submit = attempt.submit
        request = EngineRequest(
            engine_request_id=attempt.engine_id,
            rank=rank,
            token_ids=submit.token_ids,
            sampling=submit.sampling,
            pull=Pull(
                handoff_id=submit.handoff.handoff_id,
                remote_tokens=submit.handoff.prompt_tokens,
                connector_params=submit.handoff.connector_params,
            ),
            priority=submit.priority,
            trace_headers={"traceparent": submit.traceparent} if submit.traceparent else None,
        )
        self.engaged[attempt.engine_id] = attempt
        self.outbox.put(self._engine.submit, request)

    def ended(self, attempt: Attempt) -> None:
        """The engine has ended it, well or not: the seat is free, whatever the fence will say."""
        del self.engaged[attempt.engine_id]
        self._room.free(attempt.engine_id)

    def leave(self, attempt: Attempt) -> None:
        """Take it from the engine if it is there, and let go of all that it holds."""
        aborted = self.engaged.pop(attempt.engine_id, None) is not None
        if aborted:
            self.outbox.put(self._engine.abort, attempt.engine_id)
            if not attempt.heard:
                until_s = self._now_s() + self._abort_wait_s
                self._leaving[attempt.engine_id] = (attempt, until_s)
                return
        self._room.free(attempt.engine_id, aborted=aborted)
        self.release(attempt)

    def pull_ended(self, engine_id: str) -> None:
        """Nothing of an aborted attempt's handoff is read any more. Unknown ids are ignored."""
        leaving = self._leaving.pop(engine_id, None)
        if leaving is not None:
            self._room.free(engine_id)
            self.release(leaving[0])

    def release(self, attempt: Attempt) -> None:
        """Release the handoff, if it is still ours to release."""
        if attempt.custody is Custody.OURS:
            attempt.custody = Custody.DONE
            self._release_now(attempt)

    async def confirm(self, attempt: Attempt) -> ServingError | None:
        """Raise the fence: None if nothing that was read had been reused, else why not."""
        assert attempt.custody is Custody.OURS
        attempt.custody = Custody.CONFIRMING
        self._confirming.add(attempt)
        error: ServingError | None = None
        try:
            await self._peers.confirm(attempt.submit.handoff, attempt.submit.traceparent)
        except (Exception, asyncio.CancelledError) as failure:  # noqa: BLE001  # must end the fence
            error = failure_of_a_call(failure)
        finally:
            attempt.custody = Custody.DONE
            self._confirming.discard(attempt)
        if error is not None and error.reason not in _EXPIRED:
            # Whether the lease lives is not known: make it end.
            self._release_now(attempt)
        return error

    def _release_now(self, attempt: Attempt) -> None:
        self.releases.start(attempt.submit.handoff, attempt.submit.traceparent)

    def sweep(self) -> None:
        """Stop waiting for an engine that does not say that a pull has ended."""
        now_s = self._now_s()
        for engine_id, (_, until_s) in list(self._leaving.items()):
            if until_s <= now_s:
                self.pull_ended(engine_id)

    def engine_is_gone(self) -> None:
        """Nothing is read any more."""
        for attempt in self.engaged.values():
            attempt.heard = True
        for engine_id in list(self._leaving):
            self.pull_ended(engine_id)

    def check(self) -> None:
        """Assert the invariants."""
        seated = self._room.table.is_seated
        assert all(seated(x) for x in self.engaged), "A1"
        assert all(seated(x) for x in self._leaving), "A1"
        assert not self.engaged.keys() & self._leaving.keys(), "A2"
