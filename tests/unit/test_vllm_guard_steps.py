"""The guard on vLLM's own schedulers, step by step; what workers would answer is made up here.

Above all a step ahead, as on GPUs: vLLM's CPU build cannot schedule so.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any  # vLLM's objects are untyped here

import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from splitwave.demo_model import DemoModelOptions, Variant, build
from splitwave.engine.vllm.connector.messages import PulledBytes
from splitwave.engine.vllm.guard import AsyncGuardScheduler, GuardScheduler

BLOCKS = 8
BLOCK_SIZE_TOKENS = 32

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Settings of a decode engine; vLLM writes to the environment while it makes them."""
    before = dict(os.environ)
    model = tmp_path_factory.mktemp("models") / "tiny"
    build(model, DemoModelOptions(variant=Variant.TINY), lambda line: None)
    yield _config(model)
    os.environ.clear()
    os.environ.update(before)


def _config(model: Path) -> Any:
    config = AsyncEngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=200,
        dtype="float32",
        block_size=BLOCK_SIZE_TOKENS,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**20,
        kv_transfer_config=KVTransferConfig(
            kv_connector="SplitwaveNixlConnector",
            kv_connector_module_path="splitwave.engine.vllm.connector",
            kv_role="kv_consumer",
            kv_load_failure_policy="fail",
        ),
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    return config


class Decode:
    """A scheduler, and workers that answer when they are told to."""

    def __init__(self, config: Any, *, steps_ahead: bool) -> None:
        config.scheduler_config.async_scheduling = steps_ahead
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE_TOKENS, num_kv_heads=2, head_size=64, dtype=torch.float32
        )
        self.scheduler = (AsyncGuardScheduler if steps_ahead else GuardScheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=BLOCKS,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE_TOKENS,
        )
        self.outputs: list[EngineCoreOutput] = []

    def add(self, request_id: str, tokens: int, max_tokens: int = 100) -> None:
        """A request of so many tokens, the last one not pulled."""
        blocks = -(-(tokens - 1) // BLOCK_SIZE_TOKENS)
        params = {
            "do_remote_prefill": True,
            "remote_block_ids": [list(range(blocks))],
            "remote_engine_id": "prefill",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "remote_request_id": f"p-{request_id}",
            "remote_num_tokens": tokens - 1,
            "tp_size": 1,
        }
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0, extra_args={"kv_transfer_params": params}
        )
        self.scheduler.add_request(Request(request_id, [5] * tokens, sampling, None))

    def step(self) -> Any:
        return self.scheduler.schedule()

    def answer(self, step: Any, pulled: dict[str, int] | None = None) -> None:
        """A worker ran the step, and finished pulls of so many bytes meanwhile."""
        names = list(step.num_scheduled_tokens)
        transfers = KVConnectorOutput(
            finished_recving=set(pulled or ()), kv_connector_worker_meta=PulledBytes(pulled or {})
        )
        by_client = self.scheduler.update_from_output(
            step,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[[7]] * len(names),
                kv_connector_output=transfers,
            ),
        )
        for batch in by_client.values():
            self.outputs += batch.outputs

    def pull(self, *names: str, bytes_moved: int = 4096) -> None:
        """Admit what waits and let its pull finish."""
        self.answer(self.step(), dict.fromkeys(names, bytes_moved))

    def of(self, name: str) -> list[EngineCoreOutput]:
        return [output for output in self.outputs if output.request_id == name]

    def blocks_free(self) -> int:
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free


@pytest.fixture(params=[False, True], ids=["in step", "a step ahead"])
def decode(request: pytest.FixtureRequest, config: Any) -> Decode:
    return Decode(config, steps_ahead=request.param)


@pytest.fixture
def ahead(config: Any) -> Decode:
    return Decode(config, steps_ahead=True)


def test_a_first_output_tells_bytes_and_position(decode: Decode) -> None:
    decode.add("a", 33)
    decode.pull("a", bytes_moved=777)
    decode.answer(decode.step())
    decode.answer(decode.step())

    first, second = decode.of("a")
    assert first.kv_transfer_params == {"splitwave_pulled": {"bytes": 777, "first_position": 32}}
    assert second.kv_transfer_params is None


def test_a_first_output_that_is_the_last_tells_it_too(decode: Decode) -> None:
    decode.add("a", 33, max_tokens=1)
    decode.pull("a")
    decode.answer(decode.step())

    (only,) = decode.of("a")
    assert only.finish_reason is not None
    assert only.kv_transfer_params is not None


def test_a_pull_of_nothing_ends_before_the_first_step(decode: Decode) -> None:
    decode.add("a", 33)
    decode.pull("a", bytes_moved=0)
    step = decode.step()
    decode.answer(step)

    assert step.num_scheduled_tokens == {}
    assert [output.stop_reason for output in decode.of("a")] == ["guard:no_bytes"]
    assert decode.blocks_free() == BLOCKS - 1


def test_a_request_preempted_a_step_ahead_ends_once_with_no_token_behind(ahead: Decode) -> None:
    for name in ("a", "b"):
        ahead.add(name, 96)
    ahead.pull("a", "b")
    sent: list[Any] = [ahead.step()]
    while not ahead.scheduler.guard_refusals:
        sent.append(ahead.step())
        ahead.answer(sent.pop(0))
    while sent:
        ahead.answer(sent.pop(0))
    ahead.answer(ahead.step())

    ends = Counter(output.request_id for output in ahead.outputs if output.stop_reason)
    assert ends == {"b": 1}
    assert ahead.of("b")[-1].stop_reason == "guard:preempted"
    assert "b" not in ahead.scheduler.requests
    assert ahead.blocks_free() == BLOCKS - 1 - 4


def test_an_abort_is_answered_once_at_whatever_moment_it_comes(decode: Decode) -> None:
    for name in ("waiting", "pulling", "pulled", "stepping"):
        decode.add(name, 33)
        if name == "waiting":
            abort(decode, name)
            decode.answer(decode.step())
            continue
        step = decode.step()
        if name == "pulling":
            abort(decode, name)
            decode.answer(step)
            assert decode.of(name) == [], "still being written to"
            step = decode.step()
        decode.answer(step, {name: 4096})
        if name == "pulled":
            abort(decode, name)
        step = decode.step()
        if name == "stepping":
            abort(decode, name)
        decode.answer(step)
        decode.answer(decode.step())

    for name in ("waiting", "pulling", "pulled", "stepping"):
        (only,) = decode.of(name)
        assert only.kv_transfer_params == {"splitwave_pull_ended": True}, name
        assert only.finish_reason is None
    assert decode.blocks_free() == BLOCKS - 1
    assert not decode.scheduler.has_requests()


def test_an_abort_after_the_first_output_is_silent(decode: Decode) -> None:
    decode.add("a", 33)
    decode.pull("a")
    decode.answer(decode.step())
    abort(decode, "a")
    decode.answer(decode.step())

    assert [output.new_token_ids for output in decode.of("a")] == [[7]]


def test_a_refusal_keeps_the_engine_stepping_until_it_is_sent(decode: Decode) -> None:
    decode.scheduler.add_request(Request("a", [5] * 9, SamplingParams(max_tokens=4), None))

    assert decode.scheduler.has_requests()
    decode.answer(decode.step())
    assert [output.stop_reason for output in decode.of("a")] == ["guard:needs_prefill"]
    assert not decode.scheduler.has_requests()


def test_a_scheduler_without_our_connector_or_with_local_recomputing_is_refused(
    config: Any,
) -> None:
    config.kv_transfer_config.kv_load_failure_policy = "recompute"
    try:
        with pytest.raises(ValueError, match=r"kv_load_failure_policy .* must be 'fail'"):
            Decode(config, steps_ahead=False)
    finally:
        config.kv_transfer_config.kv_load_failure_policy = "fail"
    transfer, config.kv_transfer_config = config.kv_transfer_config, None
    try:
        with pytest.raises(ValueError, match=r"needs kv_transfer_config\.kv_connector"):
            Decode(config, steps_ahead=False)
    finally:
        config.kv_transfer_config = transfer


def abort(decode: Decode, name: str) -> None:
    decode.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
