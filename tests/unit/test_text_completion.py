"""Tokens to the text that a client sees, with the token in which a stop string fell."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwave.core.errors import ServingError
from splitwave.text import TextDelta, TextOptions, TextStream, Tokenizer
from tests.unit import text_models

TEXT = "The capital of France is Paris. The quick brown fox 東京🎉 jumps."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    root: Path = tmp_path_factory.mktemp("model")
    return Tokenizer.load(text_models.byte_level(root))


def run(stream: TextStream, token_ids: list[int], step: int) -> tuple[str, str | None, int]:
    """Text, stop reason and tokens used, pushing `step` tokens at a time."""
    text, used = "", 0
    for start in range(0, len(token_ids), step):
        delta = stream.push(token_ids[start : start + step])
        text, used = text + delta.text, used + delta.token_count_used
        if delta.stopped:
            return text, delta.stop_reason, used
    last = stream.finish()
    return text + last.text, last.stop_reason, used


def test_without_stop_strings_all_tokens_are_used(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(TEXT)

    assert run(TextStream(tokenizer, TextOptions()), token_ids, 3) == (TEXT, None, len(token_ids))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["Paris", "s. Th", "京🎉", "🎉", "."])
@given(step=st.integers(1, 9))
def test_the_tokens_used_are_those_through_the_one_that_completes_the_stop_string(
    tokenizer: Tokenizer, include: bool, stop: str, step: int
) -> None:
    token_ids = tokenizer.encode(TEXT)
    completing = next(
        count for count in range(len(token_ids) + 1) if stop in tokenizer.decode(token_ids[:count])
    )
    stream = TextStream(tokenizer, TextOptions(stop=["never", stop], include_stop=include))

    text, reason, used = run(stream, token_ids, step)

    assert text == TEXT[: TEXT.index(stop)] + (stop if include else "")
    assert (reason, used) == (stop, completing)


def test_after_a_stop_nothing_more_is_shown_or_used(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, TextOptions(stop=["Paris"]))
    stream.push(tokenizer.encode("in Paris"))

    assert stream.push(tokenizer.encode("again")) == TextDelta("", True, "Paris", 0)
    assert stream.finish() == TextDelta("", True, "Paris", 0)


def test_text_held_back_for_a_stop_string_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, TextOptions(stop=["Paris, Texas"]))

    assert run(stream, tokenizer.encode("in Paris"), 1)[0] == "in Paris"


def test_bytes_left_at_the_end_are_shown_as_replacement_and_may_complete_a_stop_string(
    tokenizer: Tokenizer,
) -> None:
    token_ids = tokenizer.encode("x🦀")[:-1]
    assert tokenizer.decode(token_ids) == "x\ufffd"

    assert run(TextStream(tokenizer, TextOptions()), token_ids, 1)[0] == "x\ufffd"
    stopped = run(TextStream(tokenizer, TextOptions(stop=["\ufffd"])), token_ids, 1)
    assert stopped == ("x", "\ufffd", len(token_ids))


def test_a_stop_string_counts_only_if_it_is_complete_after_min_tokens(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("abcabcabc")
    assert len(token_ids) == 9

    for min_tokens, want in [(0, "ab"), (2, "ab"), (3, "abcab"), (6, "abcabcab"), (9, "abcabcabc")]:
        for step in (1, 2, 9):
            stream = TextStream(tokenizer, TextOptions(stop=["c"], min_tokens=min_tokens))
            assert run(stream, token_ids, step)[0] == want


def test_the_text_of_a_stop_token_is_shown_only_on_request(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("The fox</s>")
    end = frozenset({token_ids[-1]})

    for include, want in [(False, "The fox"), (True, "The fox</s>")]:
        options = TextOptions(
            stop_token_ids=end, include_stop=include, skip_special_tokens=False, stop=["never"]
        )
        stream = TextStream(tokenizer, options)
        assert run(stream, token_ids, 2) == (want, None, len(token_ids))


def test_stop_strings_are_looked_for_in_the_completion_alone(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, TextOptions(stop=["Paris"]), tokenizer.encode("in Par"))

    assert run(stream, tokenizer.encode("is."), 1)[:2] == ("is.", None)


def test_a_bad_stop_string_is_refused_before_any_work(tokenizer: Tokenizer) -> None:
    with pytest.raises(ServingError, match=r"stop\[0\]"):
        TextStream(tokenizer, TextOptions(stop=[""]))
