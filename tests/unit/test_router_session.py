"""The router's end of a session: answers, frames, cancels, and what a break changes."""

import asyncio
from dataclasses import replace

import pytest

from services.router.decode_attempt import Attempt
from services.router.generate import Finish
from services.router.held import Held, Owner
from services.router.session import ACK_EVERY, Session
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, Sampling, TokenLogprob
from splitwave.core.handoff import Handoff
from splitwave.core.session import (
    Accepted,
    Ack,
    Cancel,
    Ended,
    Frame,
    Granted,
    Pulled,
    Refused,
    Submit,
    Welcome,
    WorkerMessage,
)
from tests.fakes import FakeSink, now_s
from tests.sim import virtual_loop

WELCOME = Welcome(
    worker_id="d0",
    group_id="d",
    epoch=1,
    reattached=False,
    received_number=0,
    reattach_s=2.0,
    kv_layout="layout",
    block_size_tokens=16,
    grant_blocks=4,
    model_len_max_tokens=1024,
    blocks_per_rank=64,
)
HANDOFF = Handoff(
    handoff_id="h",
    prefill_worker_id="p0",
    prefill_address="p0:1",
    group_id="p",
    epoch=1,
    rank=0,
    prompt_tokens=3,
    block_count=1,
    kv_layout="layout",
    lease_remaining_s=30.0,
    connector="fake",
    connector_params=b"",
)


class Rooms:
    """Listens, and has nothing to do."""

    def granted(self, session: Session, granted: Granted) -> None: ...
    def refused(self, session: Session, ask_id: str, error: ServingError) -> None: ...
    def changed(self) -> None: ...
    def session_changed(self) -> None: ...


class Peer:
    """A session with a worker that the test plays."""

    def __init__(self) -> None:
        self.session = Session("s1", Rooms())
        self.session.attach(WELCOME)
        self.released: list[str] = []
        self._number = 0

    def submit(
        self, attempt_id: str, *, logprobs: int | None = None, sink: FakeSink | None = None
    ) -> Attempt:
        submit = Submit(
            attempt_id=attempt_id,
            request_id="r",
            grant_id="g",
            handoff=HANDOFF,
            token_ids=(1, 2, 3),
            offset=0,
            sampling=Sampling(max_tokens=9, logprobs=logprobs),
            remaining_s=60.0,
            stall_max_s=9.0,
        )
        held = Held(attempt_id, lambda held: self.released.append(held.handoff_id))
        held.asked("p0")
        return self.session.submit(submit, held, sink or FakeSink())

    def accept(self, attempt_id: str, slot: int, **kwargs: object) -> tuple[Attempt, FakeSink]:
        sink = FakeSink()
        attempt = self.submit(attempt_id, sink=sink, **kwargs)  # type: ignore[arg-type]  # logprobs
        self.say(Accepted(attempt_id, slot, 0))
        return attempt, sink

    def say(self, message: WorkerMessage) -> None:
        self._number += 1
        self.say_again(self._number, message)

    def say_again(self, number: int, message: WorkerMessage) -> None:
        self.session.receive(number, lambda asked: message)

    def sent(self) -> list[object]:
        """What the session has put into its outbox since it was last asked."""
        messages: list[object] = [message for _, message in self.session.outbox]
        self.session.outbox.clear()
        return messages


def frame(*rows: tuple[int, int, list[int]], ended: list[Ended] | None = None) -> Frame:
    """A frame of rows (slot, offset, tokens)."""
    return Frame(
        step=1,
        slots=[slot for slot, _, _ in rows],
        offsets=[offset for _, offset, _ in rows],
        token_counts=[len(tokens) for _, _, tokens in rows],
        token_ids=[token for _, _, tokens in rows for token in tokens],
        ended=ended or [],
    )


def ended(slot: int, attempt_id: str) -> Ended:
    return Ended(slot=slot, attempt_id=attempt_id, finish_reason=FinishReason.LENGTH)


async def test_accepted_moves_the_handoff_before_anyone_wakes() -> None:
    peer = Peer()
    attempt = peer.submit("a")
    before = attempt.held.owner

    peer.say(Accepted("a", 0, 0))

    assert (before, attempt.held.owner) == (Owner.OFFER, Owner.DECODE)
    await attempt.accepted()


async def test_a_refusal_is_raised_and_the_handoff_is_ours_again() -> None:
    peer = Peer()
    attempt = peer.submit("a")

    peer.say(Refused("a", ServingError(Reason.GRANT_UNKNOWN, "no")))

    assert attempt.held.owner is Owner.ROUTER
    with pytest.raises(ServingError, match="no"):
        await attempt.accepted()


async def test_each_attempt_of_a_frame_gets_its_own_tokens() -> None:
    peer = Peer()
    (_, first), (_, second) = peer.accept("a", 0), peer.accept("b", 1)

    peer.say(frame((1, 0, [7]), (0, 0, [5, 6])))
    peer.say(frame((0, 2, [8])))

    assert (first.token_ids, second.token_ids) == ([5, 6, 8], [7])


async def test_logprobs_belong_to_those_that_asked_even_behind_a_cancelled_one() -> None:
    peer = Peer()
    rows: list[object] = []

    class Sink(FakeSink):
        def write(self, offset, token_ids, logprobs):  # type: ignore[no-untyped-def]  # typed by the port
            rows.append([row.token_id for row in logprobs])
            return False

    gone, _ = peer.accept("a", 0, logprobs=1)
    peer.accept("b", 1)
    peer.submit("c", logprobs=1, sink=Sink())
    peer.say(Accepted("c", 2, 0))
    peer.session.cancel(gone)

    told = frame((0, 0, [1]), (1, 0, [2]), (2, 0, [3]))
    told.logprobs = [TokenLogprob(1, -1.0, 1), TokenLogprob(3, -1.0, 1)]
    peer.say(told)

    assert rows == [[3]]


async def test_an_end_comes_behind_its_tokens() -> None:
    peer = Peer()
    attempt, sink = peer.accept("a", 0)

    peer.say(frame((0, 0, [1]), ended=[ended(0, "a")]))

    assert sink.token_ids == [1]
    assert (await attempt.finish()).finish_reason is FinishReason.LENGTH
    assert peer.session.running == 0


async def test_a_slot_serves_another_attempt_after_its_end() -> None:
    peer = Peer()
    _, first = peer.accept("a", 0)
    peer.say(frame((0, 0, [1]), ended=[ended(0, "a")]))

    _, second = peer.accept("b", 0)
    peer.say(frame((0, 0, [2])))

    assert (first.token_ids, second.token_ids) == ([1], [2])


async def test_a_sink_that_wants_no_more_ends_as_stopped_and_is_cancelled_at_decode() -> None:
    peer = Peer()
    attempt, sink = peer.accept("a", 0)
    sink.stop_after = 2
    peer.sent()

    peer.say(frame((0, 0, [1])))
    peer.say(frame((0, 1, [2])))
    peer.say(frame((0, 2, [3])))  # It was on its way.

    assert sink.token_ids == [1, 2]
    assert peer.sent() == [Cancel(("a",))]
    assert await attempt.finish() == Finish(FinishReason.STOP)


async def test_a_sink_that_stops_at_the_attempts_end_is_not_cancelled() -> None:
    peer = Peer()
    attempt, sink = peer.accept("a", 0)
    sink.stop_after = 1
    peer.sent()

    peer.say(frame((0, 0, [1]), ended=[ended(0, "a")]))

    assert peer.sent() == []
    assert (await attempt.finish()).finish_reason is FinishReason.STOP


@pytest.mark.parametrize("offset", [0, 2])
async def test_a_gap_or_a_repeat_of_tokens_ends_that_attempt_alone(offset: int) -> None:
    peer = Peer()
    (broken, _), (_, other) = peer.accept("a", 0), peer.accept("b", 1)
    peer.say(frame((0, 0, [1]), (1, 0, [1])))

    peer.say(frame((0, offset, [9]), (1, 1, [2])))

    with pytest.raises(ServingError, match="broke the contract") as failed:
        await broken.finish()
    assert failed.value.reason is Reason.INTERNAL
    assert other.token_ids == [1, 2]


async def test_a_sink_that_fails_ends_its_attempt_alone() -> None:
    peer = Peer()

    class Sink(FakeSink):
        def write(self, offset, token_ids, logprobs):  # type: ignore[no-untyped-def]  # typed by the port
            raise ZeroDivisionError

    broken = peer.submit("a", sink=Sink())
    peer.say(Accepted("a", 0, 0))
    _, other = peer.accept("b", 1)

    peer.say(frame((0, 0, [1]), (1, 0, [1])))

    with pytest.raises(ServingError, match="ZeroDivisionError"):
        await broken.finish()
    assert other.token_ids == [1]


async def test_a_cancelled_waiter_cancels_its_attempt_and_learns_who_owns_the_handoff() -> None:
    peer = Peer()
    attempt = peer.submit("a")
    waiting = asyncio.create_task(attempt.accepted())
    await asyncio.sleep(0)
    peer.sent()

    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    with attempt.held:
        pass

    assert peer.sent() == [Cancel(("a",))]
    assert attempt.held.owner is Owner.OFFER
    peer.say(Refused("a", ServingError(Reason.GRANT_UNKNOWN, "no")))
    assert peer.released == ["a"]


async def test_tokens_of_an_attempt_that_was_cancelled_before_its_answer_are_dropped() -> None:
    peer = Peer()
    attempt = peer.submit("a")
    peer.session.cancel(attempt)

    peer.say(Accepted("a", 0, 0))
    peer.say(frame((0, 0, [1])))

    assert attempt.held.owner is Owner.DECODE
    assert peer.session.running == 0


async def test_a_reattach_sends_again_what_the_worker_has_not_received() -> None:
    peer = Peer()
    first, second = peer.submit("a"), peer.submit("b")
    peer.sent()
    peer.session.detach()
    assert not peer.session.usable

    hello = peer.session.hello("r")
    welcome = Welcome(
        **{
            **{name: getattr(WELCOME, name) for name in Welcome.__slots__},
            "reattached": True,
            "received_number": 1,
            "known": (("a", True), ("b", False)),
        }
    )
    peer.session.attach(welcome)

    assert (hello.reattach, hello.epoch, set(hello.attempt_ids)) == (True, 1, {"a", "b"})
    assert [m.attempt_id for m in peer.sent() if isinstance(m, Submit)] == ["b"]
    assert not first.answered.done()
    assert not second.answered.done()


async def test_repeated_messages_of_a_reattach_are_dropped_unread() -> None:
    peer = Peer()
    attempt, sink = peer.accept("a", 0)
    told = frame((0, 0, [1]))
    peer.say(told)

    peer.say_again(2, told)
    peer.say(frame((0, 1, [2]), ended=[ended(0, "a")]))

    assert sink.token_ids == [1, 2]
    assert (await attempt.finish()).finish_reason is FinishReason.LENGTH


async def test_the_end_of_a_session_loses_what_runs_and_leaves_open_offers_to_their_leases() -> (
    None
):
    peer = Peer()
    running, _ = peer.accept("a", 0)
    offered = peer.submit("b")

    peer.session.end(ServingError(Reason.WORKER_LOST, "gone"))

    assert (running.held.owner, offered.held.owner) == (Owner.DECODE, Owner.LEASE)
    for waiting in (running.finish(), offered.accepted()):
        with pytest.raises(ServingError, match="gone"):
            await waiting
    with pytest.raises(ServingError, match="gone"):
        peer.submit("c")


def test_silence_counts_only_while_attempts_run_and_only_from_their_start() -> None:
    async def scenario() -> None:
        peer = Peer()
        session = peer.session
        await asyncio.sleep(100.0)
        idle_s = session.silent_s(now_s())
        attempt = peer.submit("a")
        begun_s = session.silent_s(now_s())
        peer.say(Accepted("a", 0, 0))
        await asyncio.sleep(7.0)
        silent_s = session.silent_s(now_s())
        peer.say(frame((0, 0, [1])))
        heard_s = session.silent_s(now_s())
        session.cancel(attempt)
        await asyncio.sleep(9.0)

        assert (idle_s, begun_s, silent_s, heard_s) == (0.0, 0.0, 7.0, 0.0)
        assert session.silent_s(now_s()) == 0.0

    virtual_loop.run(scenario())


async def test_messages_are_acknowledged_many_at_once() -> None:
    peer = Peer()
    peer.accept("a", 0)
    peer.sent()

    for offset in range(ACK_EVERY):
        peer.say(frame((0, offset, [1])))

    assert peer.sent() == [Ack(ACK_EVERY)]


@pytest.mark.parametrize(
    "message",
    [
        Accepted("unknown", 0, 0),
        Refused("unknown", ServingError(Reason.OVERLOADED, "no")),
        frame((5, 0, [1])),
        frame(ended=[ended(5, "unknown")]),
        replace(frame(), pulled=[Pulled(5, 1, 0.0)]),
    ],
    ids=["accepted", "refused", "tokens", "end", "pulled"],
)
async def test_a_message_about_nothing_that_we_know_breaks_the_contract(
    message: WorkerMessage,
) -> None:
    with pytest.raises(ServingError, match="broke the contract"):
        Peer().say(message)
