"""vLLM's step outputs in the port's words."""

import json
from collections.abc import Mapping, Sequence
from typing import Any  # vLLM's outputs are untyped here

from splitwave.core.errors import Reason
from splitwave.core.generation import FinishReason, TokenLogprob
from splitwave.engine.port import Held, Pulled, RequestOutput

STOP, LENGTH, ABORT, ERROR, REPETITION = range(5)
"""vLLM's FinishReason, an IntEnum; the adapter asserts at start that these are its values."""

GUARD_PREFIX = "guard:"
GUARD_REASONS = {
    "preempted": Reason.PREEMPTED,
    "pull_failed": Reason.HANDOFF_FAILED,
    "no_bytes": Reason.HANDOFF_FAILED,
}
EXPIRES_KEY = "splitwave_expires_at_s"
PULLED_KEY = "splitwave_pulled"
PULL_ENDED_KEY = "splitwave_pull_ended"

_KINDS: dict[str, type] = {
    "remote_engine_id": str,
    "remote_host": str,
    "remote_port": int,
    "remote_request_id": str,
    "tp_size": int,
    "dcp_size": int,
    "pp_size": int,
}

FINISHES = {
    STOP: FinishReason.STOP,
    LENGTH: FinishReason.LENGTH,
    REPETITION: FinishReason.STOP,
}


def translate(output: Any, *, hold: bool, pulls: bool) -> RequestOutput:
    """Return one request's share of one step. Tokens are not copied.

    `hold`: it asked prefill to keep its KV. `pulls`: it is a decode request.
    """
    ours = RequestOutput(engine_request_id=output.request_id, token_ids=output.new_token_ids)
    if output.new_logprobs is not None:
        ours.logprobs = logprobs(output.new_logprobs)
    if output.new_prompt_logprobs_tensors is not None:
        ours.prompt_logprobs = prompt_logprobs(output.new_prompt_logprobs_tensors)
    if output.prefill_stats is not None and not pulls:
        ours.cached_tokens = output.prefill_stats.num_local_cached_tokens
    params = output.kv_transfer_params
    if params and PULLED_KEY in params:
        pulled = params[PULLED_KEY]
        ours.pulled = Pulled(bytes_moved=pulled["bytes"], first_position=pulled["first_position"])
    if output.finish_reason is not None:
        _end(ours, output, hold=hold, pulls=pulls)
    return ours


def _end(ours: RequestOutput, output: Any, *, hold: bool, pulls: bool) -> None:
    """Say how the request ended."""
    finish = FINISHES.get(int(output.finish_reason))
    if finish is None:
        ours.failure, ours.failure_message = failure(
            int(output.finish_reason), output.stop_reason, pulls=pulls
        )
        return
    if hold and finish is FinishReason.LENGTH:
        try:
            ours.held = held(output.kv_transfer_params or {})
        except KeyError as missing:
            ours.failure = Reason.INTERNAL
            ours.failure_message = f"the engine held nothing: its parameters lack {missing}"
            return
    ours.finish = finish
    if finish is FinishReason.STOP and ours.token_ids:
        ours.stop_token_id = ours.token_ids[-1]


def failure(finish_reason: int, stop_reason: object, *, pulls: bool) -> tuple[Reason, str]:
    """Say why the engine ended a request badly, in the catalogue's terms and in words."""
    if finish_reason == ERROR:
        if pulls:
            return Reason.HANDOFF_FAILED, "the engine could not load the prompt's KV"
        return Reason.INTERNAL, "the engine could not take the request"
    why = stop_reason if isinstance(stop_reason, str) else ""
    if not why.startswith(GUARD_PREFIX):
        return Reason.WORKER_LOST, "the engine dropped the request while it stopped"
    name = why.removeprefix(GUARD_PREFIX)
    return GUARD_REASONS.get(name, Reason.INTERNAL), f"the engine's guard ended it: {name}"


def ends_pull(output: Any) -> bool:
    """True if a decode engine reads nothing of this request's handoff any more."""
    params = output.kv_transfer_params or {}
    return PULL_ENDED_KEY in params or PULLED_KEY in params or output.finish_reason is not None


def holds_blocks(output: Any) -> bool:
    """True if the engine keeps this finished request's blocks until they are pulled or released."""
    params = output.kv_transfer_params
    return bool(params and any(params.get("remote_block_ids") or ()))


def held(params: Mapping[str, Any]) -> Held:
    """Read what the prefill engine says it holds; KeyError names what is missing."""
    return Held(
        connector_params=encode_params(params),
        block_count=sum(len(group) for group in params["remote_block_ids"]),
        remote_tokens=params["remote_num_tokens"],
        expires_at_s=params[EXPIRES_KEY],
    )


def encode_params(params: Mapping[str, Any]) -> bytes:
    """Pack connector parameters; only `decode_params` reads them."""
    return json.dumps(params, separators=(",", ":")).encode()


def decode_params(packed: bytes) -> dict[str, Any]:
    """Unpack connector parameters; ValueError if they are none, or of the wrong kind.

    They have come through others, and an engine process would end of what it cannot read.
    What is missing is left to the guard, which ends the request.
    """
    params = json.loads(packed)
    if not isinstance(params, dict):
        raise ValueError("connector parameters are not an object")
    for name, kind in _KINDS.items():
        value = params.get(name)
        if value is not None and type(value) is not kind:  # A bool is an int, too.
            raise ValueError(f"{name} is no {kind.__name__}")
    groups = params.get("remote_block_ids")
    if groups is not None and not _are_block_ids(groups):
        raise ValueError("remote_block_ids is no list of lists of block numbers")
    return params


def _are_block_ids(groups: object) -> bool:
    """True for lists of whole numbers from 0 on."""
    return isinstance(groups, list) and all(
        isinstance(group, list) and all(type(block) is int and block >= 0 for block in group)
        for group in groups
    )


def logprobs(lists: Any) -> list[TokenLogprob]:
    """Convert vLLM's log probabilities; its first column is the sampled token, then the top ones.

    Arrays are [positions, k + 1]; natural logarithms.
    """
    return _rows(lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks)


def prompt_logprobs(tensors: Any) -> list[TokenLogprob]:
    """Convert vLLM's log probabilities of a prompt: [positions - 1, k + 1], its token first."""
    return _rows(tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks)


def _rows(token_ids: Any, logprobs: Any, ranks: Any) -> list[TokenLogprob]:
    rows: Sequence[tuple[list[int], list[float], int]] = list(
        zip(token_ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    )
    return [
        TokenLogprob(ids[0], values[0], rank, tuple(zip(ids[1:], values[1:], strict=True)))
        for ids, values, rank in rows
    ]
