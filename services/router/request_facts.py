"""What the span of a request says of it, in OpenTelemetry's GenAI words where it has some.

Names: opentelemetry.io, semantic conventions for generative AI, "Inference spans". No text stands
here unless it is asked for: prompts, completions and stop strings are the client's.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from services.router.choices import Choice
from services.router.order import Order
from splitwave.runtime.tracing import Value
from splitwave.text import Tokenizer

TEXT_TOKENS_MAX: Final = 4096
"""Of a longer prompt or completion only so much stands in a span."""


class Served(Protocol):
    """What became of one order."""

    @property
    def order(self) -> Order:
        """What was asked for."""

    @property
    def choices(self) -> Sequence[Choice]:
        """Its completions, finished or not."""

    @property
    def finish_reasons(self) -> Sequence[str]:
        """How those ended that ended well."""


def request_facts(served: Sequence[Served]) -> dict[str, Value | None]:
    """Attributes of the span of one call; None is none."""
    sampling, choices = served[0].order.sampling, list(_choices(served))
    return {
        "splitwave.attempts": sum(choice.trail.attempts for choice in choices),
        "splitwave.handoff.bytes": sum(choice.trail.handoff_bytes for choice in choices),
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.choice.count": len(choices) if len(choices) > 1 else None,
        "gen_ai.usage.input_tokens": sum(len(each.order.token_ids) for each in served),
        "gen_ai.usage.cache_read.input_tokens": sum(x.trail.cached_tokens for x in choices),
        "gen_ai.usage.output_tokens": sum(choice.sink.shown_tokens for choice in choices),
        "gen_ai.response.finish_reasons": [x for each in served for x in each.finish_reasons]
        or None,
    }


def first_token_s(served: Sequence[Served]) -> float | None:
    """When the first token of all came, on the loop's clock."""
    times_s = [choice.sink.first_at_s for choice in _choices(served)]
    return min((at_s for at_s in times_s if at_s is not None), default=None)


def request_texts(served: Sequence[Served], tokenizer: Tokenizer) -> dict[str, Value | None]:
    """What went in and came out, for a router that is told to show it."""
    into = [_message("user", tokenizer, each.order.token_ids) for each in served]
    out = [_message("assistant", tokenizer, x.sink.token_ids) for x in _choices(served)]
    return {
        "gen_ai.input.messages": json.dumps(into, ensure_ascii=False),
        "gen_ai.output.messages": json.dumps(out, ensure_ascii=False),
    }


def _choices(served: Sequence[Served]) -> Iterator[Choice]:
    for each in served:
        yield from each.choices


def _message(role: str, tokenizer: Tokenizer, token_ids: Sequence[int]) -> dict[str, object]:
    text = tokenizer.decode(token_ids[:TEXT_TOKENS_MAX], skip_special_tokens=False)
    return {"role": role, "parts": [{"type": "text", "content": text}]}
