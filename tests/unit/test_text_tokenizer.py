"""The router's tokenizer gives the ids that the model's own would give."""

import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from splitwave.core.errors import Reason, ServingError
from splitwave.text import ModelDirectoryError, Tokenizer
from splitwave.text.tokenizer import ENCODE_ON_LOOP_MAX_CHARS
from tests.unit import text_models

TEXTS = ["", "The capital of France", "  two  spaces ", "a</s>b", "<s>", "東京🎉", "x\n\n"]


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_what_the_directory_says_is_read(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(text_models.byte_level(tmp_path))

    assert tokenizer.eos_token_ids == {1, 2}
    assert tokenizer.bos_token_id == 0
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.model_len_max == 256
    assert tokenizer.vocab_size == tokenizer.backend.get_vocab_size() + 7
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("generation_config", "want"),
    [({"eos_token_id": 2}, {1, 2}), ({"eos_token_id": [0, 2]}, {0, 1, 2}), ({"top_p": 1}, {1})],
)
def test_generation_config_adds_end_tokens_to_the_tokenizers_own(
    tmp_path: Path, generation_config: dict[str, object], want: set[int]
) -> None:
    text_models.byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))

    assert Tokenizer.load(tmp_path).eos_token_ids == want


def test_config_stands_in_for_a_missing_generation_config(tmp_path: Path) -> None:
    text_models.byte_level(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    edit(tmp_path / "config.json", eos_token_id=2)

    assert Tokenizer.load(tmp_path).eos_token_ids == {1, 2}


def test_the_text_part_of_a_multimodal_config_is_found(tmp_path: Path) -> None:
    text_models.byte_level(tmp_path)
    nested = {"vocab_size": 999, "max_position_embeddings": 77}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": nested}))

    tokenizer = Tokenizer.load(tmp_path)

    assert (tokenizer.vocab_size, tokenizer.model_len_max) == (999, 77)


def test_the_chat_template_file_goes_before_the_field(tmp_path: Path) -> None:
    text_models.byte_level(tmp_path)
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "field"}]
    edit(tmp_path / "tokenizer_config.json", chat_template=named)
    assert Tokenizer.load(tmp_path).chat_template == "field"

    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(tmp_path).chat_template == "file"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json: missing; the router needs a fast tokenizer"),
        ("config.json", None, "config.json: missing; copy it"),
        ("tokenizer.json", "{", "tokenizer.json: not JSON"),
        ("tokenizer.json", '{"decoder": null}', "tokenizer.json: not a tokenizer"),
        ("generation_config.json", "[]", "generation_config.json: not a JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id is 'x'; it must be"),
        ("config.json", '{"vocab_size": 0}', "config.json: vocab_size is 0; it must be"),
    ],
)
def test_a_bad_file_is_named_with_the_fix(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    text_models.byte_level(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)

    with pytest.raises(ModelDirectoryError) as refused:
        Tokenizer.load(tmp_path)

    assert str(tmp_path) in str(refused.value)
    assert message in str(refused.value)


def test_a_missing_directory_is_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match=r"nowhere: no such directory; .*demo-model"):
        Tokenizer.load(tmp_path / "nowhere")


def test_training_settings_never_cut_or_pad_a_prompt(tmp_path: Path) -> None:
    text_models.byte_level(tmp_path)
    edit(
        tmp_path / "tokenizer.json",
        truncation={
            "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
        },
        padding={
            "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>",
        },
    )  # fmt: skip
    tokenizer = Tokenizer.load(tmp_path)

    assert tokenizer.decode(tokenizer.encode("The quick brown fox")) == "The quick brown fox"


def test_a_lone_surrogate_is_the_callers_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(text_models.byte_level(tmp_path))

    with pytest.raises(ServingError, match="prompt: holds a lone surrogate") as refused:
        tokenizer.encode("a\ud800b")

    assert refused.value.reason is Reason.INVALID_REQUEST


async def test_a_long_prompt_is_encoded_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, threads = Tokenizer.load(text_models.byte_level(tmp_path)), []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    text = "a" * ENCODE_ON_LOOP_MAX_CHARS
    assert await tokenizer.encode_async(text) == encode(tokenizer, text)
    assert await tokenizer.encode_async(text + "b") == encode(tokenizer, text + "b")
    assert threads == [True, False]


@pytest.mark.timeout(120)  # Importing transformers takes long on a busy machine.
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="NOT RUN: needs transformers"
)
@pytest.mark.parametrize("name", text_models.ALL)
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"additional_special_tokens": ["東"]},
        {"added_tokens_decoder": {"1000": {"content": "capital", "special": False}}},
    ],
    ids=str,
)
def test_ids_are_those_of_transformers(tmp_path: Path, name: str, flags: dict[str, object]) -> None:
    from transformers import AutoTokenizer

    text_models.ALL[name](tmp_path)
    edit(tmp_path / "tokenizer_config.json", **flags)
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)

    for text in TEXTS:
        for add_special_tokens in (True, False):
            want = theirs.encode(text, add_special_tokens=add_special_tokens)
            assert ours.encode(text, add_special_tokens=add_special_tokens) == want, text
            assert ours.decode(want) == theirs.decode(
                want, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )


def test_text_imports_no_heavy_package() -> None:
    code = (
        "import sys, splitwave.text\n"
        "heavy = {'torch', 'transformers', 'vllm', 'numpy', 'huggingface_hub', 'grpc'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)

    assert done.returncode == 0, done.stderr
