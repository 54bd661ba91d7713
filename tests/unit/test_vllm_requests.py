"""What must not reach an engine is refused before it, and what is asked arrives in vLLM's words."""

from typing import Any  # stands for vLLM's untyped configuration

import pytest

from splitwave.core.errors import Reason
from splitwave.core.generation import Sampling
from splitwave.engine.port import EngineRequest, GroupDescription, Pull, Role
from splitwave.engine.sim import SimSettings
from splitwave.engine.vllm.requests import Preparation, RefusedRequest

GREEDY = Sampling(max_tokens=4, temperature=0.0)


class ModelConfig:
    """What is asked of vLLM's."""

    max_logprobs = 20
    logits_processors: Any = None
    is_diffusion = False

    def get_vocab_size(self) -> int:
        return 260


def description(role: Role) -> GroupDescription:
    return SimSettings(role=role).description()


def request(**changes: Any) -> EngineRequest:
    fields = {"engine_request_id": "r", "rank": 0, "token_ids": [1, 2, 3], "sampling": GREEDY}
    return EngineRequest(**{**fields, **changes})


@pytest.mark.vllm
def test_prompt_log_probabilities_are_asked_of_prefill() -> None:
    prepare = Preparation(description(Role.PREFILL), ModelConfig())

    params = prepare(request(prompt_logprobs=2, hold=True)).sampling_params
    plain = prepare(request(hold=True)).sampling_params

    assert (params.prompt_logprobs, params.max_tokens) == (2, 1)
    assert params.skip_reading_prefix_cache, "a cached prompt has no logits"
    assert plain.prompt_logprobs is None


@pytest.mark.vllm
def test_prompt_log_probabilities_are_never_asked_of_decode() -> None:
    prepare = Preparation(description(Role.DECODE), ModelConfig())
    pull = Pull(handoff_id="h", remote_tokens=2, connector_params=b"{}")

    with pytest.raises(RefusedRequest, match="prefill alone") as refused:
        prepare(request(prompt_logprobs=2, pull=pull))

    assert refused.value.reason is Reason.INTERNAL
    assert prepare(request(pull=pull)).sampling_params.prompt_logprobs is None
