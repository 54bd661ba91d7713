"""Sending on a gRPC server stream."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import grpc.aio

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Writes(Protocol[T_contra]):
    """The part of a gRPC server's context that sends."""

    async def write(self, message: T_contra) -> None:
        """Send one message, waiting for the client's flow control."""


def emitter(context: Writes[T]) -> Callable[[T], Awaitable[None]]:
    """Return `context.write`, with a vanished client reported as cancellation.

    A client that cancels while we wait for flow control shows up as
    InternalError, and `context.cancelled()` is still False (grpcio 1.85).
    Without this it would be counted as our own INTERNAL error.
    """

    async def emit(message: T) -> None:
        try:
            await context.write(message)
        except grpc.aio.InternalError as error:
            raise asyncio.CancelledError("client went away") from error

    return emit
