"""What the guard makes of a handoff; its work on real steps is an e2e test."""

from typing import Any  # the connector's parameters

import pytest

from splitwave.engine.vllm.guard import Why, handoff_refusal

BLOCK_SIZE_TOKENS = 32


def params(**changes: object) -> dict[str, Any]:
    """A handoff of 64 tokens in two blocks, with changes."""
    return {
        "do_remote_prefill": True,
        "remote_block_ids": [[7, 8]],
        "remote_engine_id": "engine",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "remote_request_id": "request",
        "remote_num_tokens": 64,
        "tp_size": 1,
        **changes,
    }


@pytest.mark.parametrize("tokens", [64, 65])
def test_a_handoff_of_all_tokens_or_all_but_the_last_is_taken(tokens: int) -> None:
    assert refusal(params(), tokens) is None


@pytest.mark.parametrize("tokens", [66, 100])
def test_more_than_one_token_to_compute_is_refused(tokens: int) -> None:
    assert refusal(params(), tokens) is Why.NEEDS_PREFILL


@pytest.mark.parametrize("given", [None, {}, params(do_remote_prefill=False)])
def test_a_request_without_a_handoff_is_refused(given: dict[str, Any] | None) -> None:
    assert refusal(given, 65) is Why.NEEDS_PREFILL


@pytest.mark.parametrize("remote_tokens", [0, None])
def test_a_handoff_of_nothing_is_refused(remote_tokens: int | None) -> None:
    assert refusal(params(remote_num_tokens=remote_tokens), 65) is Why.NEEDS_PREFILL


def test_a_single_token_is_refused_since_its_step_would_begin_at_zero() -> None:
    one = params(remote_num_tokens=1, remote_block_ids=[[7]])

    assert refusal(one, 1) is Why.FIRST_POSITION
    assert refusal(one, 2) is None


@pytest.mark.parametrize(
    "key",
    [
        "remote_block_ids",
        "remote_engine_id",
        "remote_host",
        "remote_port",
        "remote_request_id",
        "tp_size",
    ],
)
def test_a_handoff_without_a_field_is_refused_since_its_request_would_wait_for_ever(
    key: str,
) -> None:
    assert refusal(params(**{key: None}), 65) is Why.BAD_HANDOFF


@pytest.mark.parametrize("blocks", [[[7]], [[7, 8], [9]], [[]]])
def test_fewer_blocks_than_the_tokens_fill_are_refused_since_vllm_would_die_of_them(
    blocks: list[list[int]],
) -> None:
    assert refusal(params(remote_block_ids=blocks), 65) is Why.BAD_HANDOFF


def test_a_handoff_longer_than_the_prompt_is_refused() -> None:
    assert refusal(params(), 63) is Why.BAD_HANDOFF


def refusal(given: dict[str, Any] | None, tokens: int) -> Why | None:
    return handoff_refusal(given, tokens=tokens, block_size_tokens=BLOCK_SIZE_TOKENS)
