"""The simulator's tokenizer, read as the router reads any model's."""

from pathlib import Path

import pytest

from splitwave.core.generation import Sampling
from splitwave.engine.sim import SimModel, write_vocabulary
from splitwave.text import Tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_vocabulary(tmp_path / "model", model_len_max_tokens=512)
    return Tokenizer.load(tmp_path / "model")


def test_a_byte_is_its_own_id(tokenizer: Tokenizer) -> None:
    points = (*range(0x20, 0x800), *range(0x800, 0xD800, 64), *range(0xE000, 0x110000, 4096))
    text = "".join(map(chr, points))

    ids = tokenizer.encode(text)

    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert set(range(256)) - set(ids) == {*range(0x20), 0xC0, 0xC1, *range(0xF5, 0x100)}


def test_control_characters_are_ids_too(tokenizer: Tokenizer) -> None:
    text = "".join(map(chr, range(0x20)))

    assert tokenizer.encode(text) == list(range(0x20))
    assert tokenizer.decode(list(range(0x20))) == text


def test_special_tokens_end_a_generation_and_leave_the_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == {259}
    assert (tokenizer.bos_token_id, tokenizer.vocab_size, tokenizer.model_len_max) == (
        257,
        260,
        512,
    )
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [258, 97, 259]
    assert tokenizer.decode([258, 97, 259]) == "a"


def test_what_the_model_says_is_one_character_a_token(tokenizer: Tokenizer) -> None:
    made = SimModel().complete(tokenizer.encode("Hello"), Sampling(max_tokens=300)).token_ids

    assert len(tokenizer.decode(made)) == 300
