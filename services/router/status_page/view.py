"""What /status.json says, in the words of the page and of `splitwave status`.

Plain dataclasses, so that the JSON and what reads it cannot drift apart. Field
meanings where none stands here: proto/splitwave/v1alpha1/worker_service.proto.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.router.history import RecentRequest as RecentRequest
from splitwave.core.worker import LeaseCounts, RankCounters, Role, WorkerDescription

SERVING, DRAINING, UNREACHABLE = "serving", "draining", "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank."""

    rank: int
    seats_used: int = 0
    """Granted or held."""
    seats_held: int = 0
    seats_max: int = 0
    blocks_used: int = 0
    blocks_max: int = 0
    queued_tokens: int = 0
    steps_by_kind: Mapping[str, int] = field(default_factory=dict)
    dummy_steps: int = 0
    prompt_tokens: int = 0
    """Tokens computed beyond one a request and step."""
    pulls: int = 0
    pulled_bytes: int = 0
    leases_live: int = 0
    guard_refusals: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One worker and the group behind it. All but the first three are empty until it answers."""

    role: Role
    address: str
    state: str
    """serving, draining or unreachable."""
    worker_id: str = ""
    group_id: str = ""
    epoch: int = 0
    mode: str = ""
    model: str = ""
    uncertified: bool = False
    standing: str = ""
    """certified, uncertified, decertified or degraded."""
    certificate: str = ""
    """Name and level; empty without one."""
    uncertified_why: str = ""
    """Why it is not certified, or what it did outside its mode."""
    refused: str = ""
    """Why this router gives it no work; empty if it may."""
    batch_max_tokens: int = 0
    asks_waiting: int = 0
    leases: LeaseCounts = field(default_factory=LeaseCounts)
    ranks: Sequence[RankView] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    age_s: float = 0.0
    """Since the worker said this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterView:
    """The router itself. Counts are since its start."""

    router_id: str
    version: str
    model: str
    state: str
    """serving, draining, or unreachable if one of the pools is."""
    uptime_s: float
    live: int
    live_max: int
    rooms_waiting: int
    prompts_waiting: int
    admitted: int
    outcomes: Mapping[str, int]
    shed: Mapping[str, int]
    resumes: Mapping[str, int]
    prompt_tokens: int
    completion_tokens: int
    handoff_bytes: int
    refused: Mapping[str, int] = field(default_factory=dict)
    """Calls for which nothing was admitted, by reason; shed ones are among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Everything at one moment."""

    router: RouterView | None
    """None if the workers were asked without a router."""
    groups: Sequence[GroupView]
    requests: Sequence[RecentRequest] = ()
    """Live ones and the last that ended, the newest first."""

    def pool(self, role: Role) -> list[GroupView]:
        """Groups of one role."""
        return [group for group in self.groups if group.role is role]


def group_view(
    address: str, described: WorkerDescription, *, state: str = "", age_s: float = 0.0
) -> GroupView:
    """A worker as it described itself; `state`: as others see it, if that is known."""
    certified = described.certification
    return GroupView(
        role=described.role,
        address=address,
        state=state or (DRAINING if described.load.draining else SERVING),
        worker_id=described.worker_id,
        group_id=described.group_id,
        epoch=described.epoch,
        mode=described.mode,
        model=described.model,
        uncertified=described.uncertified,
        standing=described.load.standing.value,
        certificate=f"{certified.certificate_id} ({certified.level})" if certified.level else "",
        uncertified_why="; ".join([certified.refusal, *map(str, certified.violations)]).strip("; "),
        batch_max_tokens=described.batch_max_tokens,
        asks_waiting=described.load.asks_waiting,
        leases=described.leases,
        ranks=[_rank_view(rank, described) for rank in range(described.ranks)],
        versions=described.versions,
        age_s=age_s,
    )


def _rank_view(rank: int, described: WorkerDescription) -> RankView:
    load = described.load
    counted = {counters.rank: counters for counters in described.rank_counters}
    counters = counted.get(rank) or _NOTHING
    return RankView(
        rank=rank,
        seats_used=_at(load.seats_used, rank),
        seats_held=_at(load.seats_held, rank),
        seats_max=described.seats_per_rank,
        blocks_used=_at(load.blocks_used, rank),
        blocks_max=described.blocks_per_rank,
        queued_tokens=_at(load.queued_tokens, rank),
        steps_by_kind=counters.steps_by_kind,
        dummy_steps=counters.dummy_steps,
        prompt_tokens=counters.prefill_tokens_computed,
        pulls=counters.pulls,
        pulled_bytes=counters.bytes_pulled,
        leases_live=counters.leases_live,
        guard_refusals=counters.guard_refusals,
    )


_NOTHING = RankCounters(
    rank=0,
    steps_by_kind={},
    dummy_steps=0,
    prefill_tokens_computed=0,
    pulls=0,
    bytes_pulled=0,
    leases_live=0,
    blocks_used=0,
)


def _at(values: Sequence[int], rank: int) -> int:
    return values[rank] if rank < len(values) else 0
