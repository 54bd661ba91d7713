"""Where stubs are made: everyone else calls services through these."""

import grpc.aio

from splitwave.v1alpha1 import (
    decode_service_pb2_grpc,
    generate_service_pb2_grpc,
    prefill_service_pb2_grpc,
    worker_service_pb2_grpc,
)


def generate_stub(channel: grpc.aio.Channel) -> generate_service_pb2_grpc.GenerateServiceStub:
    """A router, as its clients call it."""
    return generate_service_pb2_grpc.GenerateServiceStub(channel)


def prefill_stub(channel: grpc.aio.Channel) -> prefill_service_pb2_grpc.PrefillServiceStub:
    """A prefill worker."""
    return prefill_service_pb2_grpc.PrefillServiceStub(channel)


def decode_stub(channel: grpc.aio.Channel) -> decode_service_pb2_grpc.DecodeServiceStub:
    """A decode worker."""
    return decode_service_pb2_grpc.DecodeServiceStub(channel)


def worker_stub(channel: grpc.aio.Channel) -> worker_service_pb2_grpc.WorkerServiceStub:
    """A worker of either role, as it describes itself and drains."""
    return worker_service_pb2_grpc.WorkerServiceStub(channel)
