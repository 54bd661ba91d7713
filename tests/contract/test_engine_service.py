"""vLLM's gRPC engine service: every method is answered, every field served or refused by name."""

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from services.router.vllm_engine.sampling import (
    prompt_logprobs_of,
    prompt_of,
    read_sampling,
    refuse_unserved,
    text_options,
)
from services.router.vllm_engine.servicer import SERVICE_NAMES, VllmEngineServicer
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.core.sampling_limits import SamplingLimits

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"]
LIMITS = SamplingLimits(tokens_max=100, vocab_size=260)

SERVED = {"request_id", "tokenized", "text", "sampling_params", "stream"}
SERVED_SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "max_tokens", "min_tokens", "stop", "stop_token_ids",
    "skip_special_tokens", "ignore_eos", "n", "logprobs", "prompt_logprobs", "seed",
    "include_stop_str_in_output", "logit_bias",
}  # fmt: skip
WITHOUT_EFFECT = {
    "spaces_between_special_tokens",  # Of text, and the caller gets token ids.
    "grammar_from_first_token",  # Of a constraint, and those are refused.
}


def test_every_method_of_the_service_is_answered() -> None:
    assert (SERVICE.full_name,) == SERVICE_NAMES
    methods = {method.name for method in SERVICE.methods}

    assert {name for name in methods if not hasattr(VllmEngineServicer, name)} == set()


def filled(descriptor: Descriptor, field: FieldDescriptor) -> pb.GenerateRequest:
    """A request in which one field of the message is set to something."""
    request = pb.GenerateRequest()
    message = request if descriptor is pb.GenerateRequest.DESCRIPTOR else request.sampling_params
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value[1] = 1.0
    elif field.is_repeated and field.message_type is not None:
        value.add()
    elif field.is_repeated:
        value.append("x" if field.type == field.TYPE_STRING else 1)
    elif field.message_type is not None:
        value.SetInParent()
    else:
        setattr(message, field.name, type(value)(1))
    return request


def refusal(request: pb.GenerateRequest) -> ServingError | None:
    """What a request is refused with; None if it is not."""
    try:
        refuse_unserved(request)
    except ServingError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("descriptor", "served"),
    [
        (pb.GenerateRequest.DESCRIPTOR, SERVED),
        (pb.SamplingParams.DESCRIPTOR, SERVED_SAMPLING | WITHOUT_EFFECT),
    ],
    ids=["request", "sampling"],
)
def test_every_field_is_served_or_refused_by_its_name(
    descriptor: Descriptor, served: set[str]
) -> None:
    refused = {
        field.name: error
        for field in descriptor.fields
        if (error := refusal(filled(descriptor, field))) is not None
    }

    assert {field.name for field in descriptor.fields} - refused.keys() == served
    assert {error.reason for error in refused.values()} == {Reason.UNSUPPORTED_FEATURE}
    assert all(f"{name}: " in error.message for name, error in refused.items())


def test_a_field_of_a_later_version_is_refused_by_its_number() -> None:
    later = pb.GenerateRequest()
    later.sampling_params.ParseFromString(bytes([0xF8, 0x06, 0x01]))  # Field 111, varint 1.

    with pytest.raises(ServingError, match="sampling_params: has a field 111") as refused:
        refuse_unserved(later)

    assert refused.value.reason is Reason.UNSUPPORTED_FEATURE


def test_nothing_said_is_what_vllm_makes_of_it() -> None:
    read = read_sampling(pb.SamplingParams(), (259,), LIMITS)

    assert read == Sampling(max_tokens=100, eos_token_ids=(259,))
    assert text_options(pb.SamplingParams(), frozenset()).stop == ()
    assert prompt_logprobs_of(pb.SamplingParams(), 9) is None


def test_every_sampling_field_arrives() -> None:
    params = pb.SamplingParams(
        temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, frequency_penalty=0.5,
        presence_penalty=-0.5, repetition_penalty=1.25, max_tokens=9, min_tokens=2,
        stop_token_ids=[5], ignore_eos=True, logprobs=4, seed=7, logit_bias={65: 1.5},
        stop=["a"], include_stop_str_in_output=True, skip_special_tokens=True, n=3,
        prompt_logprobs=2,
    )  # fmt: skip

    read = read_sampling(params, (259,), LIMITS)
    text = text_options(params, frozenset({259}))

    assert read == Sampling(
        temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, frequency_penalty=0.5,
        presence_penalty=-0.5, repetition_penalty=1.25, max_tokens=9, min_tokens=2,
        stop_token_ids=(5,), ignore_eos=True, logprobs=4, seed=7, logit_bias={65: 1.5},
        eos_token_ids=(259,),
    )  # fmt: skip
    assert (text.stop, text.include_stop, text.skip_special_tokens) == (("a",), True, True)
    assert (text.min_tokens, text.stop_token_ids) == (2, frozenset({259}))
    assert prompt_logprobs_of(params, 9) == 2


def everything(params: pb.SamplingParams) -> tuple[int | None, Sampling]:
    return prompt_logprobs_of(params, 9), read_sampling(params, (), LIMITS)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (pb.SamplingParams(max_tokens=0), "max_tokens: 0 is below 1"),
        (pb.SamplingParams(max_tokens=101), "max_tokens: 101 is more than the 100"),
        (pb.SamplingParams(temperature=-1.0), "temperature: -1.0"),
        (pb.SamplingParams(top_p=1.5), "top_p: 1.5"),
        (pb.SamplingParams(logprobs=-1), "logprobs: -1"),
        (pb.SamplingParams(prompt_logprobs=-1), "prompt_logprobs: -1"),
        (pb.SamplingParams(stop_token_ids=[260]), "stop_token_ids: token id 260"),
        (pb.SamplingParams(logit_bias={-1: 1.0}), "logit_bias: token id -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_out_of_range_is_refused_with_its_field(
    params: pb.SamplingParams, message: str
) -> None:
    with pytest.raises(ServingError, match=message) as refused:
        everything(params)

    assert refused.value.reason is Reason.INVALID_REQUEST


def test_a_prompt_is_text_or_token_ids_or_an_error() -> None:
    assert prompt_of(pb.GenerateRequest(text="a")) == "a"
    tokenized = pb.TokenizedInput(original_text="a", input_ids=[7, 8])
    assert prompt_of(pb.GenerateRequest(tokenized=tokenized)) == [7, 8]
    with pytest.raises(ServingError, match="input: absent"):
        prompt_of(pb.GenerateRequest())
