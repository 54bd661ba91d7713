"""What a worker says of itself: what it is, its present state and its counts."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitwave.core.envelope import Envelope
from splitwave.core.mode_guard import Standing, StepViolation
from splitwave.core.wave_record import WaveStatus


class Role(enum.StrEnum):
    """Which phase a group, and the worker in front of it, serves."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounters:
    """Counted by the engine itself since the group's start."""

    rank: int
    steps_by_kind: Mapping[str, int]
    """Executed steps by step kind (`splitwave.core.mode.StepKind`), dummy steps included."""
    dummy_steps: int
    prefill_tokens_computed: int
    """Tokens computed beyond one a request and step. 0 on a decode rank, always."""
    pulls: int
    bytes_pulled: int
    leases_live: int
    """Prefill: finished prompts whose blocks are held now."""
    blocks_used: int
    guard_refusals: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A worker's present state. The lists have one entry a rank, or none."""

    draining: bool = False
    """True once it takes no new work."""
    queued_tokens: tuple[int, ...] = ()
    """Prefill: prompt tokens queued or being computed."""
    seats_used: tuple[int, ...] = ()
    """Decode: granted ones included."""
    blocks_used: tuple[int, ...] = ()
    """Decode: granted ones included. Prefill: those under lease."""
    asks_waiting: int = 0
    ready: bool = False
    """True once every rank has stepped and none has died."""
    seats_held: tuple[int, ...] = ()
    """Decode: those of `seats_used` in which an attempt sits."""
    standing: Standing = Standing.UNCERTIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCounts:
    """How a prefill worker's leases have ended since its start."""

    started: int = 0
    pulled: int = 0
    released: int = 0
    expired: int = 0
    live: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Certification:
    """What a group is certified for. How it stands changes, and is part of its load."""

    certificate_id: str = ""
    """Empty without a certificate."""
    level: str = ""
    """`smoke` or `full`; empty without a certificate."""
    refusal: str = ""
    """Without a certificate: why not."""
    envelope: Envelope | None = None
    violations: Sequence[StepViolation] = ()
    """The first steps outside the mode in this epoch."""
    violating_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """What a worker is. Field meanings: proto/splitwave/v1alpha1/worker_service.proto."""

    worker_id: str
    role: Role
    group_id: str
    epoch: int
    mode: str
    model: str
    ranks: int
    block_size_tokens: int
    blocks_per_rank: int
    block_bytes: int
    seats_per_rank: int
    model_len_max_tokens: int
    batch_max_tokens: int
    kv_layout: str
    uncertified: bool = False
    certification: Certification = field(default_factory=Certification)
    versions: Mapping[str, str] = field(default_factory=dict)
    load: WorkerLoad = field(default_factory=WorkerLoad)
    rank_counters: Sequence[RankCounters] = ()
    """One entry a rank, if they were asked for."""
    lease_ttl_s: float = 0.0
    """Prefill: how long a lease lasts."""
    leases: LeaseCounts = field(default_factory=LeaseCounts)
    waves: WaveStatus | None = None
    """None if nobody coordinates the ranks, as with one alone."""
