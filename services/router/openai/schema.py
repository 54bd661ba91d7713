"""Bodies of requests, as JSON brings them, and what they ask for."""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import msgspec

from services.router.openai.fields import GenerationBody, given_or, invalid, unsupported
from services.router.openai.reading import Reader
from splitwave.core.errors import ServingError
from splitwave.core.generation import Sampling
from splitwave.core.sampling_limits import SamplingLimits
from splitwave.text import ChatOptions

MAX_TOKENS_DEFAULT = 16
"""Of a completion, as OpenAI has it; a chat may use what the context leaves."""
PROMPTS_MAX = 1024
"""Prompts of one call."""


class CompletionBody(GenerationBody, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None

    def prompts(self) -> list[str | Sequence[int]]:
        """Each prompt: text, or token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if set(map(type, given)) == {int}:  # The usual case, and long.
            return [cast(list[int], given)]
        ids = [entry for entry in given if isinstance(entry, int)]
        prompts: list[str | Sequence[int]] = [x for x in given if not isinstance(x, int)]
        if ids or not prompts:
            raise invalid("prompt: empty, or a mixture; give texts, token ids or lists of these")
        if len(prompts) > PROMPTS_MAX:
            raise invalid(f"prompt: {len(prompts)} prompts; send at most {PROMPTS_MAX} at once")
        return prompts

    @property
    def scored_only(self) -> bool:
        """True if nothing is to be generated: the prompt comes back with its log probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """How many for each token of the prompt, for either field that asks for them."""
        echoed = self.logprobs if self.echo else None
        return max((x for x in (self.prompt_logprobs, echoed) if x is not None), default=None)

    def sampling(self, eos_token_ids: Sequence[int], limits: SamplingLimits) -> Sampling:
        """Checked sampling."""
        default = min(MAX_TOKENS_DEFAULT, given_or(limits.tokens_unasked, MAX_TOKENS_DEFAULT))
        max_tokens = 1 if self.scored_only else given_or(self.max_tokens, default)
        return self.sampling_with(
            limits, eos_token_ids, max_tokens=max_tokens, logprobs=self.logprobs
        )


TEXT_PARTS = ("text", "input_text")
"""Types of parts that hold text."""
UNSUPPORTED_OF_MESSAGES: Mapping[str, str] = {
    "tool_call_id": "tools are not served; leave it out",
    "tool_calls": "tools are not served; leave it out",
    "function_call": "tools are not served; leave it out",
    "audio": "only text is served; leave it out",
    "refusal": "templates do not show it; put it into the content",
    "annotations": "templates do not show them; leave them out",
}
"""Fields that answers have beside their text and that may come back empty: why not otherwise."""


class ContentPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a message."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message. Those fields of `UNSUPPORTED_OF_MESSAGES` are taken while empty."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[object] | None = None
    function_call: object = None
    annotations: list[object] | None = None
    audio: object = None


class ChatBody(GenerationBody, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """How many for each token of the rendered conversation."""
        return self.prompt_logprobs

    def sampling(self, eos_token_ids: Sequence[int], limits: SamplingLimits) -> Sampling:
        """Checked sampling."""
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs: only with logprobs = true; set it, or leave this out")
        given = given_or(self.max_completion_tokens, self.max_tokens)
        if self.max_tokens not in (None, given):
            raise invalid("max_tokens: max_completion_tokens says otherwise; leave it out")
        return self.sampling_with(
            limits,
            eos_token_ids,
            max_tokens=given_or(given, limits.tokens_unasked or 1),
            logprobs=given_or(self.top_logprobs, 0) if self.logprobs else None,
        )


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /tokenize: a prompt, or messages."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check_no_template(self) -> None:
        """Raise INVALID_REQUEST for what only a conversation's template takes."""
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(self, name):
                raise invalid(f"{name}: only with messages; leave it out")


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /detokenize."""

    model: str = ""
    tokens: list[int]


def conversation(messages: Sequence[Message]) -> list[Mapping[str, object]]:
    """Messages as templates expect them. Raises what names the message that is not served."""
    return [_message(index, message) for index, message in enumerate(messages)]


def chat_options(body: ChatBody | TokenizeBody) -> ChatOptions:
    """How the template puts them."""
    continues = bool(body.continue_final_message)
    return ChatOptions(
        add_generation_prompt=given_or(body.add_generation_prompt, not continues),
        continue_final_message=continues,
        template_arguments=body.chat_template_kwargs or {},
    )


def _message(index: int, message: Message) -> Mapping[str, object]:
    place = f"messages[{index}]"
    for name, why in UNSUPPORTED_OF_MESSAGES.items():
        if getattr(message, name):
            raise unsupported(f"{place}.{name}: {why}")
    if message.role in ("tool", "function"):
        raise unsupported(f"{place}.role: tools are not served; leave the message out")
    told: dict[str, object] = {"role": message.role, "content": _text(place, message)}
    for name in ("name", "reasoning_content"):
        if getattr(message, name) is not None:
            told[name] = getattr(message, name)
    return told


def _text(place: str, message: Message) -> str:
    """The text of a message; parts stand on lines of their own, as vLLM joins them."""
    if message.content is None:
        if message.role != "assistant":
            raise invalid(f"{place}.content: absent; give some text")
        return ""
    if isinstance(message.content, str):
        return message.content
    for index, part in enumerate(message.content):
        if part.type not in TEXT_PARTS:
            raise _no_text(f"{place}.content[{index}]")
        if part.text is None:
            raise invalid(f"{place}.content[{index}].text: absent; set it")
    return "\n".join(part.text or "" for part in message.content)


def _no_text(part: str) -> ServingError:
    return unsupported(f"{part}.type: only text is served; leave it out")


def _refuse_parts(fields: Mapping[str, object]) -> None:
    """Refuse parts that are no text by their type, whatever fields they have."""
    for place, message in _objects("messages", fields.get("messages")):
        for part, content in _objects(f"{place}.content", message.get("content")):
            kind = content.get("type")
            if isinstance(kind, str) and kind not in TEXT_PARTS:
                raise _no_text(part)


def _objects(name: str, given: object) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Those entries of a list that are objects, with their places."""
    for index, entry in enumerate(given if isinstance(given, list) else ()):
        if isinstance(entry, dict):
            yield f"{name}[{index}]", entry


read_completion = Reader(CompletionBody)
read_chat = Reader(ChatBody, _refuse_parts)
read_tokenize = Reader(TokenizeBody, _refuse_parts)
read_detokenize = Reader(DetokenizeBody)
