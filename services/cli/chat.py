"""`splitwave chat`: talk to a running router over /v1/chat/completions, streamed.

At a terminal: a line a message, Ctrl-C ends the answer, Ctrl-D ends the chat. From a
pipe: all of standard input is one message.
"""

import argparse
import contextlib
import http.client
import json
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from services.cli.given import address, seconds
from splitwave.core.errors import ServingError
from splitwave.core.generation import Sampling
from splitwave.core.sampling_limits import check_sampling

ADDRESS_DEFAULT = "127.0.0.1:8080"
PROMPT = "> "
HELP = "/reset forgets the conversation, /help shows this; Ctrl-C ends an answer, Ctrl-D the chat."

Message = dict[str, str]


class ChatFailed(Exception):
    """The router did not answer, or refused; the message says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("message", nargs="?", help="ask this and end")
    parser.add_argument(
        "--address", type=address, default=ADDRESS_DEFAULT, metavar="HOST:PORT",
        help="HTTP address of the router (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--model", default="", help="served model name; default: the only one")
    parser.add_argument("--system", help="a system message before the conversation")
    parser.add_argument("--max-tokens", type=int, help="of one answer; default: the router's")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--timeout", type=seconds, default=120.0, metavar="SECONDS")


def run(arguments: argparse.Namespace) -> int:
    """Chat; 1 if the router says no to a message that was not typed."""
    try:
        check_sampling(_sampling(arguments))
    except ServingError as error:
        print(f"splitwave chat: {error.message}", file=sys.stderr)
        return 2
    chat = Chat(arguments)
    if arguments.message is None and sys.stdin.isatty():
        return _converse(chat)
    text = arguments.message if arguments.message is not None else sys.stdin.read().strip()
    if not text:
        print("splitwave chat: the message is empty; give one, or pipe one in", file=sys.stderr)
        return 2
    try:
        _print_answer(chat, text)
    except ChatFailed as error:
        print(f"splitwave chat: {error}", file=sys.stderr)
        return 1
    return 0


def _sampling(arguments: argparse.Namespace) -> Sampling:
    """What is asked for, to see that it can be meant: not after a message has been typed."""
    return Sampling(
        max_tokens=1 if arguments.max_tokens is None else arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )


@dataclass(slots=True)
class Chat:
    """A conversation. A message whose answer failed is not part of it."""

    arguments: argparse.Namespace
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        system = self.arguments.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str) -> Generator[str, None, None]:
        """Send a message; its answer comes in pieces. Raises ChatFailed.

        Closing the iterator closes the connection, which ends the computing; what had
        come by then stays in the conversation.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        try:
            for piece in _stream(self.arguments, messages):
                answer += piece
                yield piece
        finally:
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": answer}]


def _converse(chat: Chat) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # Importing it gives `input` editing and history.
    print(HELP)
    while True:
        try:
            text = input(PROMPT).strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        _take(chat, text)


def _take(chat: Chat, text: str) -> None:
    """Act on one line that was typed."""
    if text == "/reset":
        chat.reset()
    elif text == "/help":
        print(HELP)
    elif text:
        try:
            _print_answer(chat, text)
        except KeyboardInterrupt:
            print("\n(ended)")
        except ChatFailed as error:
            print(f"splitwave chat: {error}", file=sys.stderr)


def _print_answer(chat: Chat, text: str) -> None:
    with contextlib.closing(chat.ask(text)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
    print(flush=True)


def _stream(arguments: argparse.Namespace, messages: list[Message]) -> Iterator[str]:
    """Pieces of an answer as they come."""
    try:
        connection = http.client.HTTPConnection(arguments.address, timeout=arguments.timeout)
        with contextlib.closing(connection):
            body = json.dumps(_body(arguments, messages))
            connection.request(
                "POST", "/v1/chat/completions", body, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise ChatFailed(_refusal(response.status, response.read()))
            yield from _pieces(response)
    except http.client.BadStatusLine as error:
        raise ChatFailed(
            f"{arguments.address} answers, but not in HTTP; give the router's HTTP address"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise ChatFailed(
            f"no answer from {arguments.address} ({error}); is `splitwave up` running?"
        ) from error


def _body(arguments: argparse.Namespace, messages: list[Message]) -> dict[str, object]:
    given = {
        "model": arguments.model,
        "messages": messages,
        "stream": True,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "seed": arguments.seed,
    }
    return {name: value for name, value in given.items() if value not in (None, "")}


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """Text of the server-sent events of a stream, which must end with [DONE]."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatFailed(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices", ()):
            text = choice.get("delta", {}).get("content")
            if text:
                yield text
    raise ChatFailed("the answer broke off; the router's log says why")


def _refusal(status: int, body: bytes) -> str:
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = body.decode(errors="replace")[:200]
    return f"HTTP {status}: {said}"
