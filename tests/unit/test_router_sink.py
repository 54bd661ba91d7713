"""Tokens become parts: text, offsets, log probabilities, and where a stop string ends them."""

from pathlib import Path

import pytest

from services.router.sink import Part, TextSink
from splitwave.core.generation import OffsetBroken, TokenLogprob
from splitwave.engine.sim import write_vocabulary
from splitwave.text import TextOptions, TextStream, Tokenizer

EURO = tuple("€".encode())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("model")
    write_vocabulary(directory)
    return Tokenizer.load(directory)


def sink_of(tokenizer: Tokenizer, *stop: str) -> tuple[TextSink, list[Part]]:
    parts: list[Part] = []
    stream = TextStream(tokenizer, TextOptions(stop=stop), (72,))
    return TextSink(stream, parts.append), parts


async def test_a_character_comes_when_it_is_whole(tokenizer: Tokenizer) -> None:
    sink, parts = sink_of(tokenizer)

    for offset, token_id in enumerate(EURO):
        assert not sink.write(offset, [token_id], ())

    assert [part.text for part in parts] == ["", "", "€"]
    assert [part.offset for part in parts] == [0, 1, 2]
    assert sink.shown_tokens == 3


async def test_tokens_behind_a_stop_string_are_not_part_of_the_completion(
    tokenizer: Tokenizer,
) -> None:
    sink, parts = sink_of(tokenizer, "lo")
    rows = [TokenLogprob(token_id, -1.0, 1) for token_id in b"hello!"]

    assert sink.write(0, list(b"hello!"), rows)

    (part,) = parts
    assert (part.text, list(part.token_ids)) == ("hel", list(b"hello"))
    assert (len(part.logprobs), sink.shown_tokens, sink.stop_string) == (5, 5, "lo")
    assert sink.finish() == ""


async def test_what_was_held_back_comes_with_the_end(tokenizer: Tokenizer) -> None:
    sink, parts = sink_of(tokenizer, "lo!")

    sink.write(0, list(b"hello"), ())

    assert ("".join(part.text for part in parts), sink.finish()) == ("hel", "lo")


@pytest.mark.parametrize("offset", [0, 2])
async def test_a_repeat_or_a_gap_is_never_shown(tokenizer: Tokenizer, offset: int) -> None:
    sink, parts = sink_of(tokenizer)
    sink.write(0, [72], ())

    with pytest.raises(OffsetBroken):
        sink.write(offset, [73], ())

    assert len(parts) == 1
