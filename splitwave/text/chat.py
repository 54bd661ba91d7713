"""A conversation to the prompt's text, by the model's own chat template.

A template is a program of the model's directory that runs over clients' data: it runs
in Jinja's immutable sandbox, with what Hugging Face's templates expect and no more,
and within bounds of time and size.
"""

import asyncio
import datetime
import json
import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn  # Jinja types what a template touches so

import jinja2
from jinja2 import ext, nodes, parser, runtime, sandbox

from splitwave.core.errors import Reason, ServingError

RENDER_S_MAX: Final = 1.0
"""Longest time of one rendering; an ordinary one takes well below a millisecond."""
RENDERED_CHARS_MAX: Final = 32 * 1024 * 1024
"""Largest prompt that a template may make of a conversation."""
PRODUCT_MAX: Final = 1_000_000
"""Largest result of a multiplication in a template, as a number or a length."""
RENDER_ON_LOOP_MAX_CHARS: Final = 20_000
"""Larger conversations are rendered in a thread."""
_MARK: Final = "\ue000splitwave:continue-here\ue000"
"""Stands behind the final message while it is rendered; private use, so no client's text."""

_RESERVED: Final = frozenset({"messages", "add_generation_prompt", "tools", "documents"})
"""Variables that a request may not set: they have fields of their own, or are not served."""
_deadline_s: ContextVar[float] = ContextVar("deadline_s")
"""End of the rendering in progress, on the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation is rendered."""

    add_generation_prompt: bool = True
    """End with what begins an assistant's turn."""
    continue_final_message: bool = False
    """Leave the final message open, for the model to go on with it."""
    template_arguments: Mapping[str, object] = field(default_factory=dict)
    """Further variables of the template, such as enable_thinking."""


class ChatTemplate:
    """A compiled template. Safe to share between threads."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        """Raise ValueError, saying where, for a template that does not compile."""
        try:
            self._template = _Sandbox().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        self._named_tokens = dict(named_tokens)

    async def render_async(
        self, messages: Sequence[Mapping[str, object]], options: ChatOptions
    ) -> str:
        """`render` that does not hold up the event loop for a long conversation."""
        chars = sum(len(x) for each in messages for x in each.values() if isinstance(x, str))
        if chars <= RENDER_ON_LOOP_MAX_CHARS:
            return self.render(messages, options)
        return await asyncio.to_thread(self.render, messages, options)

    def render(self, messages: Sequence[Mapping[str, object]], options: ChatOptions) -> str:
        """The prompt's text. Raises INVALID_REQUEST, naming the field and the fix."""
        _check(messages, options)
        if not options.continue_final_message:
            return self._run(messages, options)
        final = messages[-1]
        marked = [*messages[:-1], {**final, "content": f"{final['content']}{_MARK}"}]
        text, found, _ = self._run(marked, options).rpartition(_MARK)
        if not found:
            raise _invalid(
                "continue_final_message: the model's chat template does not show the final"
                " message; leave it out"
            )
        return text

    def _run(self, messages: Sequence[Mapping[str, object]], options: ChatOptions) -> str:
        variables = {
            **self._named_tokens,
            **options.template_arguments,
            "messages": messages,
            "add_generation_prompt": options.add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        ends = _deadline_s.set(time.monotonic() + RENDER_S_MAX)
        try:
            return _joined(self._template.generate(variables))
        except _Refusal as refusal:
            raise _invalid(f"messages: the model's chat template refuses them: {refusal}") from None
        except _TooMuch as error:
            raise _invalid(f"messages: the model's chat template {error}; send less") from None
        except Exception as error:  # A template is a program: it can fail in any way.
            raise _invalid(
                "messages: the model's chat template cannot render them"
                f" ({type(error).__name__}); compare them with what the model expects"
            ) from error
        finally:
            _deadline_s.reset(ends)


class _Refusal(Exception):
    """The template called raise_exception."""


class _TooMuch(Exception):
    """A rendering left its bounds."""


class _Sandbox(sandbox.ImmutableSandboxedEnvironment):
    """The environment of every template. Bounds are checked wherever a loop must pass."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    # Jinja gives templates objects of any type.
    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute of what a template handles."""
        _check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item of what a template handles."""
        _check_time()
        return super().getitem(obj, argument)

    def call(self, context: runtime.Context, obj: Any, *args: Any, **named: Any) -> Any:
        """Whatever a template calls."""
        _check_time()
        return super().call(context, obj, *args, **named)

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """A multiplication or a power, if its result is small."""
        if operator == "**" or _product(left, right) > PRODUCT_MAX:
            raise _TooMuch("multiplies too much")
        return super().call_binop(context, operator, left, right)


class _Generation(ext.Extension):
    """`{% generation %}`, by which templates mark assistants' text for training: shown as it is."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's way

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        """The statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _product(left: object, right: object) -> float:
    """A bound of a product's value, or of its length."""
    return abs(_size(left) * _size(right))


def _size(factor: object) -> float:
    if isinstance(factor, Sized):
        return len(factor)
    return factor if isinstance(factor, int | float) else 0.0


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(str(message)[:200])


def _strftime_now(form: str) -> str:
    return datetime.datetime.now(datetime.UTC).astimezone().strftime(form)


def _check_time() -> None:
    if time.monotonic() > _deadline_s.get():
        raise _TooMuch(f"takes longer than {RENDER_S_MAX:g} s")


def _joined(pieces: Iterable[str]) -> str:
    """All that a template gives, while it keeps within its bounds."""
    taken: list[str] = []
    chars = 0
    for piece in pieces:
        _check_time()
        chars += len(piece)
        if chars > RENDERED_CHARS_MAX:
            raise _TooMuch(f"makes more than {RENDERED_CHARS_MAX} characters of them")
        taken.append(piece)
    return "".join(taken)


def _check(messages: Sequence[Mapping[str, object]], options: ChatOptions) -> None:
    if not messages:
        raise _invalid("messages: empty; send at least one")
    reserved = sorted(_RESERVED & options.template_arguments.keys())
    if reserved:
        raise _invalid(f"chat_template_kwargs: {reserved[0]} has a field of its own; remove it")
    if not options.continue_final_message:
        return
    if options.add_generation_prompt:
        raise _invalid(
            "continue_final_message: not with add_generation_prompt, which begins a new message;"
            " set that to false"
        )
    if not isinstance(messages[-1].get("content"), str):
        raise _invalid("continue_final_message: the final message has no text; give it some")


def _invalid(message: str) -> ServingError:
    return ServingError(Reason.INVALID_REQUEST, message)
