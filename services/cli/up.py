"""`splitwave up`: a local stack from one command, until Ctrl-C or the first failure."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

from services.cli.battery import check_groups
from services.cli.certified import machine, make_smoke, serve_certified
from services.cli.plan import Plan, read_experts
from services.cli.stack import Report, Stack, StackFailed, running
from services.cli.stack_config import StackConfig, whole_stack_toml
from splitwave import demo_model
from splitwave.runtime.config import EXIT_BAD_CONFIG, ConfigError, flag, load, wants_print

BUILT_IN = {"demo": demo_model.Variant.IDENTICAL, "tiny": demo_model.Variant.TINY}


def main(arguments: Sequence[str]) -> int:
    """Start, say where it listens, wait; 1 if something failed, 2 for settings that cannot work."""
    return with_config(arguments, "up", _run)


def with_config(arguments: Sequence[str], command: str, then: Callable[[StackConfig], int]) -> int:
    """Read the settings, print them if asked to, else go on with them; returns the exit code."""
    try:
        config, sources = load(StackConfig, command, arguments, os.environ)
        run_dir = Path(config.run_dir or f"{tempfile.gettempdir()}/splitwave")
        # Before a start, too: what a program would refuse then is told as the user gave it.
        text = whole_stack_toml(config, sources, plan_of(config, run_dir))
        if wants_print(arguments):
            print(text, end="")
            return 0
    except ConfigError as error:
        print(f"splitwave {command}: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    return then(config)


def _run(config: StackConfig) -> int:
    try:
        return asyncio.run(_up(config))
    except ConfigError as error:
        print(f"splitwave up: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except (StackFailed, demo_model.DemoModelError) as error:
        print(f"\nsplitwave up: {error}", file=sys.stderr)
        return 1


async def _up(config: StackConfig) -> int:
    report = reporter()
    plan = await asyncio.to_thread(make_plan, config, report)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    code = await serve_certified(
        plan,
        lambda: _serve(plan, config.ready_timeout_s, report, stop),
        lambda: _unless_stopped(make_smoke(plan, report), stop),
    )
    report("stack", "stopped")
    return code


async def _serve(plan: Plan, ready_timeout_s: float, report: Report, stop: asyncio.Event) -> int:
    """Start the stack and keep it up until told to stop; 130 if that comes before it is ready."""
    if stop.is_set():
        return 130
    async with running(plan, report) as stack:
        if not await _or_stop(stack.ready(ready_timeout_s), stop):
            return 130
        print(banner(plan), flush=True)
        await _or_stop(_until_failure(stack), stop)
    return 0


async def _unless_stopped(work: Coroutine[None, None, None], stop: asyncio.Event) -> None:
    await _or_stop(work, stop)


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


def make_plan(config: StackConfig, report: Callable[[str, str], None]) -> Plan:
    """The stack that the settings describe; builds the embedded model if it is asked for."""
    if config.model in BUILT_IN:
        build_model(config.model, report)
    elif not (Path(config.model) / "config.json").is_file():
        why = f"{config.model} has no config.json; give a model directory, `demo` or `tiny`"
        raise StackFailed("--model", why)
    for name in ("run_dir", "trace_dir"):
        _make_directory(flag(name), getattr(config, name))
    plan = plan_of(config, Path(config.run_dir or tempfile.mkdtemp(prefix="splitwave-")))
    check_groups(plan, os.environ)  # Again, since now the model is there.
    return plan


def _make_directory(which: str, path: str) -> None:
    """Make a directory that was asked for, and see that it can be written to."""
    if not path:
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise StackFailed(which, f"cannot write into {path}: {error.strerror}") from None


def plan_of(config: StackConfig, run_dir: Path) -> Plan:
    """The same for a model and a directory that need not be there yet."""
    if config.model in BUILT_IN:
        options = demo_model.DemoModelOptions(variant=BUILT_IN[config.model])
        model_path, experts = demo_model.default_dir(options.variant), options.expert_count
    else:
        model_path = Path(config.model).resolve()
        experts = read_experts(model_path)
    is_certified = config.certify != "off" and config.engine == "vllm"
    return Plan(
        model_path=model_path,
        served_model=config.served_model or model_path.name,
        run_dir=run_dir,
        trace_dir=Path(config.trace_dir).resolve() if config.trace_dir else None,
        engine=config.engine,
        prefill_ranks=config.prefill_ranks,
        decode_ranks=config.decode_ranks,
        experts=experts,
        grpc_port=config.grpc_port,
        http_port=config.http_port,
        prefill_port=config.prefill_port,
        decode_port=config.decode_port,
        side_channel_port=config.side_channel_port,
        metrics_port=config.metrics_port,
        prefill_settings=config.prefill_setting,
        decode_settings=config.decode_setting,
        modes={"prefill": config.prefill_mode, "decode": config.decode_mode},
        worker_flags=config.program_flags(),
        certificates=machine().certificates if is_certified else None,
        trust=machine().trust if is_certified else None,
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
        f"  splitwave chat --address {plan.router_http}\n"
        f"status: http://{plan.router_http}/, or splitwave status --router {plan.router_http}\n"
        "Ctrl-C stops it."
    )
