"""The waves of a worker's group <-> proto. Buckets of wake latencies are left to the metrics."""

from splitwave.core.wave_message import RankWork
from splitwave.core.wave_record import RankWave, WaveStatus
from splitwave.v1alpha1 import worker_service_pb2 as pb
from splitwave.wire.time import duration_from_proto, duration_to_proto


def waves_to_proto(waves: WaveStatus) -> pb.WaveStatus:
    """The waves as they travel."""
    return pb.WaveStatus(
        state=waves.state,
        wave=waves.wave,
        why=waves.why,
        waves=waves.waves,
        starts_by_why=waves.starts_by_why,
        messages=waves.messages,
        ranks=[_rank_to_proto(rank) for rank in waves.ranks],
    )


def waves_from_proto(message: pb.WaveStatus) -> WaveStatus:
    """The waves as they arrived."""
    return WaveStatus(
        state=message.state,
        wave=message.wave,
        why=message.why,
        waves=message.waves,
        starts_by_why=dict(message.starts_by_why),
        messages=message.messages,
        ranks=tuple(_rank_from_proto(rank) for rank in message.ranks),
    )


def _rank_to_proto(rank: RankWave) -> pb.RankWave:
    work = rank.work
    return pb.RankWave(
        rank=rank.rank,
        wave=rank.wave,
        stepping=rank.stepping,
        held=rank.held,
        waiting=rank.waiting,
        running=rank.running,
        steps_by_kind=work.steps_by_kind,
        dummy_steps=work.dummy_steps,
        votes=work.votes,
        tokens=work.tokens,
        padded_tokens=work.padded_tokens,
        silence=duration_to_proto(rank.silence_s) if rank.silence_s >= 0 else None,
        wake=duration_to_proto(rank.wake_s),
    )


def _rank_from_proto(message: pb.RankWave) -> RankWave:
    return RankWave(
        rank=message.rank,
        wave=message.wave,
        stepping=message.stepping,
        held=message.held,
        waiting=message.waiting,
        running=message.running,
        work=RankWork(
            steps_by_kind=dict(message.steps_by_kind),
            dummy_steps=message.dummy_steps,
            votes=message.votes,
            tokens=message.tokens,
            padded_tokens=message.padded_tokens,
        ),
        silence_s=duration_from_proto(message.silence) if message.HasField("silence") else -1.0,
        wake_s=duration_from_proto(message.wake),
    )
