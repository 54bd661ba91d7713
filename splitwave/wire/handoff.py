"""Handoff <-> KvHandoff."""

from splitwave.core.handoff import Handoff
from splitwave.v1alpha1 import kv_handoff_pb2 as pb
from splitwave.wire.time import duration_from_proto, duration_to_proto


def handoff_to_proto(handoff: Handoff) -> pb.KvHandoff:
    """The offer as it travels."""
    return pb.KvHandoff(
        handoff_id=handoff.handoff_id,
        prefill_worker_id=handoff.prefill_worker_id,
        prefill_address=handoff.prefill_address,
        group_id=handoff.group_id,
        epoch=handoff.epoch,
        rank=handoff.rank,
        prompt_tokens=handoff.prompt_tokens,
        block_count=handoff.block_count,
        kv_layout=handoff.kv_layout,
        lease_remaining=duration_to_proto(handoff.lease_remaining_s),
        connector=handoff.connector,
        connector_params=handoff.connector_params,
    )


def handoff_from_proto(message: pb.KvHandoff) -> Handoff:
    """The offer as it arrived; whether it can be pulled is for the receiver to judge."""
    return Handoff(
        handoff_id=message.handoff_id,
        prefill_worker_id=message.prefill_worker_id,
        prefill_address=message.prefill_address,
        group_id=message.group_id,
        epoch=message.epoch,
        rank=message.rank,
        prompt_tokens=message.prompt_tokens,
        block_count=message.block_count,
        kv_layout=message.kv_layout,
        lease_remaining_s=duration_from_proto(message.lease_remaining),
        connector=message.connector,
        connector_params=message.connector_params,
    )
