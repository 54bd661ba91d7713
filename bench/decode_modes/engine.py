"""One rank's engine core in this process, stepped together with the other rank's.

An iteration is one forward pass on every rank: of its requests, or a dummy one where it has none.
"""

import time
from collections.abc import Iterable
from typing import Any  # vLLM's objects are untyped here

from bench.decode_modes.spec import RowSpec, Spec
from bench.decode_modes.traffic import LENGTHS, PROMPT_TOKENS, Request
from bench.shared_gpu import devices

BLOCK_STEP_TOKENS = 64
KV_BYTES_MORE = 256 << 20


def row_arguments(spec: RowSpec) -> dict[str, Any]:
    """vLLM's engine arguments of any row; what else it has may replace them."""
    from bench.decode_modes.weights import LOAD_FORMAT, BenchWorker

    return {
        "model": spec.model_dir,
        "skip_tokenizer_init": True,
        "dtype": spec.dtype,
        "load_format": LOAD_FORMAT,
        "seed": spec.seed,
        "enable_expert_parallel": True,
        "distributed_executor_backend": "uni",
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "worker_extension_cls": f"{BenchWorker.__module__}.{BenchWorker.__qualname__}",
    }


def arguments(spec: Spec) -> dict[str, Any]:
    """vLLM's engine arguments of a row."""
    from vllm.config import KVTransferConfig

    seats = max(*spec.batches, *spec.ragged, 1)
    length = PROMPT_TOKENS + max(spec.tokens, LENGTHS[1]) + BLOCK_STEP_TOKENS
    length += -length % BLOCK_STEP_TOKENS
    kv_tokens = seats * (length + BLOCK_STEP_TOKENS)
    own = {
        "async_scheduling": True,
        "max_num_seqs": seats,
        # A step has a token a seat: nothing here ever computes a prompt.
        "max_num_batched_tokens": seats,
        "max_model_len": length,
        "kv_cache_memory_bytes": kv_tokens * spec.kv_token_bytes * 5 // 4 + KV_BYTES_MORE,
        "kv_transfer_config": KVTransferConfig(
            kv_connector="DecodeBenchConnector",
            kv_role="kv_consumer",
            kv_connector_extra_config={"fill_mean": 0.0, "fill_std": 0.0},
        ),
    }
    return row_arguments(spec) | own | spec.arguments


class LockStep:
    """The engine core of one rank, and what its requests have got so far."""

    def __init__(self, arguments: dict[str, Any], rank: int) -> None:
        """`arguments` are vLLM's engine arguments."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        self.config = EngineArgs(**arguments).create_engine_config()
        parallel = self.config.parallel_config
        parallel.assigned_physical_gpu_ids = devices() or None
        assert parallel.data_parallel_rank == rank
        self._parallel = type(parallel)
        # The same order of ports on every rank: first this group's, then the workers'.
        self._group = parallel.stateless_init_dp_group()
        self.core = EngineCore(self.config, Executor.get_class(self.config), log_stats=False)
        self.tokens: dict[str, list[int]] = {}
        self.unfinished: set[str] = set()
        self.iterations = 0
        self.answered_s = 0.0
        """When the last tokens came out, by perf_counter: a dummy step may follow in the same
        iteration, as slow as any."""

    def add(self, requests: Iterable[Request]) -> None:
        """Hand over requests; they run from the next iteration on."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        for one in requests:
            request = EngineCoreRequest(
                request_id=one.name,
                prompt_token_ids=list(one.prompt),
                mm_features=None,
                sampling_params=SamplingParams(
                    temperature=0.0, max_tokens=one.max_tokens, ignore_eos=True, detokenize=False
                ),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
            self.tokens[one.name] = []
            self.unfinished.add(one.name)
            self.core.add_request(*self.core.preprocess_add_request(request))

    def step(self) -> int:
        """Run one iteration and return the number of tokens that came out of it."""
        outputs, executed = None, False
        if self.core.scheduler.has_requests() or self.core.batch_queue:
            outputs, executed = self.core.step_fn()
            self.core.post_step(executed)
        if outputs:
            self.answered_s = time.perf_counter()
        if not executed:
            self.core.execute_dummy_batch()
        self.iterations += 1
        count = 0
        for group in (outputs or {}).values():
            for output in group.outputs:
                self.tokens[output.request_id] += output.new_token_ids
                count += len(output.new_token_ids)
                if output.finish_reason is not None:
                    assert output.finish_reason.name == "LENGTH", output.finish_reason
                    self.unfinished.discard(output.request_id)
        return count

    def any_rank(self, says: bool) -> bool:
        """True if any rank says so; every rank must ask after the same iteration."""
        return bool(self._parallel.has_unfinished_dp(self._group, says))

    def ask(self, method: str) -> Any:  # whatever the worker answers
        """Call the worker's method of that name."""
        return self.core.collective_rpc(method)[0]
