"""`splitwave generate`: one completion from a running router, printed as it comes."""

import argparse
import asyncio
import sys

import grpc.aio

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.wire.channel import CHANNEL_OPTIONS
from splitwave.wire.client import Answer, Ask, generate

GRPC_PORT_DEFAULT = 8090


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("prompt", nargs="?", help="prompt text; `-` or nothing: standard input")
    parser.add_argument("--address", default=f"127.0.0.1:{GRPC_PORT_DEFAULT}", help="the router")
    parser.add_argument("--model", default="", help="served model name; default: the only one")
    parser.add_argument("--token-ids", help="the prompt in token ids, separated by commas")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--min-tokens", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0, help="0 is off")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", default=[], help="stop string; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--logprobs", type=int, help="log probabilities of the k most likely")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--verbose", action="store_true", help="print ids, counts and times after")


def run(arguments: argparse.Namespace) -> int:
    """Ask and print; 1 if the router says no."""
    try:
        ask = _ask(arguments)
        asyncio.run(_print_answer(arguments, ask))
    except ServingError as error:
        print(f"\nsplitwave generate: {_explain(error, arguments.address)}", file=sys.stderr)
        return 1
    return 0


def _ask(arguments: argparse.Namespace) -> Ask:
    prompt: str | list[int]
    if arguments.token_ids:
        try:
            prompt = [int(word) for word in arguments.token_ids.split(",")]
        except ValueError:
            message = "--token-ids: give whole numbers separated by commas, such as 1,2,3"
            raise ServingError(Reason.INVALID_REQUEST, message) from None
    elif arguments.prompt in (None, "-"):
        prompt = sys.stdin.read()
    else:
        prompt = arguments.prompt
    sampling = Sampling(
        max_tokens=arguments.max_tokens,
        min_tokens=arguments.min_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        ignore_eos=arguments.ignore_eos,
        logprobs=arguments.logprobs,
    )
    return Ask(prompt=prompt, sampling=sampling, model=arguments.model, stop=tuple(arguments.stop))


async def _print_answer(arguments: argparse.Namespace, ask: Ask) -> None:
    last: Answer | None = None
    token_ids: list[int] = []
    async with grpc.aio.insecure_channel(arguments.address, options=CHANNEL_OPTIONS) as channel:
        async for answer in generate(channel, ask, arguments.timeout):
            print(answer.text, end="", flush=True)
            token_ids += answer.token_ids
            last = answer
    print(flush=True)
    if arguments.verbose and last is not None:
        print(summary(last, token_ids), file=sys.stderr)


def summary(last: Answer, token_ids: list[int]) -> str:
    """Counts, times and ids of a finished completion, for people."""
    times = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in last.times_s.items())
    return (
        f"finish reason: {last.finish_reason}"
        + (f" (by {last.stopped_by!r})" if last.stopped_by is not None else "")
        + f"\ntokens: {last.prompt_tokens} prompt ({last.cached_tokens} cached),"
        f" {last.completion_tokens} completion"
        f"\nhandoff: {last.handoff_bytes} bytes, attempts: {last.attempts}"
        f"\ntimes: {times}"
        f"\ntoken ids: {','.join(map(str, token_ids))}"
    )


def _explain(error: ServingError, address: str) -> str:
    if error.reason is Reason.WORKER_LOST:
        return f"no router answers at {address}: {error.message} (is `splitwave up` running?)"
    wait = "" if error.retry_after_s is None else f"; try again in {error.retry_after_s:.1f} s"
    return f"{error.reason.name}: {error.message}{wait}"
