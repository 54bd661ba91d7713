"""JSON bodies to checked structs; whatever cannot be served is refused by its name."""

import re
from collections.abc import Callable, Mapping
from typing import Final, Generic, TypeVar

import msgspec

from splitwave.core.errors import Reason, ServingError

T = TypeVar("T", bound=msgspec.Struct)

NESTING: Final = "the body: nested too deeply; send plain values"

_Neutral = Callable[[object], bool]


def _unset(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _only(*values: object) -> _Neutral:
    return lambda value: _unset(value) or value in values


UNSUPPORTED: Final[Mapping[str, tuple[str, _Neutral]]] = {
    "tools": ("tools are not served; describe them in the messages", _unset),
    "tool_choice": ("tools are not served; leave it out", _only("none", "auto")),
    "parallel_tool_calls": ("tools are not served; leave it out", _only(True)),
    "functions": ("tools are not served; leave it out", _unset),
    "function_call": ("tools are not served; leave it out", _only("none", "auto")),
    "response_format": (
        "only text is served; use a stop string, or check the answer yourself",
        _only({"type": "text"}),
    ),
    "structured_outputs": ("outputs are not constrained; leave it out", _unset),
    "guided_json": ("outputs are not constrained; leave it out", _unset),
    "guided_regex": ("outputs are not constrained; leave it out", _unset),
    "guided_choice": ("outputs are not constrained; leave it out", _unset),
    "guided_grammar": ("outputs are not constrained; leave it out", _unset),
    "logits_processors": ("there are none; use logit_bias", _unset),
    "vllm_xargs": ("there are no logit processors; leave it out", _unset),
    "allowed_token_ids": ("not served; use logit_bias", _unset),
    "bad_words": ("not served; use logit_bias", _unset),
    "best_of": ("only n completions are made; use n, and choose yourself", _only(1)),
    "use_beam_search": ("there is no beam search; leave it out", _unset),
    "length_penalty": ("there is no beam search; leave it out", _only(1.0)),
    "suffix": ("nothing is inserted before a suffix; leave it out", _unset),
    "prompt_embeds": ("prompts are text or token ids; send one of these", _unset),
    "truncate_prompt_tokens": ("prompts are not cut; shorten it yourself", _unset),
    "chat_template": ("only the model's own template runs; leave it out", _unset),
    "documents": ("not served; put them into the messages", _unset),
    "reasoning_effort": ("not served; set what the template knows in chat_template_kwargs", _unset),
    "include_reasoning": ("reasoning is not parsed; leave it out", _only(True)),
    "modalities": ("only text is served; leave it out", _only(["text"])),
    "audio": ("only text is served; leave it out", _unset),
    "prediction": ("there is no speculation; leave it out", _unset),
    "store": ("nothing is stored; leave it out", _unset),
    "web_search_options": ("there is no search; leave it out", _unset),
    "mm_processor_kwargs": ("only text is served; leave it out", _unset),
    "kv_transfer_params": ("the router chooses the pools; leave it out", _unset),
    "cache_salt": ("prefix caches are shared; leave it out", _unset),
    "spaces_between_special_tokens": ("always true; leave it out", _only(True)),
    "thinking_token_budget": ("reasoning is not parsed; use max_tokens", _unset),
    "metadata": ("nothing is stored; leave it out", _only()),
}
"""Known fields that are not served: why, and which values ask for nothing and so are taken."""


class Reader(Generic[T]):
    """Reads bodies of one kind."""

    def __init__(
        self, kind: type[T], refuse: Callable[[Mapping[str, object]], None] = lambda _: None
    ) -> None:
        """`refuse` raises for what stands where it knows better what an unknown field means."""
        self._kind, self._refuse = kind, refuse
        self._decoder = msgspec.json.Decoder(kind)

    def __call__(self, body: bytes) -> T:
        """The body. Raises INVALID_REQUEST or UNSUPPORTED_FEATURE, naming the field."""
        try:
            try:
                return self._decoder.decode(body)
            except msgspec.ValidationError as error:
                if "unknown field" not in str(error):
                    raise
                return self._without_neutral(msgspec.json.decode(body))
        except msgspec.ValidationError as error:
            raise _invalid(_fault(str(error))) from None
        except msgspec.DecodeError as error:
            raise _invalid(f"the body is not JSON: {error}; send one JSON object") from None
        except UnicodeDecodeError:
            raise _invalid("the body is not UTF-8; send one JSON object") from None
        except RecursionError:
            raise _invalid(NESTING) from None

    def _without_neutral(self, fields: dict[str, object]) -> T:
        """The body less known fields that ask for nothing."""
        self._refuse(fields)
        for name in [name for name in fields if name in UNSUPPORTED]:
            if name in self._kind.__struct_fields__:
                continue
            why, neutral = UNSUPPORTED[name]
            if not neutral(fields[name]):
                raise ServingError(Reason.UNSUPPORTED_FEATURE, f"{name}: {why}")
            del fields[name]
        return msgspec.convert(fields, self._kind, str_keys=True)


def _fault(message: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.max_tokens`", with the field first."""
    placed = re.fullmatch(r"(.*?) - at (?:`key` in )?`\$\.?(.*?)`", message)
    text, path = (placed[1], placed[2].replace("[...]", "")) if placed else (message, "")
    unknown = re.search(r"unknown field `(.*?)`", text)
    if unknown:
        return f"{_joined(path, unknown[1])}: unknown here; leave it out"
    missing = re.search(r"missing required field `(.*?)`", text)
    if missing:
        return f"{_joined(path, missing[1])}: absent; set it"
    if path:
        return f"{path}: {text}; correct it"
    return f"the body: {text}; send one JSON object"


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _invalid(message: str) -> ServingError:
    return ServingError(Reason.INVALID_REQUEST, message)
