"""The text shown in pieces is the text of the whole, and nothing shown is taken back."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwave.text import Detokenizer, ModelDirectoryError, Tokenizer
from splitwave.text.pieces import decoding_of
from tests.unit import text_models

TEXTS = st.text(
    alphabet=st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("Thecapital is .\n  東京é🎉👩‍👧\ufffd▁"),
    ),
    max_size=40,
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root: Path = tmp_path_factory.mktemp("models")
    return {name: Tokenizer.load(build(root / name)) for name, build in text_models.ALL.items()}


def streamed(detokenizer: Detokenizer, token_ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """What each push shows, the ids cut before each index of `cuts`; last what finish shows."""
    bounds = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    shown = [detokenizer.push(token_ids[start:end]) for start, end in itertools.pairwise(bounds)]
    return [*shown, detokenizer.finish()]


def one_by_one(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return streamed(detokenizer, token_ids, range(len(token_ids)))


@pytest.mark.parametrize("name", text_models.ALL)
@given(data=st.data(), cuts=st.lists(st.integers(0, 100)), skip=st.booleans())
def test_any_tokens_in_any_pieces_give_the_text_of_the_whole(
    tokenizers: dict[str, Tokenizer], name: str, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    tokenizer = tokenizers[name]
    # Ids of the model's rows: some have no token, as in models with a padded vocabulary.
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))

    shown = streamed(Detokenizer(tokenizer, skip_special_tokens=skip), token_ids, cuts)

    assert "".join(shown) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@given(data=st.data())
def test_any_bytes_give_the_text_of_the_whole(
    tokenizers: dict[str, Tokenizer], name: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[name]
    pieces = {piece: i for i in range(300) if isinstance(piece := tokenizer.shown_pieces[i], bytes)}
    hard = [piece for piece in pieces if piece[0] >= 0x80 and len(piece) == 1]
    token_ids = [pieces[octet] for octet in data.draw(st.lists(st.sampled_from(hard)))]
    token_ids += tokenizer.encode(data.draw(TEXTS), add_special_tokens=False)

    shown = one_by_one(Detokenizer(tokenizer), token_ids)

    assert "".join(shown) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
def test_a_valid_text_never_shows_a_replacement_character(
    tokenizers: dict[str, Tokenizer], name: str, text: str
) -> None:
    tokenizer = tokenizers[name]
    token_ids = tokenizer.encode(text, add_special_tokens=False)

    shown = one_by_one(Detokenizer(tokenizer), token_ids)

    assert not any("\ufffd" in piece for piece in shown)


@given(text=TEXTS)
def test_a_byte_level_stream_holds_back_less_than_one_character(
    tokenizers: dict[str, Tokenizer], text: str
) -> None:
    tokenizer, seen = tokenizers["byte_level"], ""
    detokenizer = Detokenizer(tokenizer)
    token_ids = tokenizer.encode(text)
    for count, token_id in enumerate(token_ids, start=1):
        seen += detokenizer.push([token_id])
        assert tokenizer.decode(token_ids[:count]).rstrip("\ufffd") in (seen, seen.rstrip("\ufffd"))


@given(text=TEXTS, cut=st.integers(0, 100))
def test_a_completion_goes_on_where_its_prompt_ended_within_a_character_too(
    tokenizers: dict[str, Tokenizer], text: str, cut: int
) -> None:
    tokenizer = tokenizers["byte_level"]
    token_ids = tokenizer.encode(text)
    cut %= len(token_ids) + 1
    prompt = one_by_one(Detokenizer(tokenizer), token_ids[:cut])[:-1]

    shown = one_by_one(Detokenizer(tokenizer, prompt_token_ids=token_ids[:cut]), token_ids[cut:])

    assert "".join(prompt) + "".join(shown) == text


def test_a_leading_space_is_kept_behind_a_prompt_and_lost_without_one(
    tokenizers: dict[str, Tokenizer],
) -> None:
    for name in ("byte_fallback", "metaspace"):
        tokenizer = tokenizers[name]
        prompt, word = (
            tokenizer.encode(text, add_special_tokens=False) for text in ("The", "Paris")
        )

        behind = Detokenizer(tokenizer, prompt_token_ids=prompt)
        alone = Detokenizer(tokenizer, prompt_token_ids=tokenizer.encode("")[:1])

        assert "".join(one_by_one(behind, word)) == " Paris"
        assert "".join(one_by_one(alone, word)) == "Paris"


def test_one_invalid_byte_spoils_a_run_of_byte_tokens_so_the_run_waits(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["byte_fallback"]
    vocab = tokenizer.backend.get_vocab()
    party = [vocab[f"<0x{byte:02X}>"] for byte in "🎉".encode()]
    bad, letter = vocab["<0xFF>"], vocab["T"]

    assert one_by_one(Detokenizer(tokenizer), [letter, *party, letter]) == [
        "", "T", "", "", "", "", "🎉T", ""
    ]  # fmt: skip
    spoiled = one_by_one(Detokenizer(tokenizer), [letter, *party, bad, letter])
    assert (
        "".join(spoiled)
        == "T" + "\ufffd" * 5 + "T"
        == tokenizer.decode([letter, *party, bad, letter])
    )


def test_special_tokens_are_skipped_or_shown(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    token_ids = tokenizer.encode("The<|sep|>fox</s>")

    assert Detokenizer(tokenizer).push(token_ids) == "Thefox"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(token_ids) == "The<|sep|>fox</s>"


@pytest.mark.parametrize(
    "steps",
    [
        ["CTC"],
        ["BPEDecoder"],
        ["Fuse", "Replace"],
        ["ByteFallback", "Replace"],
        ["ByteFallback", "Strip"],
        ["ByteLevel", "Replace"],
    ],
)
def test_a_decoder_that_cannot_be_streamed_exactly_is_refused_by_name(steps: list[str]) -> None:
    sequence = {"type": "Sequence", "decoders": [{"type": kind} for kind in steps]}

    with pytest.raises(ModelDirectoryError, match=r"m/tokenizer.json: decoder step"):
        decoding_of({"decoder": sequence}, "m/tokenizer.json")


def test_a_negative_token_id_is_our_bug(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(AssertionError):
        Detokenizer(tokenizers["byte_level"]).push([-1])
