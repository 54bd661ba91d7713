"""Stop strings: the same for every way of cutting the text, and little held back."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwave.core.errors import Reason, ServingError
from splitwave.text.stop import STOP_CHARS_MAX, STOPS_MAX, StopStrings

LETTERS = st.text(alphabet="ab.", max_size=12)
STOPS = st.lists(st.text(alphabet="ab.", min_size=1, max_size=5), min_size=1, max_size=4)


def brute(
    text: str, stops: Sequence[str], include: bool, armed_from: int
) -> tuple[str, str | None]:
    """Look after every character whether one of the stops ends there, in the order given."""
    for end in range(armed_from + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def fed(
    stop_strings: StopStrings, pieces: Sequence[str], armed_from: int
) -> tuple[str, str | None]:
    shown, seen = "", 0
    for piece in pieces:
        unarmed_chars = min(max(armed_from - seen, 0), len(piece))
        seen += len(piece)
        text, stop = stop_strings.push(piece, unarmed_chars=unarmed_chars)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + stop_strings.finish(), None


def chunkings(text: str) -> list[list[str]]:
    """Every way to cut a text, 2^(n-1) of them."""
    cuttings = itertools.product([False, True], repeat=max(0, len(text) - 1))
    result = []
    for cutting in cuttings:
        bounds = [0, *(i + 1 for i, cut in enumerate(cutting) if cut), len(text)]
        result.append([text[a:b] for a, b in itertools.pairwise(bounds)])
    return result


@given(text=st.text(alphabet="ab.", max_size=7), stops=STOPS, include=st.booleans(), data=st.data())
def test_every_chunking_gives_what_looking_after_every_character_gives(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    armed_from = data.draw(st.integers(0, len(text)))
    want = brute(text, stops, include, armed_from)

    for pieces in chunkings(text):
        got = fed(StopStrings(stops, include_in_output=include), pieces, armed_from)
        assert got == want, pieces


@given(pieces=st.lists(LETTERS), stops=STOPS)
def test_only_an_end_that_a_stop_string_begins_with_is_held_back(
    pieces: list[str], stops: list[str]
) -> None:
    stop_strings, shown, seen = StopStrings(stops), "", ""
    for piece in pieces:
        text, stop = stop_strings.push(piece)
        shown, seen = shown + text, seen + piece
        if stop is not None:
            return
        held = seen[len(shown) :]
        ends = [seen[start:] for start in range(len(seen))]
        begun = [end for end in ends if any(s.startswith(end) and s != end for s in stops)]
        assert held == (begun[0] if begun else "")


@given(pieces=st.lists(LETTERS), stops=STOPS)
def test_nothing_is_held_back_if_the_stop_string_is_shown(
    pieces: list[str], stops: list[str]
) -> None:
    stop_strings = StopStrings(stops, include_in_output=True)
    for piece in pieces:
        text, stop = stop_strings.push(piece)
        if stop is not None:
            return
        assert text == piece


@pytest.mark.parametrize(
    ("stops", "shown", "matched"),
    [
        (["bcd", "abcde"], "xa", "bcd"),  # complete first, though it starts later
        (["c", "bc"], "xab", "c"),  # both end at c: the first listed
        (["bc", "c"], "xa", "bc"),
    ],
)
def test_the_match_that_is_complete_first_wins(stops: list[str], shown: str, matched: str) -> None:
    assert StopStrings(stops).push("xabcdef") == (shown, matched)


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        (["a", ""], r"stop\[1\]: an empty stop string"),
        (["a"] * (STOPS_MAX + 1), rf"stop: {STOPS_MAX + 1} stop strings .* at most {STOPS_MAX}"),
        (["a" * (STOP_CHARS_MAX + 1)], rf"stop\[0\]: .* at most {STOP_CHARS_MAX}"),
    ],
)
def test_bad_stop_strings_are_refused_naming_the_field(stops: list[str], message: str) -> None:
    with pytest.raises(ServingError, match=message) as refused:
        StopStrings(stops)

    assert refused.value.reason is Reason.INVALID_REQUEST


def test_no_stop_strings_never_match() -> None:
    assert StopStrings([]).push("anything") == ("anything", None)
