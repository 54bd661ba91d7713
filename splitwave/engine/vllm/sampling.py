"""Our sampling in vLLM's words, with the end-of-sequence work that vLLM's front end would do."""

from typing import Any  # vLLM's SamplingParams and its arguments are untyped here

from splitwave.core.generation import Sampling, first_token_is_kept


def arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams; end-of-sequence ids are not among them."""
    return {
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": sampling.logprobs,
        "detokenize": False,
    }


def first_token_only(sampling: Sampling) -> Sampling:
    """Return what a prefill engine samples for a prompt that decode will go on from.

    Where decode produces the first token again, prefill's is thrown away: then nothing may end
    the request early, since a request that stops does not hand its KV over.
    """
    if not first_token_is_kept(sampling):
        return Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
    return Sampling(
        max_tokens=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        logit_bias=sampling.logit_bias,
        stop_token_ids=sampling.stop_token_ids,
        eos_token_ids=sampling.eos_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
    )


def build(
    sampling: Sampling,
    transfer: dict[str, Any] | None,
    model_config: Any,
    prompt_logprobs: int | None = None,
) -> Any:
    """Make vLLM's SamplingParams; ValueError if it, or the model, does not allow the values.

    The core knows end-of-sequence ids only through this update: they end a generation unless
    ignore_eos is set, and min_tokens keeps them back either way.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError

    try:
        params = SamplingParams(
            **arguments(sampling),
            prompt_logprobs=prompt_logprobs,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        if sampling.eos_token_ids:
            params.update_from_generation_config(
                {"eos_token_id": list(sampling.eos_token_ids)}, sampling.eos_token_ids[0]
            )
        params.verify(model_config, None, None, None)
    except (VLLMClientError, OverflowError) as error:
        raise ValueError(str(error)) from error
    return params
