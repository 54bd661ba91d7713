"""Pulls from a prefill engine that is away in a long step: `python -m ... MODEL DIR`.

Starts a prefill group whose long steps last STEP_S, another that nobody polls meanwhile, and a
decode group that pulls from both, and writes what it saw to DIR/report.json for the tests.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any  # JSON

from splitwave.engine.port import EngineRequest, Role
from splitwave.engine.vllm.long_steps import FROM_TOKENS
from splitwave.engine.vllm.start import start_group
from splitwave.engine.vllm.switches import FAULTS, Fault
from tests.e2e.adapter_cases import Case, greedy, prompt, settings
from tests.e2e.adapter_pair import Caller, going_on
from tests.e2e.live_stack import free_ports

SHORT_TOKENS = 200
NEW_TOKENS = 4
INTO_THE_STEP_S = 1.0
"""From when the long prompt is sent until decode is asked: by then the step runs."""


async def tokens_at(running: Any) -> tuple[list[int], float]:  # of a Caller
    """What a request generated, and when it had ended."""
    outputs = await running
    assert outputs[-1].failure is None, outputs[-1].failure_message
    return [token for output in outputs for token in output.token_ids], time.monotonic()


async def whole(prefill: Caller, case: Case) -> list[int]:
    """The tokens of one engine."""
    request = EngineRequest(
        engine_request_id=f"{case.name}/whole", rank=0, token_ids=case.token_ids,
        sampling=case.sampling,
    )  # fmt: skip
    return (await tokens_at(prefill.run(request)))[0]


async def finished_prompt(prefill: Caller, case: Case) -> EngineRequest:
    """Prefill a prompt; returns what decode goes on with."""
    request = EngineRequest(
        engine_request_id=case.name, rank=0, token_ids=case.token_ids, sampling=case.sampling,
        hold=True,
    )  # fmt: skip
    first = await prefill.run(request)
    held = first[-1].held
    assert held is not None
    return going_on(case.name, 0, case, first, held)


async def pull_during_a_step(prefill: Caller, decode: Caller, name: str) -> dict[str, Any]:
    """Pull one prompt from an idle engine, and another while a long prompt's step runs."""
    shaken, pulled = (
        Case(f"{name}/{n}", prompt(SHORT_TOKENS, n), greedy(NEW_TOKENS)) for n in (1, 2)
    )
    alone = await whole(prefill, pulled)
    await decode.run(await finished_prompt(prefill, shaken))
    request = await finished_prompt(prefill, pulled)
    long = EngineRequest(
        engine_request_id=f"{name}/long", rank=0, token_ids=prompt(2 * FROM_TOKENS, 3),
        sampling=greedy(1),
    )  # fmt: skip
    step = asyncio.create_task(tokens_at(prefill.run(long)))
    await asyncio.sleep(INTO_THE_STEP_S)
    asked_s = time.monotonic()
    tokens, decoded_s = await tokens_at(decode.run(request))
    _, step_ended_s = await step
    return {
        "asked_s_before_the_steps_end": step_ended_s - asked_s,
        "decoded_s_before_the_steps_end": step_ended_s - decoded_s,
        "took_s": decoded_s - asked_s,
        "tokens": [len(alone), alone[1:] == tokens],
    }


async def started(role: Role, model: Path, out: Path, port: int, *faults: Fault) -> Caller:
    """A group of one rank with these faults."""
    os.environ[FAULTS] = ",".join(faults)
    name = f"{role}-{len(faults)}"
    return Caller(await start_group(settings(role, model, out, port, group_id=name)))


async def drive(model: Path, out: Path) -> dict[str, Any]:
    """Start the groups, pull from both prefill groups, stop everything."""
    port = free_ports(3)
    groups = {
        "polled": await started(Role.PREFILL, model, out, port, Fault.LONG_STEPS),
        "not polled": await started(
            Role.PREFILL, model, out, port + 1, Fault.LONG_STEPS, Fault.NO_STEP_POLLS
        ),
    }
    decode = await started(Role.DECODE, model, out, port + 2)
    report = {
        name: await pull_during_a_step(prefill, decode, name) for name, prefill in groups.items()
    }
    for caller in (*groups.values(), decode):
        await caller.engine.close()
    return report


def main() -> None:
    """Run everything and write the report."""
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    (out / "report.json").write_text(json.dumps(asyncio.run(drive(model, out))))


if __name__ == "__main__":
    main()
