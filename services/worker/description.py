"""What a worker of either role says of its group."""

from splitwave.core.mode_guard import Standing
from splitwave.core.wave_record import WaveStatus
from splitwave.core.worker import Certification, WorkerDescription, WorkerLoad
from splitwave.engine.port import GroupDescription


def describe_group(
    worker_id: str,
    group: GroupDescription,
    load: WorkerLoad,
    certification: Certification,
    waves: WaveStatus | None,
) -> WorkerDescription:
    """The description of a worker, all but what only one role has."""
    return WorkerDescription(
        worker_id=worker_id,
        role=group.role,
        group_id=group.group_id,
        epoch=group.epoch,
        mode=group.mode,
        model=group.model,
        ranks=group.ranks,
        block_size_tokens=group.block_size_tokens,
        blocks_per_rank=group.blocks_per_rank,
        block_bytes=group.block_bytes,
        seats_per_rank=group.seats_per_rank,
        model_len_max_tokens=group.model_len_max_tokens,
        batch_max_tokens=group.batch_max_tokens,
        kv_layout=group.kv_layout,
        uncertified=load.standing is not Standing.CERTIFIED,
        certification=certification,
        versions=group.versions,
        load=load,
        waves=waves,
    )
