"""A router written by hand: it says what a test tells it to, and keeps all that it hears."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from splitwave.core.errors import ServingError
from splitwave.core.generation import FinishReason, Sampling, TokenLogprob
from splitwave.core.handoff import Handoff
from splitwave.core.prefill import PrefillResult
from splitwave.core.session import (
    Accepted,
    Ack,
    AskGrant,
    Ended,
    Frame,
    Granted,
    Grants,
    GroupLoad,
    Hello,
    Link,
    Pulled,
    Refused,
    RouterMessage,
    Submit,
    Welcome,
    WorkerMessage,
)

FromWorker = WorkerMessage | Welcome | Ack
ToWorker = RouterMessage | Hello | Ack


@dataclass(slots=True)
class Heard:
    """What the router has heard of one attempt."""

    accepted: Accepted | None = None
    refused: ServingError | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    pulled: list[tuple[int, Pulled]] = field(default_factory=list)
    """What was said of its handoff, each with the tokens that were shown before it."""
    ended: Ended | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def finish(self) -> FinishReason | None:
        """How it ended well."""
        return self.ended.finish_reason if self.ended else None

    @property
    def error(self) -> ServingError | None:
        """How it ended badly, a refusal included."""
        return self.ended.error if self.ended else self.refused


class HandRouter:
    """Numbers, acknowledges and replays as the contract says; decides nothing."""

    def __init__(self, session_id: str = "s1", *, acks: bool = True) -> None:
        self.session_id = session_id
        self.acks = acks
        self.link: Link[RouterMessage] = Link(kept_max=100_000)
        self.heard: dict[str, Heard] = {}
        self.asked: set[str] = set()
        """Attempts that asked for log probabilities."""
        self.slots: dict[int, str] = {}
        self.grants: asyncio.Queue[Granted] = asyncio.Queue()
        self.ask_refusals: dict[str, ServingError] = {}
        self.load: GroupLoad | None = None
        self.welcome: Welcome | None = None
        self.welcomed = asyncio.Event()
        self.frames = 0
        self.repeats = 0
        self.acked_by_worker = 0
        self._out: asyncio.Queue[tuple[int, ToWorker] | None] = asyncio.Queue()
        self._asks = 0

    # What the router says.

    def send(self, message: RouterMessage) -> None:
        """Say something, now or when there is a connection again."""
        self._out.put_nowait((self.link.send(message), message))

    async def messages(self, *, reattach: bool = False) -> AsyncIterator[tuple[int, ToWorker]]:
        """All that one connection carries, for ever. Clear `welcomed` before."""
        self._out = asyncio.Queue()
        hello = Hello(router_id="hand", session_id=self.session_id)
        if reattach:
            assert self.welcome is not None
            hello = Hello(
                router_id="hand",
                session_id=self.session_id,
                reattach=True,
                epoch=self.welcome.epoch,
                received_number=self.link.received,
                attempt_ids=tuple(self.heard),
            )
        yield 0, hello
        await self.welcomed.wait()
        for item in self.link.replay():
            self._out.put_nowait(item)
        while (said := await self._out.get()) is not None:
            yield said

    def hang_up(self) -> None:
        """End the stream of messages."""
        self._out.put_nowait(None)

    async def grant(self, blocks: int = 4) -> Granted:
        """Ask for room and wait for it."""
        self._asks += 1
        ask_id = f"ask{self._asks}"
        self.send(AskGrant(ask_id, blocks, 5.0))
        while (granted := await self.grants.get()).ask_id != ask_id:
            pass  # Pushed unasked: left to its ttl.
        return granted

    def submit(self, submit: Submit) -> Heard:
        """Hand an attempt over."""
        if submit.sampling.logprobs is not None:
            self.asked.add(submit.attempt_id)
        heard = self.heard.setdefault(submit.attempt_id, Heard())
        self.send(submit)
        return heard

    # What the router hears.

    async def write(self, messages: Sequence[tuple[int, FromWorker]]) -> None:
        """Take messages of the worker."""
        for number, message in messages:
            self.hear(number, message)

    def hear(self, number: int, message: FromWorker) -> None:
        """Take one message; repeats are dropped and counted."""
        if isinstance(message, Welcome):
            self.welcome = message
            self.link.ack(message.received_number)
            self.welcomed.set()
            return
        if isinstance(message, Ack):
            self.acked_by_worker = message.received_number
            self.link.ack(message.received_number)
            return
        if not self.link.receive(number):
            self.repeats += 1
            return
        self._take(message)
        if self.acks:
            self._out.put_nowait((0, Ack(self.link.received)))

    def _take(self, message: WorkerMessage) -> None:
        match message:
            case Grants():
                self.load = message.load
                self.ask_refusals.update(message.refused)
                for granted in message.grants:
                    self.grants.put_nowait(granted)
            case Accepted():
                self.heard[message.attempt_id].accepted = message
                self.slots[message.slot] = message.attempt_id
            case Refused():
                heard = self.heard.setdefault(message.attempt_id, Heard())
                heard.refused = message.error
                heard.over.set()
            case Frame():
                self._take_frame(message)

    def _take_frame(self, frame: Frame) -> None:
        self.frames += 1
        for pulled in frame.pulled:
            heard = self.heard[self.slots[pulled.slot]]
            heard.pulled.append((len(heard.offsets), pulled))
        assert len(set(frame.slots)) == len(frame.slots), "a slot came twice"
        at, logprobs = 0, iter(frame.logprobs)
        rows = zip(frame.slots, frame.offsets, frame.token_counts, strict=True)
        for slot, offset, count in rows:
            attempt_id = self.slots[slot]
            heard = self.heard[attempt_id]
            heard.offsets += range(offset, offset + count)
            heard.token_ids += frame.token_ids[at : at + count]
            if attempt_id in self.asked:
                heard.logprobs += [next(logprobs) for _ in range(count)]
            at += count
        assert at == len(frame.token_ids)
        assert next(logprobs, None) is None
        for ended in frame.ended:
            heard = self.heard[ended.attempt_id]
            assert heard.ended is None, "it ended twice"
            heard.ended = ended
            heard.over.set()


def submission(
    attempt_id: str,
    granted: Granted,
    handoff: Handoff,
    token_ids: list[int],
    sampling: Sampling,
) -> Submit:
    """A submission with ample time; `token_ids` include a kept first token."""
    return Submit(
        attempt_id=attempt_id,
        request_id=attempt_id.partition("/")[0],
        grant_id=granted.grant_id,
        handoff=handoff,
        token_ids=token_ids,
        offset=len(token_ids) - handoff.prompt_tokens,
        sampling=sampling,
        remaining_s=30.0,
        stall_max_s=10.0,
    )


def tokens_of(result: PrefillResult) -> list[int]:
    """The first token, if it was kept."""
    return [] if result.token_id is None else [result.token_id]
