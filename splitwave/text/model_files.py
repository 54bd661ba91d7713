"""The files of a model directory that text needs, read with errors that name the file."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"

_NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token")


class ModelDirectoryError(Exception):
    """A model directory cannot be used; the message names the file and the fix."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the JSON files say, parsed but not interpreted.

    `tokenizer_config` and `generation_config` are empty where the file is absent:
    models do without them.
    """

    directory: Path
    tokenizer: Mapping[str, object]
    tokenizer_config: Mapping[str, object]
    config: Mapping[str, object]
    generation_config: Mapping[str, object]
    chat_template: str | None

    @classmethod
    def read(cls, directory: Path) -> "ModelFiles":
        """Read every file, or raise ModelDirectoryError."""
        if not directory.is_dir():
            raise ModelDirectoryError(
                f"{directory}: no such directory; give a model directory that holds {CONFIG} and"
                f" {TOKENIZER}, or build one with `splitwave demo-model`"
            )
        tokenizer_config = _read_object(directory / TOKENIZER_CONFIG, required=False)
        return cls(
            directory=directory,
            tokenizer=_read_object(directory / TOKENIZER, required=True),
            tokenizer_config=tokenizer_config,
            config=_read_object(directory / CONFIG, required=True),
            generation_config=_read_object(directory / GENERATION_CONFIG, required=False),
            chat_template=_chat_template(directory, tokenizer_config),
        )

    def named_tokens(self) -> dict[str, str]:
        """Role to token text for the roles the model names, such as bos_token."""
        found: dict[str, str] = {}
        for role in _NAMED_TOKENS:
            content = token_content(self.tokenizer_config.get(role))
            if content is not None:
                found[role] = content
        return found

    def extra_special_tokens(self) -> Iterator[str]:
        """Text of further special tokens, in either spelling of the field."""
        for field in ("additional_special_tokens", "extra_special_tokens"):
            listed = self.tokenizer_config.get(field)
            for entry in listed if isinstance(listed, list) else ():
                content = token_content(entry)
                if content is not None:
                    yield content

    def model_int(self, field: str) -> int | None:
        """An integer of config.json, also where a multimodal model nests its text part."""
        nested = self.config.get("text_config")
        for source in (self.config, nested if isinstance(nested, dict) else {}):
            number = source.get(field)
            if isinstance(number, int) and not isinstance(number, bool):
                return number
        return None

    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence ids of generation_config.json or, without that file, of config.json."""
        if self.generation_config:
            return _token_ids(self.generation_config, self.directory / GENERATION_CONFIG)
        return _token_ids(self.config, self.directory / CONFIG)


def token_content(entry: object) -> str | None:
    """Text of a token that a configuration gives as a string or as an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _read_object(path: Path, *, required: bool) -> Mapping[str, object]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ModelDirectoryError(f"{path}: missing; {_fix(path.name)}") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ModelDirectoryError(f"{path}: cannot be read: {error}; {_fix(path.name)}") from error
    except json.JSONDecodeError as error:
        raise ModelDirectoryError(f"{path}: not JSON: {error}; {_fix(path.name)}") from error
    if not isinstance(parsed, dict):
        raise ModelDirectoryError(f"{path}: not a JSON object; {_fix(path.name)}")
    return parsed


def _fix(name: str) -> str:
    if name == TOKENIZER:
        return (
            "the router needs a fast tokenizer: copy it from the model's source, or save one with"
            " transformers' AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIR)"
        )
    return "copy it again from the model's source"


def _token_ids(source: Mapping[str, object], path: Path) -> frozenset[int]:
    given = source.get("eos_token_id")
    listed = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(token_id) is int and token_id >= 0 for token_id in listed):
        raise ModelDirectoryError(
            f"{path}: eos_token_id is {given!r}; it must be a token id or a list of token ids"
        )
    return frozenset(listed)


def _chat_template(directory: Path, tokenizer_config: Mapping[str, object]) -> str | None:
    """The default template: its own file goes before the field, a list names its templates."""
    path = directory / CHAT_TEMPLATE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelDirectoryError(
                f"{path}: cannot be read: {error}; {_fix(CHAT_TEMPLATE)}"
            ) from error
    field = tokenizer_config.get("chat_template")
    for entry in field if isinstance(field, list) else ():
        if isinstance(entry, dict) and entry.get("name") == "default":
            field = entry.get("template")
    return field if isinstance(field, str) else None
