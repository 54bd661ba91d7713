"""What a caller of the engine service asks for, in our words.

Field meanings: `vllm_engine.proto` of the package smg-grpc-proto. Where that file has no
presence for a number whose zero makes no sense (top_p, repetition_penalty, n), zero is absent.
"""

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.core.sampling_limits import (
    SamplingLimits,
    check_prompt_logprobs,
    check_sampling,
)
from splitwave.text import TextOptions

PACKAGE: Final = f"smg-grpc-proto {version('smg-grpc-proto')}"

_UNSERVED: Final = {
    "kv_transfer_params": "prefill and decode are split behind this service",
    "kv_transfer_params_json": "prefill and decode are split behind this service",
    "data_parallel_rank": "ranks are chosen by the workers behind this service",
    "mm_inputs": "only text is served",
    "extra_mm_inputs": "only text is served",
    "media_refs": "only text is served",
}
"""Fields of a request that would change its answer, and why they cannot be served."""

_UNSERVED_SAMPLING: Final = {
    "truncate_prompt_tokens": "a prompt is never cut; cut it before you send it",
    "json_schema": "structured output is not served",
    "regex": "structured output is not served",
    "grammar": "structured output is not served",
    "structural_tag": "structured output is not served",
    "json_object": "structured output is not served",
    "choice": "structured output is not served",
}


def refuse_unserved(request: pb.GenerateRequest) -> None:
    """Raise UNSUPPORTED_FEATURE, naming the field, for what this service cannot do."""
    _refuse_named(request, _UNSERVED)
    _refuse_named(request.sampling_params, _UNSERVED_SAMPLING, "sampling_params.")
    for message, where in ((request, "request"), (request.sampling_params, "sampling_params")):
        unknown = UnknownFieldSet(message)
        if len(unknown):
            raise _unsupported(
                f"{where}: has a field {unknown[0].field_number} that {PACKAGE} does not"
                " know; leave it out, or update that package here"
            )


def read_sampling(
    params: pb.SamplingParams, eos_token_ids: Sequence[int], limits: SamplingLimits
) -> Sampling:
    """Checked sampling. Raises INVALID_REQUEST, naming the field and the fix.

    Absent max_tokens is what the prompt leaves of the context, as with vLLM, or of it what the
    pool may serve.
    """
    left = limits.tokens_unasked or 1
    sampling = Sampling(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else left,
        min_tokens=params.min_tokens,
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed if params.HasField("seed") else None,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        logit_bias=dict(params.logit_bias),
        stop_token_ids=tuple(params.stop_token_ids),
        eos_token_ids=tuple(eos_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
    )
    check_sampling(sampling, limits)
    return sampling


def prompt_logprobs_of(params: pb.SamplingParams, prompt_tokens: int) -> int | None:
    """Log probabilities of the prompt. Raises INVALID_REQUEST for more than are served."""
    count = int(params.prompt_logprobs) if params.HasField("prompt_logprobs") else None
    check_prompt_logprobs(count, prompt_tokens)
    return count


def text_options(params: pb.SamplingParams, ending_ids: frozenset[int]) -> TextOptions:
    """What stop strings need: the text itself stays here, the caller gets token ids."""
    return TextOptions(
        stop=tuple(params.stop),
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=ending_ids,
    )


def prompt_of(request: pb.GenerateRequest) -> str | Sequence[int]:
    """The prompt: text, or token ids. Raises INVALID_REQUEST if there is none."""
    match request.WhichOneof("input"):
        case "text":
            return str(request.text)
        case "tokenized":
            return list(request.tokenized.input_ids)
    raise ServingError(Reason.INVALID_REQUEST, "input: absent; set tokenized or text")


def _refuse_named(message: Message, unserved: dict[str, str], prefix: str = "") -> None:
    for field in _set_fields(message):
        if field in unserved:
            raise _unsupported(f"{prefix}{field}: {unserved[field]}")


def _set_fields(message: Message) -> Iterable[str]:
    return (descriptor.name for descriptor, _ in message.ListFields())


def _unsupported(message: str) -> ServingError:
    return ServingError(Reason.UNSUPPORTED_FEATURE, message)
