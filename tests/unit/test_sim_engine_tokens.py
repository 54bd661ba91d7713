"""The simulated model: what follows from what."""

import dataclasses
import struct
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwave.core.generation import FinishReason, Sampling
from splitwave.engine.sim import SimModel
from splitwave.engine.sim.tokens import ALPHABET, EOS_TOKEN_ID, Continuation, extend

PROMPT = list(b"The capital of France is")
GREEDY = Sampling(max_tokens=40, temperature=0.0)
SAMPLED = Sampling(max_tokens=40, temperature=0.7, seed=5)

token_lists = st.lists(st.integers(0, 259), min_size=1, max_size=40)


def text(
    prompt: list[int], sampling: Sampling = GREEDY, model: SimModel | None = None
) -> list[int]:
    return (model or SimModel()).complete(prompt, sampling).token_ids


def test_the_text_is_printable_and_long_enough() -> None:
    made = text(PROMPT, dataclasses.replace(GREEDY, max_tokens=2_000))

    assert len(made) == 2_000
    assert set(made) <= set(ALPHABET)
    assert bytes(made).decode("ascii").replace("\n", " ").isprintable()
    # 96 ids in 2,000 draws: a hash that favours some would show here.
    assert len(Counter(made)) == len(ALPHABET)
    assert max(Counter(made).values()) < 50


@given(token_lists, token_lists)
def test_a_state_is_the_same_however_its_tokens_came(first: list[int], second: list[int]) -> None:
    assert extend(extend(1, first), second) == extend(1, first + second)


@given(token_lists, st.integers(0, 39), st.integers(1, 259))
def test_one_wrong_token_anywhere_changes_the_text(prompt: list[int], at: int, by: int) -> None:
    wrong = list(prompt)
    wrong[at % len(wrong)] = (wrong[at % len(wrong)] + by) % 260

    assert text(wrong) != text(prompt)


@given(token_lists, st.integers(0, 39))
def test_a_missing_or_repeated_token_changes_the_text(prompt: list[int], at: int) -> None:
    at %= len(prompt)

    assert text([*prompt[:at], *prompt[at + 1 :], 65]) != text([*prompt, 65])
    assert text([*prompt[: at + 1], *prompt[at:]]) != text(prompt)


def test_a_resume_goes_on_with_the_same_text() -> None:
    whole = text(PROMPT)

    for emitted in range(1, 40):
        rest = dataclasses.replace(GREEDY, max_tokens=40 - emitted)
        assert text(PROMPT + whole[:emitted], rest) == whole[emitted:]


@pytest.mark.parametrize(
    "stateful",
    [
        SAMPLED,
        dataclasses.replace(GREEDY, presence_penalty=0.5),
        dataclasses.replace(GREEDY, frequency_penalty=0.5),
        dataclasses.replace(GREEDY, repetition_penalty=1.1),
    ],
)
def test_what_keeps_state_starts_afresh_in_another_engine_request(stateful: Sampling) -> None:
    whole = text(PROMPT, stateful)

    rest = dataclasses.replace(stateful, max_tokens=39)
    assert text([*PROMPT, whole[0]], rest) != whole[1:]


def test_a_seed_means_nothing_to_greedy_sampling() -> None:
    assert text(PROMPT, dataclasses.replace(GREEDY, seed=5)) == text(PROMPT)


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.8},
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.1},
        {"seed": 6},
        {"seed": None},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.2},
        {"logit_bias": {65: 1.5}},
    ],
    ids=str,
)
def test_a_sampling_field_lost_on_the_way_changes_the_text(changed: dict[str, object]) -> None:
    lost = dataclasses.replace(SAMPLED, **changed)  # type: ignore[arg-type]  # names a field

    assert text(PROMPT, lost) != text(PROMPT, SAMPLED)


def test_numbers_that_went_through_32_bits_change_nothing() -> None:
    (narrow,) = struct.unpack("f", struct.pack("f", 0.7))
    through_32_bits = dataclasses.replace(SAMPLED, temperature=narrow)

    assert narrow != 0.7
    assert text(PROMPT, through_32_bits) == text(PROMPT, SAMPLED)


def test_models_of_different_seed_differ() -> None:
    assert text(PROMPT, model=SimModel(seed=1)) != text(PROMPT, model=SimModel(seed=2))


def test_a_stop_token_ends_the_text_and_is_part_of_it() -> None:
    whole = text(PROMPT)
    stop = whole[7]
    first = whole.index(stop)

    got = SimModel().complete(PROMPT, dataclasses.replace(GREEDY, stop_token_ids=(stop, 300)))

    assert got.token_ids == whole[: first + 1]
    assert (got.finish, got.stop_token_id) == (FinishReason.STOP, stop)


def test_no_stop_token_is_sampled_before_min_tokens() -> None:
    stops = ALPHABET[: len(ALPHABET) // 2]
    sampling = dataclasses.replace(GREEDY, stop_token_ids=stops, min_tokens=20)

    got = SimModel().complete(PROMPT, sampling)

    assert not set(got.token_ids[:20]) & set(stops)
    assert len(got.token_ids) > 20
    assert got.finish is FinishReason.STOP


def test_the_end_of_sequence_comes_at_its_rate_and_from_the_content() -> None:
    model = SimModel(eos_rate=0.05)
    sampling = dataclasses.replace(GREEDY, max_tokens=1_000, eos_token_ids=(EOS_TOKEN_ID,))

    lengths = []
    for i in range(300):
        got = model.complete([*PROMPT, i], sampling)
        assert got == model.complete([*PROMPT, i], sampling)
        assert got.stop_token_id == got.token_ids[-1] == EOS_TOKEN_ID
        lengths.append(len(got.token_ids))

    assert 17 < sum(lengths) / len(lengths) < 23


def test_ignore_eos_goes_on_behind_the_end_of_sequence() -> None:
    sampling = dataclasses.replace(
        GREEDY, max_tokens=200, eos_token_ids=(EOS_TOKEN_ID,), ignore_eos=True
    )

    got = SimModel(eos_rate=0.05).complete(PROMPT, sampling)

    assert EOS_TOKEN_ID in got.token_ids[:-1]
    assert (len(got.token_ids), got.finish) == (200, FinishReason.LENGTH)


def test_min_tokens_hides_the_end_of_sequence_too() -> None:
    sampling = dataclasses.replace(
        GREEDY, max_tokens=200, eos_token_ids=(EOS_TOKEN_ID,), min_tokens=100
    )

    got = SimModel(eos_rate=0.05).complete(PROMPT, sampling)

    assert EOS_TOKEN_ID not in got.token_ids[:100]
    assert got.finish is FinishReason.STOP


def test_the_models_length_ends_a_text() -> None:
    got = SimModel(length_max_tokens=len(PROMPT) + 5).complete(PROMPT, GREEDY)

    assert (len(got.token_ids), got.finish) == (5, FinishReason.LENGTH)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 20, 200])
def test_logprobs_name_the_sampled_token_and_the_most_likely(
    sampling: Sampling, count: int
) -> None:
    got = SimModel().complete(PROMPT, dataclasses.replace(sampling, logprobs=count))

    assert [x.token_id for x in got.logprobs] == got.token_ids == text(PROMPT, sampling)
    for entry in got.logprobs:
        assert len(entry.top) == min(count, 95)
        assert len({token for token, _ in entry.top}) == len(entry.top)
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert all(value < 0 for value in (*values, entry.logprob))
        assert entry.rank == 1 or sampling is SAMPLED
        if entry.rank <= count:
            assert entry.top[entry.rank - 1] == (entry.token_id, entry.logprob)


def test_ids_that_are_no_ids_are_refused() -> None:
    for wrong in (-1, 2**32):
        with pytest.raises(OverflowError):
            extend(0, [wrong])


def test_a_continuation_counts_its_own_tokens_from_zero() -> None:
    model = SimModel()
    going = Continuation(
        model, state=extend(model.empty_state, PROMPT), length=len(PROMPT), sampling=GREEDY
    )

    made = [going.advance(), going.advance()]

    assert made == text(PROMPT)[:2]
    assert (going.made, going.length) == (2, len(PROMPT) + 2)
    assert going.state == extend(model.empty_state, PROMPT + made)
