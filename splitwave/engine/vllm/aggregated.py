"""One plain vLLM engine, without anything of Splitwave's: what a split pool is compared with.

It runs in a process of its own and ends with its answers. On the CPU that process is forked from
one that has imported vLLM. On GPUs it is spawned: imports there may have touched CUDA, which a fork
could not use then, and a group's start has wrapped vLLM for its mode, which a fork would inherit.
"""

import asyncio
import multiprocessing
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any  # vLLM's engine and outputs are untyped here

from splitwave.core.generation import Sampling
from splitwave.engine.vllm.config import KV_BYTES_MIN, read_shape
from splitwave.engine.vllm.logs import end_with
from splitwave.engine.vllm.sampling import build
from splitwave.engine.vllm.switches import FAULTS, HANDOVERS, MODE, PROBE, WORST_TOKEN

JOIN_S = 10.0
SEATS_MAX = 16
OURS = (PROBE, FAULTS, MODE, WORST_TOKEN, HANDOVERS)
"""Variables of a group that was started here, by which our plugin would change this engine, too."""
GPU_SHARE = 0.05
"""Of a device's memory, which must be free. The KV cache has a size of its own, so no more is taken
than is needed: a group that is being certified may hold the rest."""


class AggregatedFailed(Exception):
    """The plain engine could not answer; the message has its traceback."""


@dataclass(frozen=True, slots=True)
class Question:
    """One generation."""

    token_ids: Sequence[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens, a stop token that ended it included, and log probabilities if asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSettings:
    """The plain engine: one rank, eager, no expert parallelism, no KV transfer."""

    model_path: Path
    dtype: str
    block_size_tokens: int
    length_max_tokens: int


async def answer(settings: PlainSettings, questions: Sequence[Question]) -> list[Answer]:
    """Start the engine, ask it everything at once, stop it. Raises AggregatedFailed.

    `splitwave.engine.vllm.start.preload` must have run in this process.
    """
    context = _context()
    ours, theirs = context.Pipe(duplex=False)
    told = (os.getpid(), theirs, settings, list(questions))
    process = context.Process(target=_child, args=told, daemon=True)
    process.start()
    theirs.close()
    try:
        found = await asyncio.to_thread(_received, ours)
    finally:
        process.join(JOIN_S)
        if process.is_alive():
            process.kill()
            process.join(JOIN_S)
    if isinstance(found, str):
        raise AggregatedFailed(found)
    return found


def _context() -> Any:  # multiprocessing's contexts, which share no type that starts processes
    from vllm.platforms import current_platform

    return multiprocessing.get_context("fork" if current_platform.is_cpu() else "spawn")


def _received(connection: Connection) -> list[Answer] | str:
    try:
        found: list[Answer] | str = connection.recv()
    except EOFError:
        return "the plain engine's process ended without a word"
    return found


def _child(
    parent_pid: int, connection: Connection, settings: PlainSettings, questions: list[Question]
) -> None:
    end_with(parent_pid)  # Nobody else stops it if a battery is killed.
    try:
        found: list[Answer] | str = _answer_all(settings, questions)
    except BaseException:  # noqa: BLE001  # told to the parent, in whatever words
        found = traceback.format_exc()
    connection.send(found)
    connection.close()
    # Without an interpreter's end: its finalizers are the parent's too.
    os._exit(0)


def _answer_all(settings: PlainSettings, questions: list[Question]) -> list[Answer]:
    for name in OURS:  # Before vLLM is imported, and its plugins with it.
        os.environ.pop(name, None)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = LLMEngine.from_engine_args(
        EngineArgs(**_arguments(settings, is_cpu=current_platform.is_cpu()))
    )
    for place, question in enumerate(questions):
        engine.add_request(
            str(place),
            {"prompt_token_ids": list(question.token_ids)},
            build(question.sampling, None, engine.vllm_config.model_config),
        )
    answers: dict[str, Answer] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                answers[output.request_id.partition("-")[0]] = _answer(output.outputs[0])
    return [answers[str(place)] for place in range(len(questions))]


def _arguments(settings: PlainSettings, *, is_cpu: bool) -> dict[str, Any]:  # vLLM's, by name
    arguments: dict[str, Any] = {
        "model": str(settings.model_path),
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "block_size": settings.block_size_tokens,
        "max_model_len": settings.length_max_tokens,
        "max_num_seqs": SEATS_MAX,
        "max_num_batched_tokens": max(2048, settings.length_max_tokens),
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "max_logprobs": 20,
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": _kv_bytes(settings),
    }
    return arguments if is_cpu else arguments | {"gpu_memory_utilization": GPU_SHARE}


def _kv_bytes(settings: PlainSettings) -> int:
    per_token = read_shape(settings.model_path).kv_bytes_per_token(settings.dtype)
    full = (settings.length_max_tokens + 2 * settings.block_size_tokens) * per_token
    return max(KV_BYTES_MIN, 4 * full)


def _answer(choice: Any) -> Answer:  # vLLM's CompletionOutput
    rows = [{t: entry.logprob for t, entry in row.items()} for row in choice.logprobs or ()]
    return Answer(tuple(choice.token_ids), tuple(rows))
