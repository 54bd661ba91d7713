"""Why new work may go nowhere in a pool, as its clients are told."""

from collections.abc import Iterable
from typing import Protocol

from services.router.standings import Stands
from splitwave.core.errors import Reason, ServingError
from splitwave.core.worker import Role

POOL_RETRY_S = 5.0
"""When a client that found no worker there is told to try again."""


class Peer(Protocol):
    """One worker, as its router sees it."""

    address: str
    leaving: bool

    @property
    def reachable(self) -> bool:
        """True if it can be talked to, whatever it says."""

    @property
    def draining(self) -> bool:
        """True if it says that it takes no new work: it drains, or is not ready."""


def absence(
    role: Role, peers: Iterable[Peer], stands: Stands, retry_after_s: float = POOL_RETRY_S
) -> ServingError:
    """The error of a request for which no worker of a role is there."""
    told: dict[str, int] = {}
    for peer in peers:
        if not peer.leaving:
            state = _state(peer, stands)
            told[state] = told.get(state, 0) + 1
    if told.keys() <= {_AWAY}:
        why = f"no {role} worker is reachable"
    else:
        counted = ", ".join(f"{count} {state}" for state, count in sorted(told.items()))
        why = f"no {role} worker takes this request now: {counted}"
    return ServingError(Reason.POOL_UNAVAILABLE, why, retry_after_s=retry_after_s)


_AWAY = "not reachable"


def _state(peer: Peer, stands: Stands) -> str:
    if not peer.reachable:
        return _AWAY
    if peer.draining:
        return "draining or not ready"
    if not stands.admits(peer.address):
        return f"kept out ({stands.why_not(peer.address)})"
    return "not fit for it"
