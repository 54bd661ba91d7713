"""The first token's keeping, decided for every sampling field; and the offsets of a completion."""

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from splitwave.core.generation import (
    Completion,
    OffsetBroken,
    Sampling,
    attempt_id,
    first_token_is_kept,
)

TABLE: dict[str, list[tuple[dict[str, object], bool]]] = {
    "max_tokens": [({"max_tokens": 1}, True), ({"max_tokens": 4096}, True)],
    "min_tokens": [({"min_tokens": 0}, True), ({"min_tokens": 1}, False)],
    "temperature": [({"temperature": 0.0}, True), ({"temperature": 0.7}, True)],
    "top_p": [({"top_p": 0.5}, True)],
    "top_k": [({"top_k": 40}, True)],
    "min_p": [({"min_p": 0.1}, True)],
    "seed": [
        ({"seed": 0, "temperature": 1.0}, False),
        ({"seed": 7, "temperature": 0.01}, False),
        ({"seed": 7, "temperature": 0.0}, True),  # Greedy draws nothing.
    ],
    "presence_penalty": [({"presence_penalty": 0.1}, False), ({"presence_penalty": -0.1}, False)],
    "frequency_penalty": [
        ({"frequency_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
    ],
    "repetition_penalty": [
        ({"repetition_penalty": 1.1}, False),
        ({"repetition_penalty": 0.9}, False),
    ],
    "logit_bias": [({"logit_bias": {5: 1.0}}, True)],
    "stop_token_ids": [({"stop_token_ids": (3,)}, True)],
    "eos_token_ids": [({"eos_token_ids": (2,)}, True)],
    "ignore_eos": [({"ignore_eos": True}, True)],
    "logprobs": [({"logprobs": 0}, True), ({"logprobs": 5}, True)],
}
"""For each field, values of it and whether prefill's token is kept with them."""
ROWS = [row for rows in TABLE.values() for row in rows]


def test_a_new_sampling_field_must_be_decided() -> None:
    assert set(TABLE) == {field.name for field in dataclasses.fields(Sampling)}


def test_plain_sampling_keeps_the_first_token() -> None:
    assert first_token_is_kept(Sampling(max_tokens=16))


@pytest.mark.parametrize(("values", "kept"), ROWS)
def test_each_field_alone(values: dict[str, object], kept: bool) -> None:
    assert first_token_is_kept(changed(values)) is kept


@given(st.lists(st.sampled_from(ROWS), max_size=5))
def test_one_field_that_keeps_state_is_enough_to_discard(
    rows: list[tuple[dict[str, object], bool]],
) -> None:
    values = {name: value for row, _ in rows for name, value in row.items()}
    sampling = changed(values)
    # A later row may have made a seeded generation greedy, or a greedy one not.
    discarding = [
        row
        for row, kept in ROWS
        if not kept and "seed" not in row and row.items() <= values.items()
    ]
    seeded = sampling.seed is not None and sampling.temperature > 0.0

    assert first_token_is_kept(sampling) is not (bool(discarding) or seeded)


def changed(values: dict[str, object]) -> Sampling:
    return dataclasses.replace(Sampling(max_tokens=16), **values)  # type: ignore[arg-type]  # values of any field


def test_attempts_have_names_of_their_own() -> None:
    assert attempt_id("req", 2, 1) == "req/2/1"


class AcceptsRepeats(Completion):
    """Mutant: a repeated frame is appended again."""

    def extend(self, offset: int, token_ids: Sequence[int]) -> None:
        if offset > self.offset:
            raise OffsetBroken
        self.token_ids.extend(token_ids)


class AcceptsGaps(Completion):
    """Mutant: a lost frame goes unnoticed."""

    def extend(self, offset: int, token_ids: Sequence[int]) -> None:
        if offset < self.offset:
            raise OffsetBroken
        self.token_ids.extend(token_ids)


class AppendsBeforeItLooks(Completion):
    """Mutant: a bad frame leaves its tokens behind."""

    def extend(self, offset: int, token_ids: Sequence[int]) -> None:
        due = self.offset
        self.token_ids.extend(token_ids)
        if offset != due:
            raise OffsetBroken


frames = st.lists(
    st.tuples(st.integers(-3, 3), st.lists(st.integers(0, 9), min_size=1, max_size=3)), max_size=12
)
"""How far from the due offset each frame begins, and its tokens."""


def check_completion(kind: type[Completion], frames: list[tuple[int, list[int]]]) -> None:
    completion = kind()
    seen: list[int] = []
    for shift, token_ids in frames:
        if shift == 0:
            completion.extend(completion.offset, token_ids)
            seen += token_ids
        else:
            with pytest.raises(OffsetBroken):
                completion.extend(completion.offset + shift, token_ids)
        assert completion.token_ids == seen
        assert completion.offset == len(seen)


@given(frames)
def test_offsets_have_no_gap_and_no_repeat(frames: list[tuple[int, list[int]]]) -> None:
    check_completion(Completion, frames)


@pytest.mark.parametrize("mutant", [AcceptsRepeats, AcceptsGaps, AppendsBeforeItLooks])
def test_a_completion_that_breaks_its_offsets_is_caught(mutant: type[Completion]) -> None:
    @settings(phases=[Phase.generate])
    @given(frames)
    def broken(frames: list[tuple[int, list[int]]]) -> None:
        check_completion(mutant, frames)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        broken()
