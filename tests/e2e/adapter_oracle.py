"""The aggregated run: one plain vLLM engine behind vLLM's own front end, without Splitwave."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any  # vLLM's front end is untyped here

from tests.e2e.adapter_cases import Case, cases, routing_cases

PROMPT_LOGPROBS = 2
"""Most likely tokens that are told at each place of a prompt."""


def run(model: Path, out: Path, chosen: Sequence[Case] | None = None) -> int:
    """Generate cases (default: all) and write tokens, finish, log probabilities. Returns 0."""
    # Fork and no worker process, as in the groups; nothing else of Splitwave's is switched on.
    os.environ["SPLITWAVE_FORK"] = "1"
    found = asyncio.run(_run(model, cases() if chosen is None else chosen))
    out.write_text(json.dumps(found))
    return 0


async def _run(model: Path, chosen: Sequence[Case]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=16,
            block_size=32,
            kv_cache_memory_bytes=64 * 2**20,
            enable_prefix_caching=False,
            distributed_executor_backend="uni",
            disable_log_stats=True,
        )
    )
    try:
        found = await asyncio.gather(*(_generate(engine, case) for case in chosen))
        return {case.name: result for case, result in zip(chosen, found, strict=True)}
    finally:
        engine.shutdown()


async def _generate(engine: Any, case: Case) -> dict[str, Any]:
    from vllm import SamplingParams

    asked = case.sampling
    params = SamplingParams(
        max_tokens=asked.max_tokens,
        min_tokens=asked.min_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        seed=asked.seed,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        logit_bias=dict(asked.logit_bias) or None,
        stop_token_ids=list(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        logprobs=asked.logprobs,
        prompt_logprobs=PROMPT_LOGPROBS,
    )
    outputs = [
        output
        async for output in engine.generate({"prompt_token_ids": case.token_ids}, params, case.name)
    ]
    choice = outputs[-1].outputs[0]
    return {
        "tokens": list(choice.token_ids),
        "finish": choice.finish_reason,
        "logprobs": [_by_token(position) for position in choice.logprobs or ()],
        # Nothing is known of the first.
        "prompt_logprobs": [_by_token(position) for position in outputs[0].prompt_logprobs[1:]],
    }


def _by_token(position: Any) -> dict[str, float]:
    return {str(token): entry.logprob for token, entry in position.items()}


if __name__ == "__main__":
    routing = sys.argv[3:] == ["routing"]
    sys.exit(run(Path(sys.argv[1]), Path(sys.argv[2]), routing_cases() if routing else None))
