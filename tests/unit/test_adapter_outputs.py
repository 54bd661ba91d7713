"""vLLM's outputs and sampling in our words."""

from dataclasses import dataclass
from typing import Any  # stands for vLLM's untyped outputs

import numpy as np
import pytest

from splitwave.core.errors import Reason
from splitwave.core.generation import FinishReason, Sampling, TokenLogprob
from splitwave.engine.vllm.outputs import (
    ABORT,
    ERROR,
    LENGTH,
    STOP,
    decode_params,
    encode_params,
    ends_pull,
    holds_blocks,
    logprobs,
    translate,
)
from splitwave.engine.vllm.sampling import arguments, first_token_only

HELD = {"remote_block_ids": [[3, 2, 1]], "remote_num_tokens": 70, "splitwave_expires_at_s": 9.5}


@dataclass
class Output:
    """The fields of vLLM's EngineCoreOutput that are read."""

    new_token_ids: list[int]
    finish_reason: int | None = None
    stop_reason: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    prefill_stats: Any = None
    request_id: str = "r"


@dataclass
class Lists:
    """vLLM's LogprobsLists."""

    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any


@dataclass
class Tensors:
    """vLLM's LogprobsTensors."""

    logprob_token_ids: Any
    logprobs: Any
    selected_token_ranks: Any


def test_a_prompts_log_probabilities_have_a_row_for_each_token_but_the_first() -> None:
    tensors = Tensors(
        np.array([[6, 9, 8], [7, 7, 9]]),
        np.array([[-2.0, -0.5, -1.0], [-0.25, -0.25, -3.0]], dtype=np.float32),
        np.array([3, 1]),
    )

    ours = translate(
        Output([5], LENGTH, kv_transfer_params=HELD, new_prompt_logprobs_tensors=tensors),
        hold=True,
        pulls=False,
    )

    assert ours.prompt_logprobs == [
        TokenLogprob(6, -2.0, 3, ((9, -0.5), (8, -1.0))),
        TokenLogprob(7, -0.25, 1, ((7, -0.25), (9, -3.0))),
    ]


def test_a_step_in_between_has_its_tokens_and_no_end() -> None:
    ours = translate(Output([5]), hold=False, pulls=True)

    assert (ours.engine_request_id, ours.token_ids) == ("r", [5])
    assert (ours.finish, ours.failure, ours.held, ours.pulled) == (None, None, None, None)


def test_a_stop_names_the_token_that_ended_it() -> None:
    by_eos = translate(Output([5, 2], STOP), hold=False, pulls=True)
    by_stop_token = translate(Output([7], STOP, stop_reason=7), hold=False, pulls=True)

    assert (by_eos.finish, by_eos.stop_token_id) == (FinishReason.STOP, 2)
    assert by_stop_token.stop_token_id == 7


def test_a_prompt_that_is_held_says_until_when() -> None:
    ours = translate(Output([5], LENGTH, kv_transfer_params=HELD), hold=True, pulls=False)

    assert ours.finish is FinishReason.LENGTH
    assert ours.held is not None
    assert (ours.held.block_count, ours.held.remote_tokens) == (3, 70)
    assert ours.held.expires_at_s == 9.5
    assert decode_params(ours.held.connector_params) == HELD


def test_a_request_that_stops_at_its_first_token_is_not_handed_over() -> None:
    output = Output([5], STOP, kv_transfer_params=HELD)

    assert translate(output, hold=True, pulls=False).held is None
    assert holds_blocks(output), "so the adapter releases it"


@pytest.mark.parametrize("missing", list(HELD))
def test_a_hold_without_its_parameters_is_a_failure(missing: str) -> None:
    params = {key: value for key, value in HELD.items() if key != missing}

    ours = translate(Output([5], LENGTH, kv_transfer_params=params), hold=True, pulls=False)

    assert ours.finish is None
    assert ours.failure is Reason.INTERNAL
    assert missing in ours.failure_message


def test_the_first_output_says_what_was_pulled() -> None:
    params = {"splitwave_pulled": {"bytes": 4096, "first_position": 70}}

    ours = translate(Output([5], kv_transfer_params=params), hold=False, pulls=True)

    assert ours.pulled is not None
    assert (ours.pulled.bytes_moved, ours.pulled.first_position) == (4096, 70)


@pytest.mark.parametrize(
    ("finish", "stop", "pulls", "reason"),
    [
        (ABORT, "guard:preempted", True, Reason.PREEMPTED),
        (ERROR, "guard:pull_failed", True, Reason.HANDOFF_FAILED),
        (ERROR, None, True, Reason.HANDOFF_FAILED),
        (ABORT, "guard:no_bytes", True, Reason.HANDOFF_FAILED),
        (ABORT, "guard:needs_prefill", True, Reason.INTERNAL),
        (ABORT, "guard:first_position", True, Reason.INTERNAL),
        (ABORT, "guard:a later release's", True, Reason.INTERNAL),
        (ABORT, None, True, Reason.WORKER_LOST),
        (ERROR, None, False, Reason.INTERNAL),
    ],
)
def test_a_bad_end_has_its_reason(
    finish: int, stop: str | None, pulls: bool, reason: Reason
) -> None:
    ours = translate(Output([], finish, stop), hold=False, pulls=pulls)

    assert ours.failure is reason
    assert ours.failure_message
    assert ours.finish is None


@pytest.mark.parametrize(
    ("output", "ended"),
    [
        (Output([5]), False),
        (Output([], kv_transfer_params={"splitwave_pull_ended": True}), True),
        (Output([5], kv_transfer_params={"splitwave_pulled": {}}), True),
        (Output([], ERROR), True),
    ],
)
def test_the_end_of_a_pull_is_seen(output: Output, ended: bool) -> None:
    assert ends_pull(output) is ended


def test_log_probabilities_have_the_sampled_token_first_and_the_top_after_it() -> None:
    lists = Lists(
        np.array([[4, 9, 4], [7, 7, 1]]),
        np.array([[-1.5, -0.5, -1.5], [-0.1, -0.1, -3.0]]),
        np.array([2, 1]),
    )

    first, second = logprobs(lists)

    assert (first.token_id, first.logprob, first.rank) == (4, -1.5, 2)
    assert first.top == ((9, -0.5), (4, -1.5))
    assert (second.token_id, second.rank) == (7, 1)
    assert isinstance(first.token_id, int)
    assert isinstance(first.logprob, float)


def test_without_alternatives_top_is_empty() -> None:
    lists = Lists(np.array([[4]]), np.array([[-1.5]]), np.array([1]))

    assert logprobs(lists)[0].top == ()


@pytest.mark.parametrize("packed", [b"", b"[]", b"\xff"])
def test_bytes_that_are_no_parameters_are_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_params(packed)


KEPT = Sampling(
    max_tokens=9, temperature=0.5, top_k=4, logit_bias={3: 1.0}, stop_token_ids=(7,),
    eos_token_ids=(2,), logprobs=2,
)  # fmt: skip


def test_a_kept_first_token_is_sampled_as_asked() -> None:
    first = first_token_only(KEPT)

    assert first.max_tokens == 1
    assert (first.temperature, first.top_k, first.logit_bias) == (0.5, 4, {3: 1.0})
    assert (first.stop_token_ids, first.eos_token_ids, first.logprobs) == ((7,), (2,), 2)


@pytest.mark.parametrize("changes", [{"seed": 1}, {"min_tokens": 3}, {"presence_penalty": 0.5}])
def test_a_first_token_that_is_thrown_away_cannot_end_the_request(changes: Any) -> None:
    asked = Sampling(
        max_tokens=9, temperature=0.5, stop_token_ids=(7,), eos_token_ids=(2,), **changes
    )

    first = first_token_only(asked)

    assert (first.max_tokens, first.temperature, first.ignore_eos) == (1, 0.0, True)
    assert first.stop_token_ids == first.eos_token_ids == ()
    assert first.min_tokens == 0


def test_every_field_of_sampling_reaches_vllm() -> None:
    ours = set(Sampling.__dataclass_fields__)

    # The end-of-sequence ids go by another way: the core asks for them apart.
    assert ours - set(arguments(KEPT)) == {"eos_token_ids"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_block_ids": 5},
        {"remote_block_ids": [5]},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": [["1"]]},
        {"remote_port": "8100"},
        {"remote_port": True},
        {"remote_host": 1},
        {"tp_size": 1.5},
    ],
)
def test_parameters_of_the_wrong_kind_never_reach_an_engine(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        decode_params(encode_params(HELD | wrong))
