"""`splitwave up`: a local stack from one command, until Ctrl-C or the first failure."""

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from services.cli.plan import Plan, read_experts
from services.cli.stack import Stack, StackFailed, running
from splitwave import demo_model

READY_TIMEOUT_S = 600.0
BUILT_IN = {"demo": demo_model.Variant.IDENTICAL, "tiny": demo_model.Variant.TINY}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add_stack_arguments(parser)
    parser.add_argument(
        "--ready-timeout", type=float, default=READY_TIMEOUT_S, metavar="SECONDS",
        help="give up if the stack is not ready by then",
    )  # fmt: skip


def add_stack_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that describe a stack, shared with `splitwave demo`."""
    parser.add_argument(
        "--model", default="demo",
        help="demo (the embedded default), tiny (random, starts fast), or a model directory",
    )  # fmt: skip
    parser.add_argument("--served-model", help="name that clients ask for; default: from --model")
    parser.add_argument("--engine", choices=("vllm", "sim"), default="vllm")
    parser.add_argument("--prefill-ranks", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--decode-ranks", type=int, default=2, help="data-parallel ranks")
    parser.add_argument("--grpc-port", type=int, default=8090)
    parser.add_argument("--http-port", type=int, default=8080)
    parser.add_argument("--prefill-port", type=int, default=8091)
    parser.add_argument("--decode-port", type=int, default=8092)
    parser.add_argument("--side-channel-port", type=int, default=8100, help="first of one a rank")
    parser.add_argument("--run-dir", type=Path, help="logs go here; default: a temporary directory")
    parser.add_argument(
        "--trace-dir", type=Path, metavar="DIR",
        help="trace requests into files there, for `splitwave trace`; default: no traces",
    )  # fmt: skip
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}-setting", action="append", default=[], metavar="NAME=VALUE",
            help=f"a setting of the {role} group's engines; may be repeated",
        )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Start, say where it listens, wait; 1 if something failed."""
    try:
        return asyncio.run(_up(arguments))
    except (StackFailed, demo_model.DemoModelError) as error:
        print(f"\nsplitwave up: {error}", file=sys.stderr)
        return 1


async def _up(arguments: argparse.Namespace) -> int:
    report = reporter()
    plan = await asyncio.to_thread(make_plan, arguments, report)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with running(plan, report) as stack:
        if not await _or_stop(stack.ready(arguments.ready_timeout), stop):
            return 130
        print(banner(plan), flush=True)
        await _or_stop(_until_failure(stack), stop)
    report("stack", "stopped")
    return 0


async def _or_stop(work: "asyncio.Future[None] | object", stop: asyncio.Event) -> bool:
    """Await the work, or the stop: True if the work ended first. Its failure is raised."""
    assert asyncio.iscoroutine(work)
    doing = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((doing, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            return False
        doing.result()
        return True
    finally:
        for task in (doing, stopping):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, StackFailed):
            await doing


async def _until_failure(stack: Stack) -> None:
    while True:
        stack.check_alive()
        await asyncio.sleep(0.2)


def reporter() -> Callable[[str, str], None]:
    """Progress lines with the seconds since the start."""
    began_s = time.monotonic()

    def report(who: str, what: str) -> None:
        print(f"[{time.monotonic() - began_s:6.1f}s] {who}: {what}", file=sys.stderr, flush=True)

    return report


def make_plan(arguments: argparse.Namespace, report: Callable[[str, str], None]) -> Plan:
    """The stack that the flags describe; builds the embedded model if it is asked for."""
    if arguments.model in BUILT_IN:
        model_path = build_model(arguments.model, report)
    else:
        model_path = Path(arguments.model).resolve()
        if not (model_path / "config.json").is_file():
            why = f"{model_path} has no config.json; give a model directory, `demo` or `tiny`"
            raise StackFailed("--model", why)
    settings = {
        role: _pairs(f"--{role}-setting", getattr(arguments, f"{role}_setting"))
        for role in ("prefill", "decode")
    }
    return Plan(
        model_path=model_path,
        served_model=arguments.served_model or model_path.name,
        run_dir=arguments.run_dir or Path(tempfile.mkdtemp(prefix="splitwave-")),
        trace_dir=arguments.trace_dir and arguments.trace_dir.resolve(),
        engine=arguments.engine,
        prefill_ranks=arguments.prefill_ranks,
        decode_ranks=arguments.decode_ranks,
        experts=read_experts(model_path),
        grpc_port=arguments.grpc_port,
        http_port=arguments.http_port,
        prefill_port=arguments.prefill_port,
        decode_port=arguments.decode_port,
        side_channel_port=arguments.side_channel_port,
        prefill_settings=settings["prefill"],
        decode_settings=settings["decode"],
    )


def build_model(name: str, report: Callable[[str, str], None]) -> Path:
    """Build an embedded model, or find it built."""
    variant = BUILT_IN[name]
    path = demo_model.default_dir(variant)
    options = demo_model.DemoModelOptions(variant=variant)
    demo_model.build(path, options, progress=lambda text: report("model", text))
    return path


def banner(plan: Plan) -> str:
    """Where the stack listens and how to ask it."""
    body = f'{{"model": "{plan.served_model}", "prompt": "Hello", "max_tokens": 16}}'
    return (
        f"\nready: OpenAI HTTP on http://{plan.router_http}/v1, gRPC on {plan.router_grpc}\n"
        f"  curl http://{plan.router_http}/v1/completions"
        f" -H 'Content-Type: application/json' -d '{body}'\n"
        f"  splitwave generate --address {plan.router_grpc} 'Hello'\n"
        "Ctrl-C stops it."
    )


def _pairs(flag: str, words: list[str]) -> dict[str, str]:
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise StackFailed(flag, f"{word!r} is not NAME=VALUE")
        pairs[name] = value
    return pairs
