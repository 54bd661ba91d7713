"""What is wrong with a message is said by the name of its field."""

from collections.abc import Callable

import pytest

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, Sampling, TokenLogprob
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.sampling_limits import SamplingLimits
from splitwave.core.session import (
    Accepted,
    AskGrant,
    Ended,
    Frame,
    Granted,
    Grants,
    GroupLoad,
    Hello,
    TakeGrant,
    Welcome,
    WorkerMessage,
)
from splitwave.v1alpha1 import decode_service_pb2 as pb
from splitwave.v1alpha1 import generation_pb2, prefill_service_pb2, worker_service_pb2
from splitwave.wire.generation import (
    finish_reason_from_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    sampling_from_client,
    sampling_from_proto,
    sampling_to_proto,
)
from splitwave.wire.prefill import (
    prefill_call_from_proto,
    prefill_call_to_proto,
    prefill_result_from_proto,
    prefill_result_to_proto,
)
from splitwave.wire.session import (
    RouterMessages,
    router_message_to_proto,
    worker_message_from_proto,
    worker_message_to_proto,
)
from splitwave.wire.worker import description_from_proto

Params = generation_pb2.SamplingParams


LIMITS = SamplingLimits(tokens_max=100, vocab_size=1000)


def from_client(message: Params) -> Sampling:
    return sampling_from_client(message, LIMITS, (2,))


def test_a_client_gets_the_defaults_that_the_contract_names() -> None:
    assert from_client(Params()) == Sampling(max_tokens=100, eos_token_ids=(2,))


def test_a_clients_zero_is_not_an_absence() -> None:
    greedy = from_client(Params(temperature=0.0, seed=0, logprobs=0))

    assert (greedy.temperature, greedy.seed, greedy.logprobs) == (0.0, 0, 0)


BAD = {
    "max_tokens": [Params(max_tokens=0), Params(max_tokens=101)],
    "min_tokens": [Params(max_tokens=3, min_tokens=4)],
    "temperature": [Params(temperature=x) for x in (-0.5, float("nan"), float("inf"))],
    "top_p": [Params(top_p=x) for x in (0.0, -1.0, 1.5, float("nan"))],
    "min_p": [Params(min_p=x) for x in (-0.5, 1.5, float("nan"))],
    "presence_penalty": [Params(presence_penalty=x) for x in (-2.5, 2.5, float("nan"))],
    "frequency_penalty": [Params(frequency_penalty=x) for x in (-2.5, 2.5, float("nan"))],
    "repetition_penalty": [
        Params(repetition_penalty=x) for x in (0.0, -1.0, float("nan"), float("inf"))
    ],
    "logit_bias": [
        Params(logit_bias={1: 100.5}),
        Params(logit_bias={1: float("nan")}),
        Params(logit_bias={1000: 1.0}),
        Params(logit_bias=dict.fromkeys(range(1025), 1.0)),
    ],
    "stop_token_ids": [Params(stop_token_ids=[1000]), Params(stop_token_ids=[1] * 129)],
    "eos_token_ids": [Params(eos_token_ids=[2])],
    "logprobs": [Params(logprobs=21)],
}
NO_BAD_VALUE = {"top_k", "seed", "ignore_eos"}
"""Fields of which every value that the message can hold is good."""


def test_every_sampling_field_is_held_against_its_range() -> None:
    assert set(BAD) | NO_BAD_VALUE == {field.name for field in Params.DESCRIPTOR.fields}


@pytest.mark.parametrize(
    ("name", "message"), [(name, message) for name, bad in BAD.items() for message in bad]
)
def test_a_client_is_told_the_field_and_the_fix(name: str, message: Params) -> None:
    with pytest.raises(ServingError) as caught:
        from_client(message)

    assert caught.value.reason is Reason.INVALID_REQUEST
    assert caught.value.message.startswith(f"{name}: ")
    assert "; " in caught.value.message


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "top_p", "repetition_penalty"])
def test_a_pool_fills_nothing_in(name: str) -> None:
    message = sampling_to_proto(Sampling(max_tokens=1))
    message.ClearField(name)  # type: ignore[arg-type]  # the stub wants a literal

    with pytest.raises(ServingError, match=f"sampling.{name}: absent"):
        sampling_from_proto(message)


CALL = PrefillCall(
    request_id="r", handoff_id="r/0/1", token_ids=[1], sampling=Sampling(max_tokens=1),
    keep_first_token=True, kv_layout="k",
)  # fmt: skip


@pytest.mark.parametrize("name", ["request_id", "handoff_id", "token_ids"])
def test_a_prefill_call_without_an_essential_is_refused_by_name(name: str) -> None:
    message = prefill_call_to_proto(CALL)
    message.ClearField(name)  # type: ignore[arg-type]  # the stub wants a literal

    with pytest.raises(ServingError, match=f"{name}: empty"):
        prefill_call_from_proto(message)


def test_a_prefill_result_is_held_or_ended() -> None:
    neither = prefill_service_pb2.PrefillResponse(token_id=1)
    ended = prefill_result_to_proto(PrefillResult(finish_reason=FinishReason.STOP))
    ended.handoff.handoff_id = "h"

    for message in (neither, ended):
        with pytest.raises(ServingError, match="handoff: a peer sent") as caught:
            prefill_result_from_proto(message)
        assert caught.value.reason is Reason.INTERNAL


def refused_session(request: pb.SessionRequest) -> str:
    with pytest.raises(ServingError) as caught:
        RouterMessages().feed(request)
    assert caught.value.reason is Reason.INVALID_REQUEST
    return caught.value.message


def test_a_session_without_sense_is_refused_by_the_field() -> None:
    hello = pb.Hello(router_id="r", session_id="s")
    (ask,) = router_message_to_proto(1, AskGrant("a", 1, 1.0))
    ask.ask.blocks = 0
    (take,) = router_message_to_proto(1, TakeGrant("g", 1, 1.0))
    take.take.blocks = 0

    assert refused_session(pb.SessionRequest(number=1)).startswith("body: ")
    assert refused_session(pb.SessionRequest(number=1, hello=hello)).startswith("number: 1")
    assert refused_session(pb.SessionRequest(cancel=pb.CancelAttempts())).startswith("number: 0")
    assert refused_session(ask).startswith("ask.blocks: ")
    assert refused_session(take).startswith("take.blocks: ")


@pytest.mark.parametrize("name", ["router_id", "session_id"])
def test_a_hello_without_a_name_is_refused(name: str) -> None:
    (request,) = router_message_to_proto(0, Hello(router_id="r", session_id="s"))
    request.hello.ClearField(name)  # type: ignore[arg-type]  # the stub wants a literal

    assert refused_session(request).startswith(f"hello.{name}: ")


FRAME = Frame(
    step=1,
    slots=[4, 7],
    offsets=[0, 3],
    token_counts=[1, 2],
    token_ids=[9, 8, 7],
    logprobs=[TokenLogprob(9, -0.5, 1, ((9, -0.5), (8, -1.0)))],
    ended=[Ended(slot=4, attempt_id="a", finish_reason=FinishReason.STOP)],
)
WELCOME = Welcome(
    worker_id="d0", group_id="g", epoch=1, reattached=False, received_number=0, reattach_s=2.0,
    kv_layout="k", block_size_tokens=16, grant_blocks=16, model_len_max_tokens=64,
    blocks_per_rank=8,
)  # fmt: skip
GRANTS = Grants((Granted("g1", 0, 4, 2.0),), (), GroupLoad(1, 1, 0, False))


def broken(message: WorkerMessage | Welcome, damage: Callable[[pb.SessionResponse], object]) -> str:
    sent = worker_message_to_proto(1, message)
    damage(sent)
    with pytest.raises(ServingError) as caught:
        worker_message_from_proto(sent, lambda slot: slot == 4)
    assert caught.value.reason is Reason.INTERNAL
    return caught.value.message


@pytest.mark.parametrize(
    ("column", "damage"),
    [
        ("frame.offsets", lambda m: m.frame.offsets.append(1)),
        ("frame.token_counts", lambda m: m.frame.token_counts.append(1)),
        ("frame.token_counts", lambda m: m.frame.token_counts.__setitem__(0, 0)),
        ("frame.token_ids", lambda m: m.frame.token_ids.append(1)),
        ("frame.slots", lambda m: m.frame.slots.__setitem__(1, 4)),
        ("logprobs.logprobs", lambda m: m.frame.logprobs.logprobs.append(-1.0)),
        ("logprobs.ranks", lambda m: m.frame.logprobs.ranks.append(1)),
        ("logprobs.top_counts", lambda m: m.frame.logprobs.top_counts.append(0)),
        ("logprobs.top_counts", lambda m: m.frame.logprobs.top_token_ids.append(1)),
        ("logprobs.logprobs", lambda m: m.frame.ClearField("logprobs")),
        ("frame.ended.failure", lambda m: m.frame.ended[0].failure.SetInParent()),
        ("frame.ended.failure", lambda m: m.frame.ended[0].ClearField("finish_reason")),
        ("finish_reason", lambda m: setattr(m.frame.ended[0], "finish_reason", 9)),
        ("number", lambda m: setattr(m, "number", 0)),
    ],
)
def test_a_frame_whose_columns_disagree_names_one(
    column: str, damage: Callable[[pb.SessionResponse], object]
) -> None:
    assert broken(FRAME, damage).startswith(f"{column}: ")


def test_rows_that_nobody_asked_for_are_refused() -> None:
    sent = worker_message_to_proto(1, FRAME)

    with pytest.raises(ServingError, match=r"logprobs\.logprobs: 1 rows for 0 tokens"):
        worker_message_from_proto(sent, lambda _: False)


def test_another_message_of_a_worker_that_makes_no_sense_names_its_field() -> None:
    accepted = Accepted("a", 1, 0)

    assert broken(accepted, lambda m: m.ClearField("accepted")).startswith("body: ")
    assert broken(GRANTS, lambda m: setattr(m.grants.grants[0], "blocks", 0)).startswith(
        "grants.blocks: "
    )
    assert broken(GRANTS, lambda m: setattr(m.grants.grants[0], "grant_id", "")).startswith(
        "grants.grant_id: "
    )
    assert broken(WELCOME, lambda m: setattr(m, "number", 1)).startswith("number: ")


@pytest.mark.parametrize(
    "name", ["block_size_tokens", "grant_blocks", "model_len_max_tokens", "blocks_per_rank"]
)
def test_a_welcome_without_a_size_is_refused(name: str) -> None:
    assert broken(WELCOME, lambda m: m.welcome.ClearField(name)).startswith(f"welcome.{name}: ")  # type: ignore[arg-type]  # the stub wants a literal


def test_logprobs_need_a_row_a_token() -> None:
    message = logprobs_to_proto(FRAME.logprobs)
    assert message is not None

    with pytest.raises(ServingError, match="1 rows for 2 tokens"):
        logprobs_from_proto(message, [9, 8])


def test_what_is_in_no_catalogue_is_refused() -> None:
    with pytest.raises(ServingError, match="finish_reason: a peer sent 9"):
        finish_reason_from_proto(9)  # type: ignore[arg-type]  # any number may come
    with pytest.raises(ServingError, match="role: a worker says 0"):
        description_from_proto(worker_service_pb2.DescribeWorkerResponse())
