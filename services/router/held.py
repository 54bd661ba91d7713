"""Who owns a handoff: the router, an offer on its way to decode, or decode."""

import enum
from collections.abc import Callable
from types import TracebackType


class Owner(enum.Enum):
    """Who must end the handoff. It has one owner at a time."""

    NOBODY = enum.auto()
    """Nothing is held: no prefill was asked for it, or it ended there."""
    ROUTER = enum.auto()
    OFFER = enum.auto()
    """A submission carries it and has not been answered."""
    DECODE = enum.auto()
    LEASE = enum.auto()
    """The worker went away with the offer unanswered: a release could race its pull."""


class Held:
    """One handoff, released on every way out of its `with` block while it is the router's.

    The router chooses the id before it calls, so it can release blocks whose answer it
    never received. Nothing here awaits, so no cancellation can come in between.

    Invariants, asserted where the owner changes:
      H1  it is released at most once, and only while the router owns it
      H2  only an offer moves it to decode or returns it
    """

    def __init__(self, handoff_id: str, release: Callable[["Held"], None]) -> None:
        """`release` starts the release call and returns at once."""
        self.handoff_id = handoff_id
        self.worker_id = ""
        """The prefill worker that was asked last."""
        self.owner = Owner.NOBODY
        self.epoch = 0
        """Of the prefill worker's group, as the router last heard."""
        self._release = release
        self._left = False

    def asked(self, worker_id: str, epoch: int = 0) -> None:
        """A prefill worker is about to be called: from now on it may hold blocks."""
        assert self.owner is Owner.NOBODY
        self.worker_id, self.epoch = worker_id, epoch
        self.owner = Owner.ROUTER

    def nothing_held(self) -> None:
        """The prefill worker answered that it holds nothing."""
        assert self.owner is Owner.ROUTER
        self.owner = Owner.NOBODY

    def offered(self) -> None:
        """A submission with the handoff was sent."""
        assert self.owner is Owner.ROUTER, "H2"
        assert not self._left, "H2"
        self.owner = Owner.OFFER

    def moved(self) -> None:
        """Accepted: decode pulls or releases from here on. A release by us could race its pull."""
        assert self.owner is Owner.OFFER, "H2"
        self.owner = Owner.DECODE

    def returned(self) -> None:
        """Refused: the handoff is ours again."""
        assert self.owner is Owner.OFFER, "H2"
        self.owner = Owner.ROUTER
        self._release_if_left()

    def lost(self) -> None:
        """The session ended without an answer to the offer."""
        assert self.owner is Owner.OFFER, "H2"
        self.owner = Owner.LEASE

    def __enter__(self) -> "Held":
        """Begin to own what prefill will hold."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release what is still ours; an open offer is settled by its answer."""
        self._left = True
        self._release_if_left()

    def _release_if_left(self) -> None:
        if self._left and self.owner is Owner.ROUTER:
            self.owner = Owner.NOBODY
            self._release(self)
