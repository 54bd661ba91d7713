"""What a worker says of itself <-> proto."""

from typing import Final

from splitwave.core.errors import Reason, ServingError
from splitwave.core.worker import LeaseCounts, RankCounters, Role, WorkerDescription, WorkerLoad
from splitwave.v1alpha1 import worker_service_pb2 as pb
from splitwave.wire.certification import (
    certification_from_proto,
    certification_to_proto,
    standing_from_proto,
    standing_to_proto,
)
from splitwave.wire.time import duration_from_proto, duration_to_proto
from splitwave.wire.waves import waves_from_proto, waves_to_proto

_ROLE: Final = {Role.PREFILL: pb.WORKER_ROLE_PREFILL, Role.DECODE: pb.WORKER_ROLE_DECODE}


def description_to_proto(description: WorkerDescription) -> pb.DescribeWorkerResponse:
    """The description as it travels."""
    return pb.DescribeWorkerResponse(
        worker_id=description.worker_id,
        role=_ROLE[description.role],
        group_id=description.group_id,
        epoch=description.epoch,
        mode=description.mode,
        model=description.model,
        ranks=description.ranks,
        block_size_tokens=description.block_size_tokens,
        blocks_per_rank=description.blocks_per_rank,
        block_bytes=description.block_bytes,
        seats_per_rank=description.seats_per_rank,
        model_len_max_tokens=description.model_len_max_tokens,
        batch_max_tokens=description.batch_max_tokens,
        kv_layout=description.kv_layout,
        uncertified=description.uncertified,
        versions=description.versions,
        load=load_to_proto(description.load),
        rank_counters=[_counters_to_proto(x) for x in description.rank_counters],
        lease_ttl=duration_to_proto(description.lease_ttl_s),
        leases=_leases_to_proto(description.leases),
        waves=None if description.waves is None else waves_to_proto(description.waves),
        certification=certification_to_proto(description.certification),
    )


def description_from_proto(message: pb.DescribeWorkerResponse) -> WorkerDescription:
    """The description as it arrived. Raises INTERNAL for a role that is not ours."""
    role = next((ours for ours, theirs in _ROLE.items() if theirs == message.role), None)
    if role is None:
        raise ServingError(Reason.INTERNAL, f"role: a worker says {message.role}, unknown here")
    return WorkerDescription(
        worker_id=message.worker_id,
        role=role,
        group_id=message.group_id,
        epoch=message.epoch,
        mode=message.mode,
        model=message.model,
        ranks=message.ranks,
        block_size_tokens=message.block_size_tokens,
        blocks_per_rank=message.blocks_per_rank,
        block_bytes=message.block_bytes,
        seats_per_rank=message.seats_per_rank,
        model_len_max_tokens=message.model_len_max_tokens,
        batch_max_tokens=message.batch_max_tokens,
        kv_layout=message.kv_layout,
        uncertified=message.uncertified,
        versions=dict(message.versions),
        load=load_from_proto(message.load),
        rank_counters=tuple(_counters_from_proto(x) for x in message.rank_counters),
        lease_ttl_s=duration_from_proto(message.lease_ttl),
        leases=_leases_from_proto(message.leases),
        waves=waves_from_proto(message.waves) if message.HasField("waves") else None,
        certification=certification_from_proto(message.certification),
    )


def load_to_proto(load: WorkerLoad) -> pb.WorkerLoad:
    """A worker's present state as it travels."""
    return pb.WorkerLoad(
        draining=load.draining,
        queued_tokens=load.queued_tokens,
        seats_used=load.seats_used,
        blocks_used=load.blocks_used,
        asks_waiting=load.asks_waiting,
        ready=load.ready,
        seats_held=load.seats_held,
        standing=standing_to_proto(load.standing),
    )


def load_from_proto(message: pb.WorkerLoad) -> WorkerLoad:
    """A worker's present state as it arrived."""
    return WorkerLoad(
        draining=message.draining,
        queued_tokens=tuple(message.queued_tokens),
        seats_used=tuple(message.seats_used),
        blocks_used=tuple(message.blocks_used),
        asks_waiting=message.asks_waiting,
        ready=message.ready,
        seats_held=tuple(message.seats_held),
        standing=standing_from_proto(message.standing),
    )


def _counters_to_proto(counters: RankCounters) -> pb.RankCounters:
    return pb.RankCounters(
        rank=counters.rank,
        steps_by_kind=counters.steps_by_kind,
        dummy_steps=counters.dummy_steps,
        prefill_tokens_computed=counters.prefill_tokens_computed,
        pulls=counters.pulls,
        bytes_pulled=counters.bytes_pulled,
        leases_live=counters.leases_live,
        blocks_used=counters.blocks_used,
        guard_refusals=counters.guard_refusals,
    )


def _counters_from_proto(message: pb.RankCounters) -> RankCounters:
    return RankCounters(
        rank=message.rank,
        steps_by_kind=dict(message.steps_by_kind),
        dummy_steps=message.dummy_steps,
        prefill_tokens_computed=message.prefill_tokens_computed,
        pulls=message.pulls,
        bytes_pulled=message.bytes_pulled,
        leases_live=message.leases_live,
        blocks_used=message.blocks_used,
        guard_refusals=dict(message.guard_refusals),
    )


def _leases_to_proto(leases: LeaseCounts) -> pb.LeaseCounts:
    return pb.LeaseCounts(
        started=leases.started,
        pulled=leases.pulled,
        released=leases.released,
        expired=leases.expired,
        live=leases.live,
    )


def _leases_from_proto(message: pb.LeaseCounts) -> LeaseCounts:
    return LeaseCounts(
        started=message.started,
        pulled=message.pulled,
        released=message.released,
        expired=message.expired,
        live=message.live,
    )


def describe_request(*, counters: bool = False) -> pb.DescribeWorkerRequest:
    """Ask what a worker is; `counters` asks its engines too."""
    return pb.DescribeWorkerRequest(counters=counters)


def watch_request(router_id: str, *, standing_only: bool = False) -> pb.WatchWorkerRequest:
    """Open a watch; `standing_only`: of how the group stands, and of no load."""
    return pb.WatchWorkerRequest(router_id=router_id, standing_only=standing_only)


def observation_to_proto(
    epoch: int, load: WorkerLoad, *, standing_only: bool = False
) -> pb.WatchWorkerResponse:
    """One observation of a watch."""
    told = WorkerLoad(standing=load.standing) if standing_only else load
    return pb.WatchWorkerResponse(epoch=epoch, load=load_to_proto(told))


def observation_from_proto(message: pb.WatchWorkerResponse) -> tuple[int, WorkerLoad]:
    """The group's epoch and the worker's present state."""
    return message.epoch, load_from_proto(message.load)


def drain_request(why: str) -> pb.DrainWorkerRequest:
    """Stop a worker's intake; `why` goes to its log."""
    return pb.DrainWorkerRequest(why=why)
