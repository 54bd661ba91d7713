"""Frames: all new tokens of one lock-step for one router, in one message."""

import asyncio
from collections.abc import Sequence

from services.decode.session import Session
from splitwave.core.generation import TokenLogprob
from splitwave.core.session import Ended, Frame, Pulled


class LockStep:
    """Knows when the outputs of a lock-step are all there. No clock, no await.

    Ranks that gave tokens in the last step and still run something are awaited.
    """

    def __init__(self) -> None:
        self._stepping: set[int] = set()
        self._arrived: set[int] = set()

    def begins_anew(self, rank: int) -> bool:
        """True if this rank has been in since the last flush: a new lock-step has begun."""
        return rank in self._arrived

    def arrived(self, rank: int, running: int | None) -> bool:
        """Note a rank's outputs; True if nobody else is awaited. `running`: what it runs still."""
        self._arrived.add(rank)
        if running == 0:
            self._stepping.discard(rank)
        else:
            self._stepping.add(rank)
        return self._stepping <= self._arrived

    def flushed(self) -> None:
        """The frames are out. Ranks that did not come are not awaited again until they do."""
        self._stepping &= self._arrived
        self._arrived.clear()


class Frames:
    """Open frames of all sessions, and the timer that closes them when a rank is late.

    Invariant: a slot is in a frame at most once, and no Accepted overtakes a frame.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._open: list[Session] = []
        self._lock_step = LockStep()
        self._timer: asyncio.TimerHandle | None = None
        self.sent = 0
        self.tokens_sent = 0

    def begin(self, rank: int) -> None:
        """A rank's outputs follow; what lies open is of an earlier lock-step if it was in that."""
        if self._lock_step.begins_anew(rank):
            self.flush()

    def add(
        self,
        session: Session,
        row: tuple[int, int],
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
    ) -> None:
        """Add the tokens of one attempt; `row` is its slot and the offset of the first."""
        frame = session.frame
        if frame is None:
            frame = self._frame_of(session)
        frame.slots.append(row[0])
        frame.offsets.append(row[1])
        frame.token_counts.append(len(token_ids))
        frame.token_ids += token_ids
        if logprobs:
            frame.logprobs += logprobs

    def end(self, session: Session, ended: Ended) -> None:
        """Add an end, behind the attempt's tokens."""
        self._frame_of(session).ended.append(ended)

    def pulled(self, session: Session, pulled: Pulled) -> None:
        """Add what an attempt's handoff has cost, before its first tokens are out."""
        self._frame_of(session).pulled.append(pulled)

    def done(self, rank: int, running: int | None) -> None:
        """A rank's outputs are all in: send the frames if they were the last, or soon."""
        if self._lock_step.arrived(rank, running):
            self.flush()
        else:
            self.send_soon()

    def send_soon(self) -> None:
        """Send what lies open after the wait, unless a lock-step ends sooner."""
        if self._open and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._wait_s, self.flush)

    def flush(self) -> None:
        """Send every open frame."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._lock_step.flushed()
        sessions, self._open = self._open, []
        for session in sessions:
            self._send(session)

    def flush_session(self, session: Session) -> None:
        """Send one session's frame now, so that what is sent next comes behind it."""
        if session.frame is not None:
            self._open.remove(session)
            self._send(session)

    def drop(self, session: Session) -> None:
        """A session has ended for good."""
        if session.frame is not None:
            self._open.remove(session)
            session.frame = None

    def _frame_of(self, session: Session) -> Frame:
        frame = session.frame
        if frame is None:
            session.frames_sent += 1
            frame = session.frame = Frame(step=session.frames_sent)
            self._open.append(session)
        return frame

    def _send(self, session: Session) -> None:
        frame, session.frame = session.frame, None
        assert frame is not None
        self.sent += 1
        self.tokens_sent += len(frame.token_ids)
        session.send(frame)
