"""The prefill workers that answer for handoffs."""

import asyncio
import logging
from collections import OrderedDict
from typing import Protocol

import grpc.aio

from splitwave.core.errors import Reason, ServingError
from splitwave.core.handoff import Handoff
from splitwave.runtime.tracing import as_metadata
from splitwave.wire.channel import CHANNEL_OPTIONS
from splitwave.wire.errors import from_rpc_error
from splitwave.wire.prefill import confirm_request, lease_remaining_s, release_request
from splitwave.wire.stubs import prefill_stub

log = logging.getLogger(__name__)

CHANNELS_MAX = 256
"""Connections that are kept; the one used longest ago goes first."""
CLOSE_GRACE_S = 2.0
"""What calls on a connection get when it goes."""


class Peers(Protocol):
    """Prefill workers, by what a handoff says. Both methods raise ServingError."""

    async def confirm(self, handoff: Handoff, traceparent: str = "") -> float:
        """Ask whether the lease was live until now, and end it as pulled.

        `traceparent` names the span that asks; the lease's links to it.
        Returns the seconds it had left; raises HANDOFF_EXPIRED or EPOCH_MISMATCH if what was
        read may be another request's.
        """

    async def release(self, handoff: Handoff, traceparent: str = "") -> None:
        """End a handoff that nobody will pull. Idempotent."""


def failure_of_a_call(failure: BaseException) -> ServingError:
    """What a call to a peer failed with, whatever it raised; a cancellation of ours is raised.

    gRPC cancels whoever awaits a call whose channel is closed, and raises UsageError for a
    call on such a channel. Nobody has cancelled the task then, and what it cares for still
    needs its end.
    """
    if isinstance(failure, ServingError):
        return failure
    task = asyncio.current_task()
    if isinstance(failure, asyncio.CancelledError) and task is not None and task.cancelling():
        raise failure
    log.error("a call to a prefill worker failed", exc_info=failure)
    return ServingError(Reason.WORKER_LOST, f"the call failed: {type(failure).__name__}")


class GrpcPeers:
    """Prefill workers over gRPC, one channel each."""

    def __init__(self, *, confirm_timeout_s: float, release_timeout_s: float) -> None:
        self._confirm_timeout_s = confirm_timeout_s
        self._release_timeout_s = release_timeout_s
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    async def confirm(self, handoff: Handoff, traceparent: str = "") -> float:
        """See Peers."""
        stub = prefill_stub(self._channel(handoff.prefill_address))
        try:
            answer = await stub.ConfirmHandoff(
                confirm_request(handoff),
                timeout=self._confirm_timeout_s,
                metadata=as_metadata(traceparent),
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return lease_remaining_s(answer)

    async def release(self, handoff: Handoff, traceparent: str = "") -> None:
        """See Peers."""
        stub = prefill_stub(self._channel(handoff.prefill_address))
        try:
            await stub.ReleaseHandoff(
                release_request(handoff.handoff_id),
                timeout=self._release_timeout_s,
                metadata=as_metadata(traceparent),
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def close(self) -> None:
        """Close every channel."""
        for address in list(self._channels):
            self._drop(address)
        await asyncio.gather(*self._closing)

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            self._channels[address] = channel
            if len(self._channels) > CHANNELS_MAX:
                self._drop(next(iter(self._channels)))
        self._channels.move_to_end(address)
        return channel

    def _drop(self, address: str) -> None:
        closing = asyncio.create_task(self._channels.pop(address).close(CLOSE_GRACE_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
