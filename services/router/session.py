"""The router's end of one session with a decode worker: what was sent, what runs, what came.

Nothing here awaits but the two waits of an attempt: messages go into an outbox, and
the connection's loop feeds what arrives. So the whole of it runs in the simulator.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from services.router.decode_attempt import Attempt, broken
from services.router.generate import Finish, Sink
from services.router.grant_float import GrantFloat
from services.router.grants import LINGER_S
from services.router.held import Held
from services.router.later import Later
from services.router.tally import Tally
from splitwave.core.envelope import Envelope
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import TokenLogprob
from splitwave.core.session import (
    Accepted,
    Ack,
    Cancel,
    Ended,
    Frame,
    Granted,
    Grants,
    GroupLoad,
    Hello,
    Link,
    Pulled,
    Refused,
    ReturnGrants,
    RouterMessage,
    Submit,
    Welcome,
    WorkerMessage,
)

LINK_KEPT_MAX = 8192
"""Messages that the worker may leave unacknowledged before the session is given up."""
SUBMITS_KEPT_MAX = 6144
"""Beyond this many no submission is added, so that cancels still have room."""
ACK_EVERY = 64
"""Messages after which an acknowledgement is sent at once."""
ACK_DELAY_S = 0.1
"""Otherwise this long after the first unacknowledged one, or with the next write."""


class RoomEvents(Protocol):
    """Who hears of room in decode groups."""

    def granted(self, session: "Session", granted: Granted) -> None:
        """A grant came; if it answers an ask, that ask is over."""

    def refused(self, session: "Session", ask_id: str, error: ServingError) -> None:
        """An ask gets no grant from this worker."""

    def changed(self) -> None:
        """A session's float or load changed."""

    def session_changed(self) -> None:
        """A session came, broke or ended."""


class Session:
    """One session, from its first Hello to its end.

    Invariants:
      S1  an attempt is in `_unanswered` until its one answer, then in a slot until it ends
      S2  each offer of a handoff is moved, returned or lost exactly once
    """

    def __init__(self, session_id: str, events: RoomEvents, tally: Tally | None = None) -> None:
        """`tally` is that of all the router's sessions."""
        self.session_id = session_id
        self.tally = tally or Tally()
        self._frame_at_s = -1.0
        self.welcome: Welcome | None = None
        self.envelope: Envelope | None = None
        """What the group is certified for; None if that is not known, or not asked."""
        self.connected = False
        self.broke_at_s = 0.0
        """When the last connection broke, on the loop's clock."""
        self.over: ServingError | None = None
        self.load = GroupLoad(seats_free=0, blocks_free=0, asks_waiting=0, draining=False)
        self.float = GrantFloat()
        self.outbox: deque[tuple[int, RouterMessage | Ack]] = deque()
        self.outbox_filled = asyncio.Event()
        self._link: Link[RouterMessage] = Link(kept_max=LINK_KEPT_MAX)
        self._events = events
        self._unanswered: dict[str, Attempt] = {}
        self._slots: dict[int, Attempt] = {}
        self.running = 0
        """Attempts whose end is awaited."""
        self._heard_at_s = 0.0
        self._acked = 0
        self._ack = Later(self._send_ack)
        self._linger = Later(self.outbox_filled.set)

    @property
    def usable(self) -> bool:
        """True if new work may go here."""
        return (
            self.connected and self.over is None and self.welcome is not None
        ) and not self.load.draining

    @property
    def _kept(self) -> int:
        return self._link.sent - self._link.acked

    def silent_s(self, now_s: float) -> float:
        """How long the worker has said nothing while attempts run; 0 while none does."""
        return now_s - self._heard_at_s if self.running else 0.0

    # Out: everything below is decided by requests.

    def post(self, message: RouterMessage, linger_s: float = 0.0) -> None:
        """Number a message and put it into the outbox; dropped if the session is over.

        `linger_s`: how long it may lie there, so that it shares another's write.
        """
        if self.over is not None:
            return
        if self._kept >= LINK_KEPT_MAX:
            self.end(ServingError(Reason.WORKER_LOST, "the worker stopped acknowledging"))
            return
        self.outbox.append((self._link.send(message), message))
        if not linger_s:
            self.outbox_filled.set()
        else:
            self._linger.within(linger_s)

    def submit(self, submit: Submit, held: Held, sink: Sink) -> Attempt:
        """Send a submission; its answer and its tokens come through the attempt."""
        if self.over is not None:
            raise self.over
        if self._kept >= SUBMITS_KEPT_MAX:
            raise ServingError(Reason.OVERLOADED, "the decode worker reads too slowly")
        if not self.running:
            self._heard_at_s = asyncio.get_running_loop().time()
        self.post(submit)
        attempt = Attempt(self, submit, held, sink)
        held.offered()
        self._unanswered[attempt.attempt_id] = attempt
        self.running += 1
        return attempt

    def cancel(self, attempt: Attempt) -> None:
        """Stop an attempt unless it is over. An unanswered one still gets its answer."""
        if attempt.mute():
            self.post(Cancel((attempt.attempt_id,)))

    # The connection.

    def hello(self, router_id: str) -> Hello:
        """The first message of a connection."""
        known = (*self._unanswered, *(x.attempt_id for x in self._slots.values() if x.sink))
        if self.welcome is None:
            return Hello(router_id=router_id, session_id=self.session_id, takes_batches=True)
        return Hello(
            router_id=router_id,
            session_id=self.session_id,
            takes_batches=True,
            reattach=True,
            epoch=self.welcome.epoch,
            received_number=self._link.received,
            attempt_ids=known,
        )

    def attach(self, welcome: Welcome) -> None:
        """A connection begins: what the worker has not received is sent again."""
        self._link.ack(welcome.received_number)  # Raises for a number that was never sent.
        self.welcome = welcome
        self.outbox = deque(self._link.replay())
        self.outbox_filled.set()
        self._acked = self._link.received
        self._ack.cancel()  # Hello has told.
        for attempt_id, known in welcome.known:
            if not known:
                self._forgotten(attempt_id)
        self.connected = True
        self.tally.opened += not welcome.reattached
        self.tally.reattached += welcome.reattached
        self._events.session_changed()

    def detach(self) -> None:
        """The connection broke. Grants and attempts stay; nothing new comes here."""
        if self.connected:
            self.connected = False
            self.broke_at_s = asyncio.get_running_loop().time()
            self._events.session_changed()

    def end(self, error: ServingError) -> None:
        """The session is over for good: everything that ran in it is lost."""
        if self.over is not None:
            return
        self.over, self.connected = error, False
        self.tally.lost += bool(self.running)
        self.float.clear()
        self.outbox_filled.set()
        self._ack.cancel()
        self._linger.cancel()
        for attempt in self._unanswered.values():
            attempt.held.lost()
            attempt.answer(error)
            attempt.end(error)
        for attempt in self._slots.values():
            attempt.end(error)
        self._unanswered.clear()
        self._slots.clear()
        self._events.session_changed()

    # In: the connection's loop calls these.

    def asked_logprobs(self, slot: int) -> bool:
        """True if the attempt in a slot asked for log probabilities."""
        attempt = self._slots.get(slot)
        return attempt is not None and attempt.logprobs

    def receive(self, number: int, read: Callable[[Callable[[int], bool]], object]) -> None:
        """Take one message. Raises NumberGap or ServingError if the worker broke the contract."""
        self._heard_at_s = asyncio.get_running_loop().time()
        if number == 0:
            message = read(self.asked_logprobs)
            if isinstance(message, Ack):
                self._link.ack(message.received_number)
            return
        if not self._link.receive(number):
            return  # A repeat stays unread: its slots may name other attempts by now.
        message = read(self.asked_logprobs)
        assert isinstance(message, WorkerMessage)
        self._take(message)
        self._acknowledge()

    def _take(self, message: WorkerMessage) -> None:
        match message:
            case Frame():
                self._take_pulled(message.pulled)
                self._take_frame(message)
            case Accepted():
                self._take_accepted(message)
            case Refused():
                attempt = self._answered(message.attempt_id)
                attempt.held.returned()
                attempt.end(message.error)
                attempt.answer(message.error)
                # Of a submission that it could not read the worker does not know the grant.
                self.post(ReturnGrants((attempt.grant_id,)), LINGER_S)
            case Grants():
                self._take_grants(message)

    def _take_accepted(self, accepted: Accepted) -> None:
        other = self._slots.get(accepted.slot)
        if other is not None and other.sink is not None:
            raise broken(f"slot {accepted.slot} was given to two attempts")
        attempt = self._answered(accepted.attempt_id)
        self._slots[accepted.slot] = attempt
        attempt.held.moved()
        attempt.answer(None)

    def _answered(self, attempt_id: str) -> Attempt:
        attempt = self._unanswered.pop(attempt_id, None)
        if attempt is None:
            raise broken(f"{attempt_id} was answered, which waits for no answer")
        return attempt

    def _take_grants(self, message: Grants) -> None:
        self.load = message.load
        for ask_id, error in message.refused:
            self._events.refused(self, ask_id, error)
        for granted in message.grants:
            self._events.granted(self, granted)
        self._events.changed()

    def _take_frame(self, frame: Frame) -> None:
        """Give each attempt its tokens: every token of the router runs through this loop.

        Streams that had tokens in the last frame have the same gap now: it is counted
        once for all, so that the count costs a token one comparison.
        """
        tokens, rows, satisfied, in_pace = 0, 0, [], 0
        gaps_s, now_s, before_s = self.tally.gaps_s, self._heard_at_s, self._frame_at_s
        for slot, offset, count in zip(frame.slots, frame.offsets, frame.token_counts, strict=True):
            attempt = self._slots.get(slot)
            if attempt is None:
                raise broken(f"slot {slot} has tokens and no attempt")
            token_ids = frame.token_ids[tokens : tokens + count]
            tokens += count
            logprobs: Sequence[TokenLogprob] = ()
            if attempt.logprobs:
                logprobs = frame.logprobs[rows : rows + count]
                rows += count
            sink = attempt.sink
            if sink is None:
                continue
            if sink.last_at_s == before_s:
                in_pace += 1
            elif sink.last_at_s:
                gaps_s.observe(now_s - sink.last_at_s)
            sink.last_at_s = now_s
            if not attempt.write(offset, token_ids, logprobs):
                satisfied.append(attempt.attempt_id)
        gaps_s.observe(now_s - before_s, in_pace)
        self._frame_at_s = now_s
        self._take_ends(frame.ended, satisfied)

    def _take_pulled(self, pulled: Sequence[Pulled]) -> None:
        for each in pulled:
            attempt = self._slots.get(each.slot)
            if attempt is None:
                raise broken(f"slot {each.slot} was pulled for, and has no attempt")
            attempt.handoff_bytes, attempt.handoff_s = each.handoff_bytes, each.handoff_s

    def _take_ends(self, ends: Sequence[Ended], satisfied: list[str]) -> None:
        """End attempts; those that want no more and have not ended are cancelled."""
        for ended in ends:
            self._take_end(ended)
            if ended.attempt_id in satisfied:
                satisfied.remove(ended.attempt_id)
        if satisfied:
            self.post(Cancel(tuple(satisfied)))

    def _take_end(self, ended: Ended) -> None:
        attempt = self._slots.pop(ended.slot, None)
        if attempt is None or attempt.attempt_id != ended.attempt_id:
            raise broken(f"{ended.attempt_id} ended in slot {ended.slot}, which is not its")
        attempt.handoff_bytes, attempt.handoff_s = ended.handoff_bytes, ended.handoff_s
        if ended.finish_reason is not None:
            attempt.end(Finish(ended.finish_reason, ended.stop_token_id, ended.waves))
        else:
            attempt.end(ended.error or broken(f"{ended.attempt_id} ended without a reason"))

    def _forgotten(self, attempt_id: str) -> None:
        """The worker does not know an attempt: fine if its submission is about to be sent again."""
        if any(isinstance(m, Submit) and m.attempt_id == attempt_id for _, m in self.outbox):
            return
        error = ServingError(Reason.WORKER_LOST, "the worker forgot the attempt")
        attempt = self._unanswered.pop(attempt_id, None)
        if attempt is not None:
            attempt.held.lost()
            attempt.end(error)
            attempt.answer(error)
        for slot, other in list(self._slots.items()):
            if other.attempt_id == attempt_id:
                other.end(error)
                del self._slots[slot]

    # Acknowledgements: one for many messages.

    def _acknowledge(self) -> None:
        if self._link.received - self._acked >= ACK_EVERY:
            self._send_ack()
        else:
            self._ack.within(ACK_DELAY_S)

    def _send_ack(self) -> None:
        if self.connected and self._acked < self._link.received:
            self._add_ack()
            self.outbox_filled.set()

    def _add_ack(self) -> None:
        self._ack.cancel()
        self._acked = self._link.received
        self.outbox.append((0, Ack(self._acked)))

    # The outbox.

    def take_outbox(self) -> list[tuple[int, RouterMessage | Ack]]:
        """What to write now: all there is, if the worker reads several messages at once.

        An acknowledgement that is due some time goes along.
        """
        assert self.welcome is not None
        if not self.welcome.takes_batches:
            return [self.outbox.popleft()]
        if self._acked < self._link.received:
            self._add_ack()
        self._linger.cancel()
        taken = list(self.outbox)
        self.outbox.clear()
        return taken
