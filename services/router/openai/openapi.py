"""The HTTP API as an OpenAPI document, from the structs that read its bodies."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any  # JSON schemas

import msgspec

from services.router.openai.http_faults import HTTP_FAULTS
from services.router.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from splitwave.core.errors import Reason
from splitwave.wire.errors import HTTP_STATUS

_REF = "#/components/schemas/{name}"
_VERSION = version("splitwave")  # Read now: it stands in a file.
_JSON, _EVENTS = "application/json", "text/event-stream"


class UsageView(msgspec.Struct, kw_only=True):
    """Counts of an answer's tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class LogprobColumns(msgspec.Struct, kw_only=True):
    """Log probabilities of a completion's tokens."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, kw_only=True):
    """One token at one place of a prompt."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion. finish_reason is null in every chunk but its last."""

    index: int
    text: str
    logprobs: LogprobColumns | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """The answer to a completion; a stream has one a chunk, usage in the last if asked for."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageView | None = None


class ChatToken(msgspec.Struct, kw_only=True):
    """A token's log probability."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list["ChatToken"] | None = None


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of a message's tokens."""

    content: list[ChatToken]
    refusal: None = None


class ChatText(msgspec.Struct, kw_only=True):
    """A message, or what a chunk adds to one."""

    role: str | None = None
    content: str | None = None
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One message whole, or in a chunk as delta."""

    index: int
    message: ChatText | None = None
    delta: ChatText | None = None
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatAnswer(msgspec.Struct, kw_only=True):
    """The answer to a chat; a stream has one a chunk, usage in the last if asked for."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    usage: UsageView | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """Token ids of a text."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """A text."""

    prompt: str


class ModelView(msgspec.Struct, kw_only=True):
    """A served model."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """The served models."""

    object: str
    data: list[ModelView]


class ReadyAnswer(msgspec.Struct, kw_only=True):
    """Whether a request could be served."""

    ready: bool
    draining: bool
    prefill_workers: int
    decode_workers: int


class ErrorFields(msgspec.Struct, kw_only=True):
    """What went wrong: `code` is a reason of docs/errors.md, `param` the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The body of a failure, and the data of an error event."""

    error: ErrorFields


@dataclass(frozen=True, slots=True)
class Route:
    """One operation."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None
    answer: type[msgspec.Struct]
    streams: bool = False


ROUTES = (
    Route("post", "/v1/completions", "Complete prompts", CompletionBody, CompletionAnswer, True),
    Route("post", "/v1/chat/completions", "Go on with a chat", ChatBody, ChatAnswer, True),
    Route("get", "/v1/models", "List the models", None, ModelList),
    Route("get", "/v1/models/{model}", "Describe a model", None, ModelView),
    Route("post", "/tokenize", "Token ids of a text", TokenizeBody, TokenizeAnswer),
    Route("post", "/detokenize", "Text of token ids", DetokenizeBody, DetokenizeAnswer),
    Route("get", "/ready", "Whether a request could be served", None, ReadyAnswer),
)
"""Every route with a JSON answer of the API."""


@functools.cache
def document() -> bytes:
    """The document, as JSON."""
    types = [x for route in ROUTES for x in (route.body, route.answer) if x is not None]
    _, schemas = msgspec.json.schema_components(
        [*types, ErrorAnswer],
        ref_template=_REF,
        schema_hook=lambda _: {"description": "any JSON"},
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Splitwave", "version": _VERSION},
            "paths": paths,
            "components": {"schemas": schemas},
        }
    )


def _operation(route: Route) -> Mapping[str, Any]:
    content = {_JSON: {"schema": _ref(route.answer)}}
    if route.streams:
        content[_EVENTS] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "operationId": route.path.strip("/").translate(str.maketrans("/{}", "_  ")).strip(),
        "summary": route.summary,
        "responses": {"200": {"description": "Well", "content": content}, **_failures()},
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {_JSON: {"schema": _ref(route.body)}},
        }
    if "{model}" in route.path:
        name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [name]
    return operation


def _failures() -> dict[str, Any]:
    """Each status of a failure with the reasons that have it."""
    failures: dict[str, Any] = {}
    for status in sorted({*HTTP_STATUS.values(), *HTTP_FAULTS}):
        reasons = [reason.value for reason in Reason if HTTP_STATUS[reason] == status]
        if status in HTTP_FAULTS:
            reasons.append(HTTP_FAULTS[status].code)
        failures[str(status)] = {
            "description": ", ".join(reasons),
            "content": {_JSON: {"schema": _ref(ErrorAnswer)}},
        }
    return failures


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
