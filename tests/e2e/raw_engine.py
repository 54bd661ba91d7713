"""A small client that drives vLLM engines as the adapter does, without the adapter.

Run in a process of its own: engines are forked from the process that builds them.
"""

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import Any  # vLLM's objects are untyped here

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor

from tests.e2e.checks import BLOCK_SIZE_TOKENS

PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass
class Outcome:
    """All that an engine said about one request."""

    request_id: str
    done: asyncio.Future[None]
    began: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: list[int] = field(default_factory=list)
    outputs: int = 0
    ends: int = 0
    finish: str | None = None
    stop: int | str | None = None
    params: dict[str, Any] | None = None  # the connector's, opaque
    pulled: dict[str, int] | None = None
    pull_ends: int = 0
    at_s: float = 0.0


def transfer(role: str, **extra: object) -> KVTransferConfig:
    """Our connector in a role; `kv_load_failure_policy` is taken out of `extra`."""
    policy = extra.pop("kv_load_failure_policy", "fail")
    return KVTransferConfig(
        kv_connector="SplitwaveNixlConnector",
        kv_connector_module_path="splitwave.engine.vllm.connector",
        kv_role=role,
        kv_load_failure_policy=policy,
        kv_buffer_device="cpu",
        kv_connector_extra_config=extra,
    )


class RawEngine:
    """One group of engines, started by its constructor, inside a running event loop."""

    def __init__(self, model: str, side_channel_port: int, **arguments: object) -> None:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel_port)
        defaults: dict[str, object] = {
            "model": model,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 32,
            "dtype": "float32",
            "seed": 7,
            "block_size": BLOCK_SIZE_TOKENS,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 64 * 2**20,
        }
        config = AsyncEngineArgs(**(defaults | arguments)).create_engine_config()
        self.client = EngineCoreClient.make_async_mp_client(
            config, Executor.get_class(config), log_stats=False
        )
        self.outcomes: dict[str, Outcome] = {}
        self._pump = asyncio.create_task(self._take_outputs())

    async def _take_outputs(self) -> None:
        while True:
            batch = await self.client.get_output_async()
            for output in batch.outputs:
                self._take(output)

    def _take(self, output: Any) -> None:  # vLLM's EngineCoreOutput
        outcome = self.outcomes[output.request_id]
        params = output.kv_transfer_params
        if params and params.get("splitwave_pull_ended"):
            outcome.pull_ends += 1
            outcome.at_s = time.monotonic()
            return
        outcome.outputs += 1
        outcome.tokens += output.new_token_ids
        if outcome.tokens:
            outcome.began.set()
        if params and "splitwave_pulled" in params:
            assert outcome.outputs == 1, "not on the first output"
            outcome.pulled = params["splitwave_pulled"]
        elif params:
            outcome.params = params
        if output.finish_reason is not None:
            outcome.ends += 1
            outcome.finish, outcome.stop = output.finish_reason.name, output.stop_reason
            outcome.at_s = time.monotonic()
            if not outcome.done.done():
                outcome.done.set_result(None)

    async def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        *,
        params: dict[str, Any] | None = None,  # the connector's
        rank: int | None = None,
    ) -> Outcome:
        """Send one greedy request; its outcome fills up as outputs come."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": dict(params)} if params else None,
        )
        outcome = Outcome(request_id, asyncio.get_running_loop().create_future())
        self.outcomes[request_id] = outcome
        await self.client.add_request_async(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                mm_features=None,
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=rank,
            )
        )
        return outcome

    async def run(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        *,
        params: dict[str, Any] | None = None,  # the connector's
        rank: int | None = None,
    ) -> Outcome:
        """Send one greedy request and wait for its end, 30 seconds at most."""
        outcome = await self.add(request_id, prompt, max_tokens, params=params, rank=rank)
        await asyncio.wait_for(outcome.done, 30)
        return outcome

    async def prefill(self, request_id: str, prompt: list[int], rank: int | None = None) -> Outcome:
        """Prefill a prompt and hold its KV."""
        return await self.run(request_id, prompt, 1, params=PREFILL_PARAMS, rank=rank)

    async def call(self, name: str, *args: object, rank: int = 0) -> Any:  # as the call answers
        """Call the engine core of one rank, 30 seconds at most."""
        engine = self.client.core_engines[rank]
        utility = self.client._call_utility_async(name, *args, engine=engine)  # noqa: SLF001  # vLLM's way to one rank
        return await asyncio.wait_for(utility, 30)

    async def call_all(self, name: str) -> list[Any]:  # as the call answers
        """Call the engine cores of all ranks at once."""
        ranks = range(len(self.client.core_engines))
        return list(await asyncio.gather(*(self.call(name, rank=rank) for rank in ranks)))

    async def abort(self, *request_ids: str) -> None:
        await self.client.abort_requests_async(list(request_ids))

    def close(self) -> None:
        """Stop the group's processes."""
        self._pump.cancel()
        self.client.shutdown()


def counted_prompt(length: int, seed: int = 1) -> list[int]:
    """A prompt of printable ids of the tiny model's vocabulary, the same for the same arguments."""
    return [
        (seed * 7919 + length * 31 + place * place * 17 + place) % 250 + 1
        for place in range(length)
    ]
