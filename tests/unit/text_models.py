"""Small model directories, one for each way in which tokenizers decode."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

CORPUS = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "héllo wörld naïve façade 東京は日本の首都です 你好世界 👩‍👩‍👧 🎉🎉 Ελλάδα שלום",
    "def f(x):\n    return x + 1\n\n\n  indented   spaces",
] * 3
SPECIAL = ["<s>", "</s>", "<|sep|>"]


def write_model(directory: Path, tokenizer: Tokenizer, **tokenizer_config: object) -> Path:
    """Write the files that `splitwave.text` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", **tokenizer_config}
    for name, content in {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **named},
        "config.json": {
            "vocab_size": tokenizer.get_vocab_size() + 7,
            "max_position_embeddings": 256,
            "eos_token_id": 1,
        },
        "generation_config.json": {"eos_token_id": [1, 2]},
    }.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def byte_level(directory: Path) -> Path:
    """BPE over bytes: GPT-2, Llama 3, Qwen, DeepSeek, SmolLM2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Not special, and not in the byte-level alphabet: its text is taken as it is.
    tokenizer.add_tokens([AddedToken("<think ▁>", normalized=False)])
    return write_model(directory, tokenizer)


def byte_fallback(directory: Path) -> Path:
    """BPE over characters with byte tokens for the rest: Llama 2, Mistral, Mixtral."""
    tokenizer = _sentencepiece_like()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return write_model(directory, tokenizer, add_bos_token=True, add_eos_token=False)


def metaspace(directory: Path) -> Path:
    """The same vocabulary under the older Metaspace decoder, without byte tokens."""
    tokenizer = _sentencepiece_like()
    tokenizer.decoder = decoders.Metaspace()
    return write_model(directory, tokenizer)


def word_piece(directory: Path) -> Path:
    """Words and ## endings."""
    words = ["[UNK]", "the", "cap", "##ital", "of", "france", "is", "paris", ".", "##s", "'", "t"]
    vocab = {word: index for index, word in enumerate(SPECIAL + words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    return write_model(directory, tokenizer)


def _sentencepiece_like() -> Tokenizer:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", *"ThecapitlofrnsPquikbwxjmvzydg.éö東京"]
    merges = [("▁", "T"), ("▁T", "h"), ("h", "e"), ("▁", "▁"), ("i", "s"), ("▁", "P"), ("a", "r")]
    merged = [left + right for left, right in merges]
    tokens = [*SPECIAL, *byte_tokens, *letters, *merged]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<s>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", vocab["<s>"])]
    )
    return tokenizer


ALL = {model.__name__: model for model in (byte_level, byte_fallback, metaspace, word_piece)}
