"""How many tokens a client may ask for, by each front door, and what it gets unasked."""

from collections.abc import Callable

import msgspec
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2

from services.router.openai.schema import ChatBody, CompletionBody
from services.router.vllm_engine.sampling import read_sampling
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.core.sampling_limits import SamplingLimits
from splitwave.v1alpha1 import generation_pb2
from splitwave.wire.generation import sampling_from_client

LEFT, CERTIFIED = 100, 60


def over_grpc(tokens: int | None, limits: SamplingLimits) -> Sampling:
    return sampling_from_client(generation_pb2.SamplingParams(max_tokens=tokens), limits, (2,))


def over_engine_service(tokens: int | None, limits: SamplingLimits) -> Sampling:
    return read_sampling(vllm_engine_pb2.SamplingParams(max_tokens=tokens), (2,), limits)


def of_completion(tokens: int | None, limits: SamplingLimits) -> Sampling:
    body = msgspec.convert({"model": "m", "prompt": "p", "max_tokens": tokens}, CompletionBody)
    return body.sampling((2,), limits)


def of_chat(tokens: int | None, limits: SamplingLimits) -> Sampling:
    messages = [{"role": "user", "content": "p"}]
    given = {"model": "m", "messages": messages, "max_completion_tokens": tokens}
    return msgspec.convert(given, ChatBody).sampling((2,), limits)


Door = Callable[[int | None, SamplingLimits], Sampling]
DOORS = pytest.mark.parametrize("door", [over_grpc, over_engine_service, of_completion, of_chat])


@DOORS
def test_more_than_any_pool_is_certified_for_is_not_called_more_than_the_context(
    door: Door,
) -> None:
    """The fleet refuses it by the limit's name: another deployment may serve it."""
    limits = SamplingLimits(tokens_max=LEFT, certified_max=CERTIFIED, vocab_size=260)

    assert door(CERTIFIED + 1, limits).max_tokens == CERTIFIED + 1
    assert door(LEFT, limits).max_tokens == LEFT
    with pytest.raises(ServingError, match="leaves of the model's context") as refused:
        door(LEFT + 1, limits)
    assert refused.value.reason is Reason.INVALID_REQUEST


@DOORS
@pytest.mark.parametrize(
    ("left", "certified", "unasked"), [(100, 60, 60), (9, 60, 9), (12, None, 12), (12, 5, 5)]
)
def test_who_names_no_number_gets_what_is_left_and_may_be_served(
    door: Door, left: int, certified: int | None, unasked: int
) -> None:
    limits = SamplingLimits(tokens_max=left, certified_max=certified, vocab_size=260)
    at_most = 16 if door is of_completion else unasked  # OpenAI's default of completions

    assert door(None, limits).max_tokens == min(unasked, at_most)
