"""`splitwave generate`: one completion from a running router, printed as it comes."""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence

import grpc.aio

from services.cli.given import address, answers_otherwise, seconds, token_ids
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling, TokenLogprob
from splitwave.core.sampling_limits import check_sampling
from splitwave.wire.channel import CHANNEL_OPTIONS
from splitwave.wire.client import Answer, Ask, generate

GRPC_PORT_DEFAULT = 8090


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("prompt", nargs="?", help="prompt text; `-` or nothing: standard input")
    parser.add_argument(
        "--address", type=address, default=f"127.0.0.1:{GRPC_PORT_DEFAULT}", metavar="HOST:PORT",
        help="gRPC address of the router (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--model", default="", help="served model name; default: the only one")
    parser.add_argument(
        "--token-ids", type=token_ids, metavar="ID[,ID...]", help="the prompt in token ids instead"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--min-tokens", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0, help="0 is off")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", default=[], help="stop string; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument(
        "--logprobs", type=int, metavar="K",
        help="print behind the text each token's log probability, and the K most likely tokens'",
    )  # fmt: skip
    parser.add_argument("--timeout", type=seconds, default=120.0, metavar="SECONDS")
    parser.add_argument("--verbose", action="store_true", help="print ids, counts and times after")


def run(arguments: argparse.Namespace) -> int:
    """Ask and print; 1 if the router says no."""
    if arguments.token_ids and arguments.prompt is not None:
        why = "give the prompt as text or with --token-ids, not both"
        print(f"splitwave generate: {why}", file=sys.stderr)
        return 2
    try:
        ask = _ask(arguments)
        check_sampling(ask.sampling)
    except ServingError as error:
        print(f"splitwave generate: {error.message}", file=sys.stderr)
        return 2
    try:
        asyncio.run(_print_answer(arguments, ask))
    except ServingError as error:
        print(f"\nsplitwave generate: {_explain(error, arguments.address)}", file=sys.stderr)
        return 1
    return 0


def _ask(arguments: argparse.Namespace) -> Ask:
    prompt: str | list[int]
    if arguments.token_ids:
        prompt = arguments.token_ids
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
    made: list[int] = []
    rows: list[TokenLogprob] = []
    async with grpc.aio.insecure_channel(arguments.address, options=CHANNEL_OPTIONS) as channel:
        async for answer in generate(channel, ask, arguments.timeout):
            print(answer.text, end="", flush=True)
            made += answer.token_ids
            rows += answer.logprobs
            last = answer
    print(flush=True)
    for line in logprob_lines(rows):
        print(line)
    if arguments.verbose and last is not None:
        print(summary(last, made), file=sys.stderr)


def logprob_lines(rows: Sequence[TokenLogprob]) -> Iterator[str]:
    """A line a token: its id, its log probability and rank, and the most likely ones' there."""
    if rows:
        yield f"{'token':>8} {'logprob':>9} {'rank':>6}  most likely"
    for row in rows:
        top = ", ".join(f"{token_id} {logprob:.4f}" for token_id, logprob in row.top)
        yield f"{row.token_id:>8} {row.logprob:>9.4f} {row.rank:>6}  {top}".rstrip()


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


def _explain(error: ServingError, where: str) -> str:
    if answers_otherwise(error):
        return f"{where} answers, but is no router; give the router's gRPC address"
    if error.reason is Reason.WORKER_LOST:
        return f"no router answers at {where}: {error.message} (is `splitwave up` running?)"
    wait = "" if error.retry_after_s is None else f"; try again in {error.retry_after_s:.1f} s"
    return f"{error.reason.name}: {error.message}{wait}"
