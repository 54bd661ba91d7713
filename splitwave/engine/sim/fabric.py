"""How a decode simulator reads what a prefill simulator holds.

Groups of one process meet in a `SimFabric`, so a pull sees the true state of the
blocks and ends the lease. Between processes a pull has the connector parameters
alone: it succeeds whatever became of its peer, it cannot end the lease (the worker's
release or the expiry does), and once the lease is over it counts as reading reused
blocks. Both clocks are then one host's monotonic clock.
"""

import json
from dataclasses import asdict, dataclass
from typing import Protocol


class PeerGone(Exception):
    """The group that held the blocks is not there any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What `Held.connector_params` says, as JSON."""

    engine_id: str
    rank: int
    request_id: str
    """The prefill engine's request, whose lease the pull ends."""
    kv_layout: str
    tokens: int
    """Prompt tokens whose KV is held."""
    state: int
    """The simulated model's state after these tokens."""
    state_before_last: int
    """The state one token earlier: where a decode engine recomputes the last one."""
    blocks: list[int]
    writer: int
    """Who wrote the blocks, in the prefill rank's count."""
    expires_at_s: float

    def to_bytes(self) -> bytes:
        """JSON, UTF-8."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes) -> "Offer":
        """Raise ValueError if `data` is not what `to_bytes` wrote."""
        try:
            offer = Offer(**json.loads(data))
        except TypeError as error:
            raise ValueError(f"not the parameters of a simulated handoff: {error}") from error
        for name, kind in _KINDS.items():
            if not isinstance(getattr(offer, name), kind):
                raise ValueError(f"{name} of a simulated handoff is no {kind.__name__}")
        return offer


_KINDS: dict[str, type] = {
    "engine_id": str,
    "rank": int,
    "request_id": str,
    "kv_layout": str,
    "tokens": int,
    "state": int,
    "state_before_last": int,
    "blocks": list,
    "writer": int,
    "expires_at_s": float,
}


class Source(Protocol):
    """A group that can be pulled from."""

    def pulled(self, offer: Offer, now_s: float) -> bool:
        """End the lease as pulled; False if a block was reused before it was read."""


class SimFabric:
    """The groups of one process that reach each other, by engine id."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}

    def register(self, engine_id: str, source: Source) -> None:
        """Let others pull from a group. One id names one start of one group."""
        if engine_id in self._sources:
            raise ValueError(
                f"group_id and epoch {engine_id!r} are taken in this fabric: raise the epoch"
            )
        self._sources[engine_id] = source

    def unregister(self, engine_id: str) -> None:
        """Forget a group that has stopped. Idempotent."""
        self._sources.pop(engine_id, None)

    def read(self, offer: Offer, now_s: float) -> bool:
        """Read an offer's blocks; False if what was read had been reused.

        Raises PeerGone if its group has stopped.
        """
        source = self._sources.get(offer.engine_id)
        if source is None:
            raise PeerGone(f"nothing answers as {offer.engine_id}")
        return source.pulled(offer, now_s)


def read_alone(offer: Offer, now_s: float) -> bool:
    """Read an offer whose group is in another process; False if its lease is over."""
    return now_s < offer.expires_at_s
