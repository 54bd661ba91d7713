"""What an engine's one output means for the caller. Pure."""

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.engine.port import RequestOutput


def result_of(call: PrefillCall, output: RequestOutput, *, hold: bool) -> PrefillResult:
    """The answer, but for the handoff and the times; `hold`: the engine was asked to hold.

    A result without finish_reason needs a handoff. Raises ServingError if the engine failed,
    or holds nothing where it had to.
    """
    if output.failure is not None:
        raise ServingError(output.failure, output.failure_message or "the engine gave no reason")
    finish = _finish(call, output, hold=hold)
    if finish is None and output.held is None:
        raise ServingError(Reason.CANCELLED, "the handoff was released while it was computed")
    if call.prompt_logprobs is not None and output.prompt_logprobs is None:
        raise ServingError(Reason.INTERNAL, "the engine gave no log probabilities of the prompt")
    keep = call.keep_first_token
    return PrefillResult(
        token_id=output.token_ids[0] if keep else None,
        logprob=output.logprobs[0] if keep and output.logprobs else None,
        finish_reason=finish,
        stop_token_id=output.stop_token_id if finish is FinishReason.STOP else None,
        prompt_logprobs=output.prompt_logprobs,
        cached_tokens=output.cached_tokens,
    )


def _finish(call: PrefillCall, output: RequestOutput, *, hold: bool) -> FinishReason | None:
    """How the first token ended the generation; None if decode goes on."""
    if not call.keep_first_token:
        return None
    if hold and output.finish is FinishReason.LENGTH:
        return None  # The engine was asked for one token; the caller wants more.
    return output.finish
