"""What lies within an envelope, to the last token, and how what does not is refused."""

import dataclasses
import json
from typing import Any  # a test's keywords

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwave.core.envelope import (
    Envelope,
    EnvelopeError,
    GroupShape,
    Limit,
    OutsideEnvelope,
    Traffic,
    read_envelope,
)
from splitwave.core.strict_json import JsonError, canonical, parse
from tests.unit.certificates import ENVELOPE, SHAPE


def limit_of(refusal: OutsideEnvelope | None) -> Limit | None:
    return None if refusal is None else refusal.limit


def test_its_own_group_is_within() -> None:
    assert ENVELOPE.refuse_group(SHAPE) is None


@pytest.mark.parametrize(
    ("change", "limit", "asked", "certified"),
    [
        ({"ranks": 1}, Limit.RANKS, 1, 2),
        ({"ranks": 4}, Limit.RANKS, 4, 2),
        ({"tensor_parallel": 2}, Limit.TENSOR_PARALLEL, 2, 1),
        ({"seats_per_rank": 5}, Limit.SEATS, 5, 4),
        ({"sequence_max_tokens": 129}, Limit.SEQUENCE_LENGTH, 129, 128),
        ({"step_max_tokens": 5}, Limit.TOKENS_CAP, 5, 4),
        ({"capture_grid": (1, 2, 4)}, Limit.CAPTURE_GRID, "1, 2, 4", "1, 2, 3, 4"),
        ({"capture_grid": ()}, Limit.CAPTURE_GRID, "none", "1, 2, 3, 4"),
    ],
)
def test_a_group_of_another_shape_is_refused_by_the_limit(
    change: dict[str, Any], limit: Limit, asked: object, certified: object
) -> None:
    refusal = ENVELOPE.refuse_group(dataclasses.replace(SHAPE, **change))

    assert refusal is not None
    assert (refusal.limit, refusal.asked, refusal.certified) == (limit, asked, certified)
    assert str(limit) in str(refusal)


def test_a_smaller_group_of_the_same_ranks_is_within() -> None:
    small = GroupShape(
        ranks=2, tensor_parallel=1, seats_per_rank=1, sequence_max_tokens=1, step_max_tokens=1,
        capture_grid=(1, 2, 3, 4),
    )  # fmt: skip

    assert ENVELOPE.refuse_group(small) is None


@pytest.mark.parametrize(
    ("prompt", "output", "sampling", "limit"),
    [
        (96, 32, (), None),
        (64, 64, ("seed", "top_k"), None),
        (1, 1, ("top_k",), None),
        (97, 1, (), Limit.PROMPT_LENGTH),
        (1, 65, (), Limit.OUTPUT_LENGTH),
        (65, 64, (), Limit.SEQUENCE_LENGTH),
        (1, 1, ("min_p",), Limit.SAMPLING),
    ],
)
def test_a_request_is_held_to_its_lengths_and_features(
    prompt: int, output: int, sampling: tuple[str, ...], limit: Limit | None
) -> None:
    refusal = ENVELOPE.refuse_request(
        prompt_tokens=prompt, output_max_tokens=output, sampling=sampling
    )

    assert limit_of(refusal) == limit


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": 0}, "ranks: is 0"),
        ({"tensor_parallel": 0}, "tensor_parallel: is 0"),
        ({"step_min_tokens": -1}, "step_min_tokens: is -1"),
        ({"step_min_tokens": 5}, "step_min_tokens: is 5, above step_max_tokens, 4"),
        ({"capture_grid": (2, 1, 4)}, "capture_grid: must ascend"),
        ({"capture_grid": (1, 1, 4)}, "capture_grid: must ascend"),
        ({"capture_grid": (0, 4)}, "capture_grid: is 0"),
        ({"seats_max": 5}, "seats_max: is 5, above the largest capture size, 4"),
        ({"prompt_max_tokens": 129}, "prompt_max_tokens: is 129, above sequence_max_tokens, 128"),
    ],
)
def test_an_envelope_that_contradicts_itself_is_none(change: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvelopeError, match=words):
        dataclasses.replace(ENVELOPE, **change)


@pytest.mark.parametrize("sampling", [("b", "a"), ("a", "a")])
def test_sampling_features_are_sorted_once(sampling: tuple[str, ...]) -> None:
    with pytest.raises(EnvelopeError, match=r"traffic\.sampling: must ascend"):
        Traffic(output_max_tokens=1, sampling=sampling)


sizes = st.integers(1, 1000)


@st.composite
def envelopes(draw: st.DrawFn) -> Envelope:
    grid = tuple(sorted(draw(st.sets(sizes, max_size=6))))
    prompt = draw(sizes)
    cap = draw(sizes)
    return Envelope(
        ranks=draw(sizes),
        tensor_parallel=draw(sizes),
        capture_grid=grid,
        step_min_tokens=draw(st.integers(0, cap)),
        step_max_tokens=cap,
        seats_max=draw(st.integers(1, grid[-1]) if grid else sizes),
        prompt_max_tokens=prompt,
        sequence_max_tokens=prompt + draw(st.integers(0, 1000)),
        traffic=Traffic(
            output_max_tokens=draw(sizes),
            sampling=tuple(sorted(draw(st.sets(st.sampled_from("abcd"))))),
        ),
    )


@given(envelopes())
def test_an_envelope_survives_json(envelope: Envelope) -> None:
    data = canonical(envelope.to_json())

    assert read_envelope(parse(data, bytes_max=10_000)) == envelope


@pytest.mark.parametrize("name", [*ENVELOPE.to_json(), "traffic.sampling"])
def test_a_missing_or_unknown_field_is_named(name: str) -> None:
    value: dict[str, Any] = json.loads(canonical(ENVELOPE.to_json()))
    place = value["traffic"] if "." in name else value
    last = name.rpartition(".")[2]
    kept = place.pop(last)

    with pytest.raises(JsonError, match=rf"envelope\.{name}: is missing"):
        read_envelope(value)
    place.update({last: kept, "odd": 1})
    with pytest.raises(JsonError, match="odd: is unknown"):
        read_envelope(value)
    place.pop("odd")
    place[last] = {"a": 1} if last != "traffic" else 3
    with pytest.raises(JsonError, match=rf"envelope\.{name}: is no"):
        read_envelope(value)
