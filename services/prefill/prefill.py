"""One prompt, top to bottom. Read this file first."""

import asyncio
from dataclasses import replace

from services.prefill.floor import Floor
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.sampling_limits import check_prompt_logprobs
from splitwave.engine.port import EngineRequest, GroupDescription

_UNSEEN = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
"""Sampling of a token that nobody sees: it must not end the request, so that its KV is held."""


async def prefill(call: PrefillCall, deadline: Deadline, floor: Floor) -> PrefillResult:
    """Compute a prompt, sample its first token, hold its KV unless the generation ended.

    A repeat joins the call that runs, or gets the same answer while its lease is live.
    Whoever waits last and leaves early takes everything with it. Raises ServingError.
    """
    running = floor.find(call.handoff_id)
    if running is None:
        check_call(call, floor.group)
        running = floor.begin(call, engine_request(call, floor.group))
    running.waiters += 1
    left_s = deadline.remaining_s(floor.now_s())
    try:
        # Not `wait_for`, which would swallow a cancellation that meets the result (Python 3.11).
        async with asyncio.timeout(left_s):
            result = await asyncio.shield(running.result)
        running.answered = True
        return floor.as_of_now(result)
    except TimeoutError:
        raise ServingError(
            Reason.DEADLINE_EXCEEDED, f"no first token within the call's {left_s:.3f} s"
        ) from None
    finally:
        running.waiters -= 1
        if not running.waiters and not running.answered:
            floor.abandon(running)


def check_call(call: PrefillCall, group: GroupDescription) -> None:
    """Raise INVALID_REQUEST or KV_LAYOUT_MISMATCH for what can never succeed here."""
    tokens, longest = len(call.token_ids), group.model_len_max_tokens - 1
    if not 0 < tokens <= longest:
        raise _invalid(f"token_ids: {tokens} of them; send 1 to {longest}")
    blocks = -(-tokens // group.block_size_tokens)
    if blocks > group.blocks_per_rank:
        raise _invalid(
            f"token_ids: {tokens} of them need {blocks} KV blocks, a rank has "
            f"{group.blocks_per_rank}; send fewer"
        )
    check_prompt_logprobs(call.prompt_logprobs, tokens)
    if call.sampling.max_tokens < 1:
        raise _invalid("sampling.max_tokens: 0; ask for at least one")
    if not call.kv_layout and not _ends_here(call, group):
        raise _invalid("kv_layout: empty, but decode has to go on; send its group's layout")
    if call.kv_layout and call.kv_layout != group.kv_layout:
        raise ServingError(
            Reason.KV_LAYOUT_MISMATCH,
            f"kv_layout: decode's is {call.kv_layout}, this group's is {group.kv_layout}",
        )


def engine_request(call: PrefillCall, group: GroupDescription) -> EngineRequest:
    """What the engine is asked; the floor fills in id and rank."""
    keep = call.keep_first_token
    return EngineRequest(
        engine_request_id="",
        rank=0,
        token_ids=call.token_ids,
        sampling=replace(call.sampling, max_tokens=1) if keep else _UNSEEN,
        hold=not _ends_here(call, group),
        priority=call.priority,
        prompt_logprobs=call.prompt_logprobs,
        trace_headers={"traceparent": call.traceparent} if call.traceparent else None,
    )


def _ends_here(call: PrefillCall, group: GroupDescription) -> bool:
    """True if the first token is the last whatever it is, so that there is nothing to hold."""
    last_position = len(call.token_ids) + 1 >= group.model_len_max_tokens
    return call.keep_first_token and (call.sampling.max_tokens == 1 or last_position)


def _invalid(message: str) -> ServingError:
    return ServingError(Reason.INVALID_REQUEST, message)
