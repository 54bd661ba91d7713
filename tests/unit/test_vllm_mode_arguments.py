"""What the table of modes gives vLLM is what vLLM knows, and does what the table says."""

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.worker.ubatch_utils import check_ubatch_thresholds, maybe_create_ubatch_slices

from bench.prefill_modes.variants import variants
from splitwave.core.mode import MODES, Mode, lookup

ARGUMENTS = {field.name for field in dataclasses.fields(AsyncEngineArgs)}


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_vllm_knows_every_argument_and_variable_of_a_mode(mode: Mode) -> None:
    assert set(mode.vllm_args) <= ARGUMENTS
    assert {name for name in mode.env if name.startswith("VLLM_")} <= set(
        envs.environment_variables
    )


@pytest.mark.parametrize("tokens", [1, 511, 512, 8192])
def test_vllm_splits_a_prefill_step_where_the_modes_say_so(tokens: int) -> None:
    (split,) = variants("cuda", (20,))[1:]
    parallel = SimpleNamespace(
        use_ubatching=lookup("prefill_eager_ht_dbo").vllm_args["enable_dbo"],
        dbo_decode_token_threshold=32,
        dbo_prefill_token_threshold=split.threshold_tokens,
    )

    splits = check_ubatch_thresholds(parallel, tokens, uniform_decode=False)

    assert (split.kind_of(tokens) == "eager_ubatched") is splits


def test_vllm_splits_one_long_prompt_over_both_microbatches() -> None:
    _, slices = maybe_create_ubatch_slices(True, np.array([1000]), 1000, 1, 2)

    assert slices is not None
    assert [(s.request_slice, s.token_slice) for s in slices] == [
        (slice(0, 1), slice(0, 500)),
        (slice(0, 1), slice(500, 1000)),
    ]


def test_vllm_caps_the_multiprocessors_of_high_throughput_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.device_communicators.all2all import DeepEPHTAll2AllManager

    asked: list[int] = []
    buffer = SimpleNamespace(set_num_sms=asked.append)
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=buffer))
    manager = SimpleNamespace(num_sms=20)

    for number in (8, 20, 64):
        DeepEPHTAll2AllManager.set_num_sms(manager, number)

    assert asked == [8, 20, 20]
