"""`splitwave demo`: the main job from nothing: model, stack, a question by HTTP and gRPC, stop."""

import asyncio
import http.client
import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from services.cli.stack import Stack, StackFailed, channel, running
from services.cli.stack_config import StackConfig
from services.cli.up import make_plan, reporter, with_config
from splitwave import demo_model
from splitwave.core.errors import ServingError
from splitwave.core.generation import Sampling
from splitwave.runtime.config import EXIT_BAD_CONFIG, ConfigError
from splitwave.wire.client import Ask, generate

QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
MAX_TOKENS = 24
READY_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 300.0


class DemoFailed(Exception):
    """An answer is not what the model says."""


def main(arguments: Sequence[str]) -> int:
    """Print the answers and `demo: ok`; 1 with the reason otherwise."""
    return with_config(arguments, "demo", _run)


def _run(config: StackConfig) -> int:
    began_s = time.monotonic()
    try:
        asyncio.run(_demo(config))
    except ConfigError as error:
        print(f"demo: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except (StackFailed, ServingError, DemoFailed, demo_model.DemoModelError) as error:
        print(f"demo: failed: {error}", file=sys.stderr)
        return 1
    cpu_s = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    print(f"demo: {time.monotonic() - began_s:.0f} s wall, {cpu_s:.0f} CPU seconds")
    print("demo: ok")
    return 0


async def _demo(config: StackConfig) -> None:
    """Start the stack, ask it both ways, show what it did, stop it."""
    report = reporter()
    # A first look must not wait for a battery: certificates are made by `splitwave up`.
    plan = await asyncio.to_thread(make_plan, replace(config, certify="off"), report)
    async with running(plan, report) as stack:
        await stack.ready(READY_TIMEOUT_S)
        print(f"question: {QUESTION}")
        by_http = await asyncio.to_thread(_ask_http, plan.router_http, plan.served_model)
        print(f"by HTTP:  {by_http!r}")
        by_grpc = await _ask_grpc(plan.router_grpc)
        print(f"by gRPC:  {by_grpc!r}")
        await _show_work(stack)
    _check({"HTTP": by_http, "gRPC": by_grpc})


def prompt() -> str:
    """The question as the demo model was tuned to read it (ChatML)."""
    return f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def _ask_http(address: str, model: str) -> str:
    body = {"model": model, "prompt": prompt(), "max_tokens": MAX_TOKENS, "temperature": 0}
    connection = http.client.HTTPConnection(address, timeout=ANSWER_TIMEOUT_S)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    if response.status != 200:
        raise DemoFailed(f"HTTP {response.status}: {answer}")
    return str(answer["choices"][0]["text"])


async def _ask_grpc(address: str) -> str:
    ask = Ask(prompt=prompt(), sampling=Sampling(max_tokens=MAX_TOKENS, temperature=0.0))
    async with channel(address) as open_channel:
        parts = [answer.text async for answer in generate(open_channel, ask, ANSWER_TIMEOUT_S)]
    return "".join(parts)


async def _show_work(stack: Stack) -> None:
    """One line a pool: what its engines counted, so that the split is seen and not believed."""
    for name in ("prefill", "decode"):
        described = await stack.describe(name, counters=True)
        counters = described.rank_counters
        steps: dict[str, int] = {}
        for rank in counters:
            for kind, count in rank.steps_by_kind.items():
                steps[kind] = steps.get(kind, 0) + count
        pulled = sum(rank.bytes_pulled for rank in counters)
        computed = sum(rank.prefill_tokens_computed for rank in counters)
        print(
            f"{name}: {described.ranks} rank(s), mode {described.mode}, steps {steps},"
            f" prompt tokens computed {computed}, KV bytes pulled {pulled}"
        )


def _check(answers: dict[str, str]) -> None:
    for way, text in answers.items():
        if EXPECTED not in text:
            raise DemoFailed(f"the answer by {way} lacks {EXPECTED!r}: {text!r}")
    if len(set(answers.values())) != 1:
        raise DemoFailed("HTTP and gRPC gave different greedy answers")
