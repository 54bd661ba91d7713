"""Every message says the same on both sides of the wire."""

import dataclasses

import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from splitwave.core import session
from splitwave.core.generation import FinishReason, Sampling
from splitwave.core.handoff import Handoff
from splitwave.core.mode_guard import StepViolation, ViolatingRequest
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.session import Ack, Hello, RouterMessage, Submit, Welcome, WorkerMessage
from splitwave.core.worker import (
    Certification,
    LeaseCounts,
    RankCounters,
    Role,
    WorkerDescription,
    WorkerLoad,
)
from splitwave.v1alpha1 import (
    decode_service_pb2,
    generation_pb2,
    kv_handoff_pb2,
    prefill_service_pb2,
    worker_service_pb2,
)
from splitwave.wire import generation as wire_generation
from splitwave.wire import handoff as wire_handoff
from splitwave.wire import prefill as wire_prefill
from splitwave.wire import session as wire_session
from splitwave.wire import time as wire_time
from splitwave.wire import worker as wire_worker
from tests.contract import messages

settings.register_profile("wire", parent=settings.get_profile("repeatable"), max_examples=60)
wire = settings.get_profile("wire")


@wire
@given(messages.samplings)
def test_sampling_goes_round(sampling: Sampling) -> None:
    sent = wire_generation.sampling_to_proto(sampling).SerializeToString()

    got = wire_generation.sampling_from_proto(generation_pb2.SamplingParams.FromString(sent))

    assert got == sampling


@wire
@given(messages.handoffs)
def test_a_handoff_goes_round(handoff: Handoff) -> None:
    sent = wire_handoff.handoff_to_proto(handoff).SerializeToString()

    assert wire_handoff.handoff_from_proto(kv_handoff_pb2.KvHandoff.FromString(sent)) == handoff


@wire
@given(messages.prefill_calls)
def test_a_prefill_call_goes_round(call: PrefillCall) -> None:
    sent = wire_prefill.prefill_call_to_proto(call).SerializeToString()

    got = wire_prefill.prefill_call_from_proto(prefill_service_pb2.PrefillRequest.FromString(sent))

    assert got == call


@wire
@given(messages.prefill_results())
def test_a_prefill_result_goes_round(result: PrefillResult) -> None:
    sent = wire_prefill.prefill_result_to_proto(result).SerializeToString()

    got = prefill_service_pb2.PrefillResponse.FromString(sent)

    assert wire_prefill.prefill_result_from_proto(got, messages.PROMPT) == result


@wire
@given(st.integers(1, 2**64 - 1), messages.router_messages)
def test_a_router_message_goes_round(number: int, message: RouterMessage) -> None:
    assert fed(number, message) == (number, message)


@wire
@given(messages.hellos | messages.acks)
def test_hello_and_ack_go_round_without_a_number(message: Hello | Ack) -> None:
    assert fed(7, message) == (0, message)


def fed(number: int, message: RouterMessage | Hello | Ack) -> object:
    """What a worker reads of one message that a router sends."""
    (sent,) = wire_session.router_message_to_proto(number, message)
    request = decode_service_pb2.SessionRequest.FromString(sent.SerializeToString())
    return wire_session.RouterMessages().feed(request)


@wire
@given(st.integers(1, 2**64 - 1), messages.worker_messages)
def test_a_worker_message_goes_round(number: int, message: WorkerMessage) -> None:
    got = received(number, message)

    assert got.number == number
    assert wire_session.worker_message_from_proto(got, messages.even) == message


@wire
@given(messages.welcomes | messages.acks)
def test_welcome_and_ack_go_round_without_a_number(message: Welcome | Ack) -> None:
    got = received(7, message)

    assert got.number == 0
    assert wire_session.worker_message_from_proto(got, messages.even) == message


def received(
    number: int, message: WorkerMessage | Welcome | Ack
) -> decode_service_pb2.SessionResponse:
    """What a router receives of one message that a worker sends."""
    sent = wire_session.worker_message_to_proto(number, message).SerializeToString()
    return decode_service_pb2.SessionResponse.FromString(sent)


@wire
@given(messages.descriptions)
def test_a_description_goes_round(description: WorkerDescription) -> None:
    sent = wire_worker.description_to_proto(description).SerializeToString()

    got = worker_service_pb2.DescribeWorkerResponse.FromString(sent)

    assert wire_worker.description_from_proto(got) == description


@wire
@given(messages.uint64, messages.loads)
def test_an_observation_goes_round(epoch: int, load: WorkerLoad) -> None:
    sent = wire_worker.observation_to_proto(epoch, load).SerializeToString()

    got = worker_service_pb2.WatchWorkerResponse.FromString(sent)

    assert wire_worker.observation_from_proto(got) == (epoch, load)


def test_requests_without_core_words_say_what_they_were_given() -> None:
    assert wire_prefill.release_request("h").handoff_id == "h"
    assert wire_prefill.lease_remaining_s(wire_prefill.confirm_response(2.5)) == 2.5
    assert wire_worker.describe_request(counters=True).counters
    assert not wire_worker.describe_request().counters
    assert wire_worker.watch_request("r1").router_id == "r1"
    assert wire_worker.drain_request("upgrade").why == "upgrade"


@wire
@given(st.integers(-(10**15), 10**15))
def test_a_duration_keeps_its_microseconds(us: int) -> None:
    seconds = us / 1e6

    assert wire_time.duration_from_proto(wire_time.duration_to_proto(seconds)) == pytest.approx(
        seconds, abs=1e-6
    )


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_a_finish_reason_goes_round(reason: FinishReason | None) -> None:
    sent = wire_generation.finish_reason_to_proto(reason)

    assert wire_generation.finish_reason_from_proto(sent) is reason


def test_the_finish_reasons_match_the_contract() -> None:
    theirs = {
        n.removeprefix("FINISH_REASON_")
        for n in generation_pb2.FinishReason.DESCRIPTOR.values_by_name
    }

    assert theirs - {"UNSPECIFIED"} == set(FinishReason.__members__)


def test_the_roles_match_the_contract() -> None:
    theirs = {
        n.removeprefix("WORKER_ROLE_")
        for n in worker_service_pb2.WorkerRole.DESCRIPTOR.values_by_name
    }

    assert theirs - {"UNSPECIFIED"} == set(Role.__members__)


BESIDE: dict[type, set[str]] = {PrefillCall: {"traceparent"}}
"""What travels in the call's metadata."""


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Sampling, generation_pb2.SamplingParams.DESCRIPTOR),
        (Handoff, kv_handoff_pb2.KvHandoff.DESCRIPTOR),
        (PrefillCall, prefill_service_pb2.PrefillRequest.DESCRIPTOR),
        (Submit, decode_service_pb2.Submit.DESCRIPTOR),
        (session.AskGrant, decode_service_pb2.AskGrant.DESCRIPTOR),
        (session.TakeGrant, decode_service_pb2.TakeGrant.DESCRIPTOR),
        (session.Granted, decode_service_pb2.Grant.DESCRIPTOR),
        (session.GroupLoad, decode_service_pb2.GroupLoad.DESCRIPTOR),
        (session.Accepted, decode_service_pb2.Accepted.DESCRIPTOR),
        (session.Frame, decode_service_pb2.Frame.DESCRIPTOR),
        (session.Pulled, decode_service_pb2.Pulled.DESCRIPTOR),
        (session.Hello, decode_service_pb2.Hello.DESCRIPTOR),
        (WorkerLoad, worker_service_pb2.WorkerLoad.DESCRIPTOR),
        (RankCounters, worker_service_pb2.RankCounters.DESCRIPTOR),
        (LeaseCounts, worker_service_pb2.LeaseCounts.DESCRIPTOR),
        (WorkerDescription, worker_service_pb2.DescribeWorkerResponse.DESCRIPTOR),
        (Certification, worker_service_pb2.Certification.DESCRIPTOR),
        (StepViolation, worker_service_pb2.StepViolation.DESCRIPTOR),
        (ViolatingRequest, worker_service_pb2.ViolatingRequest.DESCRIPTOR),
    ],
)
def test_both_sides_have_the_same_fields(ours: type, theirs: Descriptor) -> None:
    """A field added on one side only would be lost on the way without a word."""
    in_seconds = {
        field.name
        for field in theirs.fields
        if field.message_type is not None and field.message_type.name == "Duration"
    }
    names = {f.name + "_s" if f.name in in_seconds else f.name for f in theirs.fields}

    assert names == {field.name for field in dataclasses.fields(ours)} - BESIDE.get(ours, set())
