"""The session between a router and a decode worker: its messages and its numbering.

`Link` is the same on both ends: it numbers what goes out, keeps it until it is
acknowledged, and drops what came before. So a broken connection loses nothing
and repeats nothing (the idea of TCP, RFC 9293, above a stream that can break).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from splitwave.core.errors import ServingError
from splitwave.core.generation import FinishReason, Sampling, TokenLogprob
from splitwave.core.handoff import Handoff

T = TypeVar("T")


class NumberGap(Exception):
    """A number was skipped: the peer, or the connection, broke the contract."""


class Unread(Exception):
    """More is unacknowledged than the link may keep: the peer does not read."""


class Link(Generic[T]):
    """One direction out and one direction in of a session's numbered messages.

    Invariants, asserted by `check`:
      K1  kept messages are exactly the numbers acked+1 .. sent
      K2  kept <= kept_max
    """

    def __init__(self, *, kept_max: int) -> None:
        assert kept_max > 0
        self._kept_max = kept_max
        self._kept: deque[T] = deque()
        self.sent = 0
        self.acked = 0
        self.received = 0

    def send(self, message: T) -> int:
        """Number a message and keep it. Raises Unread if too much is kept already."""
        if len(self._kept) >= self._kept_max:
            raise Unread(f"{len(self._kept)} messages are unacknowledged")
        self._kept.append(message)
        self.sent += 1
        return self.sent

    def ack(self, number: int) -> None:
        """Forget what the peer has. Old acknowledgements change nothing."""
        if number > self.sent:
            raise NumberGap(f"{number} was acknowledged, {self.sent} is the last that was sent")
        while self.acked < number:
            self._kept.popleft()
            self.acked += 1

    def receive(self, number: int) -> bool:
        """True if a message is new, False if it is a repeat. Raises NumberGap for a skip."""
        if number <= self.received:
            return False
        if number != self.received + 1:
            raise NumberGap(f"number {number} came after {self.received}")
        self.received = number
        return True

    def replay(self) -> list[tuple[int, T]]:
        """What to send again after a reattach, with its numbers."""
        return list(enumerate(self._kept, start=self.acked + 1))

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._kept) == self.sent - self.acked, "K1"
        assert len(self._kept) <= self._kept_max, "K2"


# Messages from a router. Field meanings: proto/splitwave/v1alpha1/decode_service.proto.


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of each connection."""

    router_id: str
    session_id: str
    reattach: bool = False
    epoch: int = 0
    received_number: int = 0
    attempt_ids: tuple[str, ...] = ()
    takes_batches: bool = False


@dataclass(frozen=True, slots=True)
class Ack:
    """All numbers up to this one were received."""

    received_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Hands one attempt over."""

    attempt_id: str
    request_id: str
    grant_id: str
    handoff: Handoff
    token_ids: Sequence[int]
    offset: int
    sampling: Sampling
    remaining_s: float
    stall_max_s: float
    traceparent: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends attempts without a further word about them."""

    attempt_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AskGrant:
    """Asks for room of a given size."""

    ask_id: str
    blocks: int
    wait_max_s: float


@dataclass(frozen=True, slots=True)
class CancelAsk:
    """Withdraws an ask."""

    ask_id: str


@dataclass(frozen=True, slots=True)
class TakeGrant:
    """Keeps a grant alive while its request is prefilled."""

    grant_id: str
    blocks: int
    keep_s: float


@dataclass(frozen=True, slots=True)
class ReturnGrants:
    """Gives unspent grants back."""

    grant_ids: tuple[str, ...]


RouterMessage = Submit | Cancel | AskGrant | CancelAsk | TakeGrant | ReturnGrants


# Messages from a worker.


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answers Hello."""

    worker_id: str
    group_id: str
    epoch: int
    reattached: bool
    received_number: int
    known: tuple[tuple[str, bool], ...] = ()
    """Hello's attempt ids, each with whether its submission arrived."""
    reattach_s: float
    kv_layout: str
    block_size_tokens: int
    grant_blocks: int
    model_len_max_tokens: int
    blocks_per_rank: int
    takes_batches: bool = False
    ranks: int = 0
    """0 from a worker that does not say."""
    seats_per_rank: int = 0

    def completions_max(self, tokens: int) -> int | None:
        """How many completions of `tokens` each the group runs at once while it is empty.

        None if the worker has not said. A longer one than a rank's blocks is cut to these.
        """
        if not self.ranks:
            return None
        blocks = min(-(-tokens // self.block_size_tokens), self.blocks_per_rank)
        return self.ranks * min(self.seats_per_rank, self.blocks_per_rank // blocks)


@dataclass(frozen=True, slots=True)
class Granted:
    """Room for one request. `ttl_s` counts from its arrival at the router."""

    grant_id: str
    rank: int
    blocks: int
    ttl_s: float
    ask_id: str = ""


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """What a router needs to choose between decode workers."""

    seats_free: int
    blocks_free: int
    asks_waiting: int
    draining: bool


@dataclass(frozen=True, slots=True)
class Grants:
    """Pushes room and load."""

    grants: tuple[Granted, ...]
    refused: tuple[tuple[str, ServingError], ...]
    """Asks that get none, each with why."""
    load: GroupLoad


@dataclass(frozen=True, slots=True)
class Accepted:
    """The worker owns the attempt's handoff from here on."""

    attempt_id: str
    slot: int
    rank: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The attempt and its handoff stay with the router; its grant is spent."""

    attempt_id: str
    error: ServingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The one end of an accepted attempt: `finish_reason` or `error`, never both."""

    slot: int
    attempt_id: str
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: ServingError | None = None
    handoff_bytes: int = 0
    handoff_s: float = 0.0
    waves: Sequence[str] = ()
    """Traceparents of the wave segments of its first and last step; none if it is not traced."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a handoff has cost, told with its first tokens: who cancels hears no end."""

    slot: int
    handoff_bytes: int
    handoff_s: float


@dataclass(slots=True)
class Frame:
    """New tokens of one lock-step for one router, in columns.

    Row i of `slots`, `offsets` and `token_counts` describes one attempt; its tokens
    follow one another in `token_ids`. `logprobs` has one entry a token of those slots
    that asked for them, in order.
    """

    step: int
    slots: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    pulled: list[Pulled] = field(default_factory=list)


WorkerMessage = Grants | Accepted | Refused | Frame
