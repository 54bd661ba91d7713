"""The life of an attempt: Accepted, pull, first token, fence, tokens, end. Read this file first.

    submit   check, seat, Accepted: from here on the handoff is this worker's
    engine   pulls the KV and steps; its first output says that the pull is over
    fence    prefill confirms that the lease was live until now: only then is a token shown
    tokens   into the frame of their lock-step
    end      Ended, or silence after a cancel; what it held is let go (`holdings.py`)

Nothing in here awaits but the fence, so no cancellation can leave a thing half-done.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from services.decode.attempt import Attempt, Custody
from services.decode.frames import Frames
from services.decode.holdings import Holdings
from services.decode.room import Room
from services.decode.session import Session
from services.decode.spans import DecodeSpans
from services.decode.submission import check_submission
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import TokenLogprob
from splitwave.core.session import Accepted, Ended, Pulled, Refused, Submit
from splitwave.engine.port import GroupDescription, RequestOutput, StepOutputs
from splitwave.runtime.metrics import Histogram
from splitwave.runtime.tracing import OFF, trace_id_of

log = logging.getLogger(__name__)

CONFIRMED = "confirmed"
"""What is counted of a handoff whose lease was live until its data had arrived."""


class Decoding:
    """All attempts of one worker. Live ones are those in their sessions' `attempts`."""

    def __init__(
        self,
        group: GroupDescription,
        holdings: Holdings,
        room: Room,
        frames: Frames,
        clock: Callable[[], float],
    ) -> None:
        self._group = group
        self._holdings = holdings
        self._room = room
        self.frames = frames
        self._now_s = clock
        self.draining = False
        self.is_fenced = True
        """False only under a fault that tests ask for: tokens are shown without confirmation."""
        self.ends: dict[str, int] = {}
        """Attempts by how they ended: a finish reason, or the reason of a failure or refusal."""
        self.fences: Counter[str] = Counter()
        """Handoffs by what prefill said of them: confirmed, or a reason."""
        self.handoff_s = Histogram()
        self.spans = DecodeSpans(OFF, "", group)
        """Set by the worker, if it traces."""
        self._numbers = itertools.count(1)
        self._fences: set[asyncio.Task[None]] = set()

    def submit(self, session: Session, submit: Submit) -> None:
        """Answer a submission, once and now: Accepted or Refused. Its grant is spent either way."""
        if session.knows(submit.attempt_id):
            session.repeat(submit.attempt_id)
            return
        engine_id = f"{submit.attempt_id}#{next(self._numbers)}"
        seat = self._room.spend(session, submit.grant_id, engine_id)
        try:
            if self.draining or self._room.held:
                raise ServingError(Reason.WORKER_DRAINING, "this worker takes no new work")
            seat = check_submission(submit, seat, self._group)
        except ServingError as error:
            self._room.free(engine_id)
            self.refuse(session, submit.attempt_id, error)
            return
        attempt = self._accept(session, submit, engine_id)
        attempt.rank = seat.rank
        self.frames.flush_session(session)  # Its slot may stand there for an earlier attempt.
        session.answer(Accepted(submit.attempt_id, attempt.slot, seat.rank))
        self._holdings.engage(attempt, seat.rank)

    def refuse(self, session: Session, attempt_id: str, error: ServingError) -> None:
        """Leave a submission and its handoff with the router."""
        self._count(error.reason.value)
        session.answer(Refused(attempt_id, error))

    def _accept(self, session: Session, submit: Submit, engine_id: str) -> Attempt:
        now_s = self._now_s()
        attempt = session.attempts[submit.attempt_id] = Attempt(
            submit=submit,
            session=session,
            engine_id=engine_id,
            slot=session.take_slot(),
            accepted_s=now_s,
            offset=submit.offset,
            progress_s=now_s,
        )
        return attempt

    def on_step(self, step: StepOutputs) -> None:
        """Take in one step of one rank. The loop is the hot path: a few dict look-ups a token."""
        now_s, frames, engaged = self._now_s(), self.frames, self._holdings.engaged
        frames.begin(step.rank)
        for output in step.outputs:
            attempt = engaged.get(output.engine_request_id)
            if attempt is None:  # It was aborted; if its pull was awaited, that is over.
                self._holdings.pull_ended(output.engine_request_id)
            elif attempt.shown and output.finish is None and output.failure is None:
                attempt.progress_s = now_s
                self._show(attempt, output.token_ids, output.logprobs)
            else:
                self._on_turn(attempt, output, now_s)
        for engine_id in step.pulls_ended:
            self._holdings.pull_ended(engine_id)
        frames.done(step.rank, step.running)

    def _on_turn(self, attempt: Attempt, output: RequestOutput, now_s: float) -> None:
        """An output that is the attempt's first or last, or comes before the fence's answer."""
        attempt.progress_s = now_s
        first, attempt.heard = not attempt.heard, True
        if output.failure is not None:
            self._holdings.ended(attempt)
            self._fail(attempt, ServingError(output.failure, output.failure_message))
            return
        if first and not self._on_first(attempt, output, now_s):
            return
        if output.finish is not None:
            self._holdings.ended(attempt)
            attempt.last = output
        if attempt.shown:
            self._show(attempt, output.token_ids, output.logprobs)
            self._end_if_last(attempt)
        else:
            attempt.early_tokens += output.token_ids
            attempt.early_logprobs += output.logprobs or ()

    def _on_first(self, attempt: Attempt, output: RequestOutput, now_s: float) -> bool:
        """The data has arrived: raise the fence. False if none has."""
        attempt.handoff_bytes = output.pulled.bytes_moved if output.pulled is not None else 0
        attempt.handoff_s = now_s - attempt.accepted_s
        self.handoff_s.observe(attempt.handoff_s)
        self.spans.first_step(attempt, now_s)
        if not attempt.handoff_bytes:
            self._fail(attempt, ServingError(Reason.HANDOFF_FAILED, "the pull moved no bytes"))
            return False
        if self.is_fenced:
            fence = asyncio.create_task(self._fence(attempt), name="decode: fence")
            self._fences.add(fence)
            fence.add_done_callback(self._fences.discard)
        else:
            attempt.custody, attempt.shown, attempt.shown_s = Custody.DONE, True, now_s
        return True

    async def _fence(self, attempt: Attempt) -> None:
        """Show nothing before prefill has said that what was read is good."""
        error = await self._holdings.confirm(attempt)
        self.fences[CONFIRMED if error is None else error.reason.value] += 1
        if attempt.over:
            return
        if error is None:
            attempt.shown, attempt.shown_s = True, self._now_s()
            cost = Pulled(attempt.slot, attempt.handoff_bytes, attempt.handoff_s)
            self.frames.pulled(attempt.session, cost)
            self._show(attempt, attempt.early_tokens, attempt.early_logprobs)
            self._end_if_last(attempt)
        else:
            log.warning("fence: %r", error, extra=_about(attempt.submit))
            message = f"the handoff could not be confirmed: {error.message}"
            self._fail(attempt, ServingError(Reason.HANDOFF_EXPIRED, message))
        self.frames.flush_session(attempt.session)  # The next step may bring the slot again.

    def _show(
        self, attempt: Attempt, token_ids: list[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        if token_ids:
            row = (attempt.slot, attempt.offset)
            self.frames.add(attempt.session, row, token_ids, logprobs)
            attempt.offset += len(token_ids)

    def cancel(self, session: Session, attempt_id: str) -> None:
        """The router wants no more of it. Unknown ids are ignored."""
        attempt = session.attempts.get(attempt_id)
        if attempt is not None:
            self._count(Reason.CANCELLED.value)
            self._holdings.leave(attempt)
            self._forget(attempt, Reason.CANCELLED.value)

    def _fail(self, attempt: Attempt, error: ServingError) -> None:
        """End an attempt badly; nothing of it stays here."""
        self._holdings.leave(attempt)
        self._count(error.reason.value)
        self._end(attempt, Ended(slot=attempt.slot, attempt_id=_id(attempt), error=error))

    def _end_if_last(self, attempt: Attempt) -> None:
        """End an attempt well, if the engine has ended it and all its tokens are shown."""
        last = attempt.last
        if last is None:
            return
        assert last.finish is not None
        self._count(last.finish.value)
        ended = Ended(
            slot=attempt.slot,
            attempt_id=_id(attempt),
            finish_reason=last.finish,
            stop_token_id=last.stop_token_id,
        )
        self._end(attempt, ended)

    def _end(self, attempt: Attempt, ended: Ended) -> None:
        ended = replace(
            ended,
            handoff_bytes=attempt.handoff_bytes,
            handoff_s=attempt.handoff_s,
            waves=self.spans.waves_of(attempt),
        )
        attempt.session.remember_end(ended)
        self.frames.end(attempt.session, ended)
        self.frames.send_soon()
        self._forget(attempt, (ended.error.reason if ended.error else ended.finish_reason) or "")

    def _forget(self, attempt: Attempt, end: str) -> None:
        attempt.over = True
        self.spans.ended(attempt, end, self._now_s())
        del attempt.session.attempts[_id(attempt)]
        attempt.session.free_slot(attempt.slot)

    def end_session(self, session: Session) -> None:
        """A session has gone for good: cancel all that it owned."""
        for attempt_id in list(session.attempts):
            self.cancel(session, attempt_id)
        self.frames.drop(session)

    def sweep(self, sessions: Iterable[Session]) -> None:
        """End what is out of time."""
        now_s = self._now_s()
        for session in sessions:
            late = [(x, _late(x, now_s)) for x in session.attempts.values()]
            for attempt, error in late:
                if error is not None:
                    self._fail(attempt, error)

    async def close(self, timeout_s: float) -> None:
        """Let fences finish, within reason."""
        fences = list(self._fences)
        if fences:
            await asyncio.wait(fences, timeout=timeout_s)
        for fence in fences:
            fence.cancel()
        await asyncio.gather(*fences, return_exceptions=True)

    def _count(self, how: str) -> None:
        self.ends[how] = self.ends.get(how, 0) + 1


def _id(attempt: Attempt) -> str:
    return attempt.submit.attempt_id


def _about(submit: Submit) -> dict[str, str]:
    """What a log line says of the request that it is about."""
    return {"request_id": submit.request_id, "trace_id": trace_id_of(submit.traceparent)}


def _late(attempt: Attempt, now_s: float) -> ServingError | None:
    """Why an attempt is out of time, if it is."""
    if now_s >= attempt.deadline_s:
        message = f"the request's time was over at offset {attempt.offset}"
        return ServingError(Reason.DEADLINE_EXCEEDED, message)
    gap_s = now_s - attempt.progress_s
    if gap_s > attempt.submit.stall_max_s:
        return ServingError(Reason.STALLED, f"no token came for {gap_s:.1f} s")
    return None
