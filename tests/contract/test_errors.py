"""Every reason keeps its meaning across the wire, in every form that it takes."""

import grpc
import grpc.aio
import pytest
from grpc.aio import AioRpcError, Metadata
from hypothesis import given

from splitwave.core.errors import Reason, ServingError
from splitwave.v1alpha1 import error_pb2
from splitwave.wire.errors import (
    CODE,
    HTTP_STATUS,
    abort,
    failure_from_proto,
    failure_to_proto,
    from_rpc_error,
    openai_error_body,
    retry_after_header,
    to_status,
)
from tests.contract import messages

DETAILS = "grpc-status-details-bin"


def rpc_error(code: grpc.StatusCode, details: bytes = b"", message: str = "") -> AioRpcError:
    trailing = Metadata((DETAILS, details)) if details else Metadata()
    return AioRpcError(code, Metadata(), trailing, message)


def test_catalogues_match() -> None:
    wire = {name.removeprefix("ERROR_REASON_") for name, _ in error_pb2.ErrorReason.items()}

    assert wire - {"UNSPECIFIED"} == set(Reason.__members__)
    assert set(CODE) == set(HTTP_STATUS) == set(Reason)


@pytest.mark.parametrize("reason", Reason)
def test_a_status_goes_round(reason: Reason) -> None:
    status = to_status(ServingError(reason, "why", retry_after_s=0.25))
    error = rpc_error(CODE[reason], status.SerializeToString(), status.message)

    assert messages.same(from_rpc_error(error)) == (reason, "why", 0.25)
    assert status.code == CODE[reason].value[0]


@given(messages.failures)
def test_a_failure_goes_round(error: messages.Failure) -> None:
    sent = failure_to_proto(error).SerializeToString()

    assert messages.same(failure_from_proto(error_pb2.Failure.FromString(sent))) == (
        messages.same(error)
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, Reason.WORKER_LOST),
        (grpc.StatusCode.UNKNOWN, Reason.WORKER_LOST),
        (grpc.StatusCode.INTERNAL, Reason.WORKER_LOST),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED),
        (grpc.StatusCode.CANCELLED, Reason.CANCELLED),
        (grpc.StatusCode.UNIMPLEMENTED, Reason.INTERNAL),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.INTERNAL),
    ],
)
def test_a_reason_is_inferred_for_a_peer_that_sent_none(
    code: grpc.StatusCode, reason: Reason
) -> None:
    assert from_rpc_error(rpc_error(code)).reason is reason


def test_details_that_are_not_a_status_count_as_none() -> None:
    error = rpc_error(grpc.StatusCode.UNAVAILABLE, b"\xff\xff", "socket closed")

    assert messages.same(from_rpc_error(error)) == (Reason.WORKER_LOST, "socket closed", None)


def test_a_reason_of_another_domain_is_not_ours() -> None:
    status = to_status(ServingError(Reason.PREEMPTED, "why"))
    other = status.SerializeToString().replace(b"splitwave.v1alpha1", b"elsewhere.v1alpha1")

    error = rpc_error(grpc.StatusCode.UNAVAILABLE, other)

    assert from_rpc_error(error).reason is Reason.WORKER_LOST


def test_a_reason_that_is_newer_than_ours_is_a_broken_contract() -> None:
    status = to_status(ServingError(Reason.PREEMPTED, "why")).SerializeToString()
    newer = rpc_error(grpc.StatusCode.UNAVAILABLE, status.replace(b"PREEMPTED", b"POSTEMPTE"))

    assert from_rpc_error(newer).reason is Reason.INTERNAL
    # Field 1 is the reason, as a varint: 99 is in no catalogue.
    assert failure_from_proto(error_pb2.Failure.FromString(b"\x08\x63")).reason is Reason.INTERNAL
    assert failure_from_proto(error_pb2.Failure()).reason is Reason.INTERNAL


@pytest.mark.parametrize("reason", Reason)
async def test_an_aborted_call_tells_its_reason_over_real_grpc(reason: Reason) -> None:
    sent = ServingError(reason, "field: fix it", retry_after_s=1.5)

    async def refuse(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await abort(context, sent)

    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(refuse)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Refuse", {"Call": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
            call = channel.unary_unary("/test.Refuse/Call")
            with pytest.raises(AioRpcError) as caught:
                await call(b"")
    finally:
        await server.stop(0)

    assert caught.value.code() is CODE[reason]
    assert messages.same(from_rpc_error(caught.value)) == messages.same(sent)


@pytest.mark.parametrize("reason", Reason)
def test_an_http_error_is_never_a_success_and_names_its_reason(reason: Reason) -> None:
    body = openai_error_body(ServingError(reason, "why"))["error"]

    assert 400 <= HTTP_STATUS[reason] < 600
    assert body["code"] == reason.value
    assert body["message"] == "why"
    assert (body["type"] == "server_error") is (HTTP_STATUS[reason] >= 500)


@pytest.mark.parametrize(
    ("reason", "message", "param"),
    [
        (Reason.INVALID_REQUEST, "top_p: 2 is not in (0, 1]", "top_p"),
        (Reason.INVALID_REQUEST, "messages[0].role: unknown", "messages[0].role"),
        (Reason.INVALID_REQUEST, "the body is not JSON: expected {", None),
        (Reason.OVERLOADED, "decode: no room", None),
    ],
)
def test_the_field_that_a_message_begins_with_is_openais_param(
    reason: Reason, message: str, param: str | None
) -> None:
    assert openai_error_body(ServingError(reason, message))["error"]["param"] == param


def test_retry_headers_say_when_or_never() -> None:
    waits = ServingError(Reason.OVERLOADED, "full", retry_after_s=1.25)

    assert retry_after_header(waits) == {"Retry-After": "2", "retry-after-ms": "1250"}
    assert retry_after_header(ServingError(Reason.INTERNAL, "bug")) == {}
    assert retry_after_header(ServingError(Reason.REQUEST_QUARANTINED, "no")) == {
        "x-should-retry": "false"
    }
