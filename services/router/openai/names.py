"""Faults in the client's words: checks name a value as all ways in do, a client as it sent it."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from services.router.openai.schema import ChatBody, CompletionBody, TokenizeBody
from splitwave.core.errors import Reason, ServingError

Body = CompletionBody | ChatBody | TokenizeBody


def sent_names(body: Body) -> dict[str, str]:
    """By the name of a checked value: what the client sent it as, where that is another field."""
    names: dict[str, str] = {}
    if not isinstance(body, TokenizeBody):
        if body.request_id is None:
            names["request_id"] = "X-Request-Id"
        if body.n is None:
            names["n"] = "prompt"  # Each of several prompts is a completion at once.
    if isinstance(body, ChatBody):
        names["logprobs"] = "top_logprobs"
        if body.max_tokens is None and body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    if isinstance(body, ChatBody) or (isinstance(body, TokenizeBody) and body.prompt is None):
        names["prompt"] = "messages" if body.messages is not None else "prompt"
    return names


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Have a refusal within the block name the field that was sent."""
    try:
        yield
    except ServingError as error:
        name, colon, rest = error.message.partition(":")
        if error.reason not in (Reason.INVALID_REQUEST, Reason.UNSUPPORTED_FEATURE) or not colon:
            raise
        told = names.get(name, name) + colon + _compared(rest, names)
        raise ServingError(error.reason, told) from error


def _compared(rest: str, names: Mapping[str, str]) -> str:
    """What a value is held against, as in "is not in [0, max_tokens = 5]"."""
    return re.sub(r"\b(\w+)(?= = )", lambda found: names.get(found[1], found[1]), rest)
