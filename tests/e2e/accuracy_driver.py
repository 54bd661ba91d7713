"""Runs the accuracy check on real engines, its items asked by HTTP and not by the harness.

`python -m tests.e2e.accuracy_driver MODEL OUT`: OUT/gateway.json says how its stacks are started,
OUT/report.json what came of it. A process of its own, since it forks an engine.
"""

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any  # JSON

from splitwave.certify.accuracy.check import AccuracyCheck, Gateway
from splitwave.certify.accuracy.gateway import Command, read_fingerprints, stack_environment
from splitwave.certify.accuracy.lm_eval import CONCURRENT, Sample
from splitwave.certify.accuracy.task import Task, is_right
from splitwave.certify.battery.bench import Subject
from splitwave.certify.battery.run import Result
from splitwave.certify.battery.scale import Scale
from splitwave.core.envelope import Envelope, Traffic
from splitwave.core.evidence import Level
from splitwave.core.fingerprint import Fingerprint
from splitwave.core.mode import lookup
from splitwave.core.worker import Role
from splitwave.engine.vllm.config import VllmGroupSettings
from splitwave.engine.vllm.start import preload
from splitwave.engine.vllm.switches import FAULTS, Fault

ITEMS = 36
ANSWER_TIMEOUT_S = 60.0
SUBJECT = Subject(
    mode=lookup("decode_cpu_eager"),
    level=Level.FULL,
    envelope=Envelope(
        ranks=2, step_max_tokens=16, seats_max=16, prompt_max_tokens=1023,
        sequence_max_tokens=1024, traffic=Traffic(output_max_tokens=1023),
    ),
    dtype="float32",
    block_size_tokens=32,
)  # fmt: skip


def ask(command: Command, asked: Task, place: int) -> Sample:
    """One item, as any client of the API would ask it."""
    item = asked.items[place]
    body = {"model": command.model, "prompt": item.prompt, "max_tokens": asked.tokens_max,
            "temperature": 0, "stop": [asked.stop]}  # fmt: skip
    request = urllib.request.Request(
        f"http://{command.http}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
        text = json.loads(response.read())["choices"][0]["text"]
    return Sample(place, text, is_right(item, text))


async def by_http(_: Path, command: Command, asked: Task, __: Path) -> list[Sample]:
    """In place of the harness, which needs an environment of a gigabyte."""
    seats = asyncio.Semaphore(CONCURRENT)

    async def one(place: int) -> Sample:
        async with seats:
            return await asyncio.to_thread(ask, command, asked, place)

    return await asyncio.gather(*(one(place) for place in range(len(asked.items))))


def settings(model: Path, out: Path) -> VllmGroupSettings:
    """Of the group that the stack behind the gateway should be."""
    return VllmGroupSettings(
        role=Role.DECODE, mode=SUBJECT.mode.name, model_path=model, served_model=model.name,
        group_id="g", epoch=1, log_dir=out,
    )  # fmt: skip


def told(result: Result) -> dict[str, Any]:
    """What the test looks at."""
    return {"evidence": result.evidence.to_json(), "problems": list(result.problems)}


async def run(model: Path, out: Path) -> dict[str, Any]:
    """The check as it is, and once more for a group that the stack is not."""
    given = json.loads(await asyncio.to_thread((out / "gateway.json").read_text))
    main = Command(**given["main"])
    stacks = Gateway(
        main=main, control=Command(**given["control"]), lm_eval_python=Path(given["lm_eval_python"])
    )
    check = AccuracyCheck(
        settings=settings(model, out), gateway=stacks, directory=out / "accuracy",
        environment=stack_environment(os.environ), score=by_http,
    )  # fmt: skip
    scale, said = replace(Scale(), accuracy_items=ITEMS), list[str]()
    await check(SUBJECT, Fingerprint({}), scale, said.append)  # It runs once, for all that ask.
    # The control's stack has written where the main one did. It differs by its fault alone, which
    # the engines' compile cache is told of too.
    roles = read_fingerprints(main)
    values = dict(roles[SUBJECT.mode.role].values)
    assert values.pop(f"env.{FAULTS}") == Fault.SHIFT_ROUTING
    told_cache = f"vllm.additional_config.{FAULTS.lower()}"
    if told_cache in values:
        assert values[told_cache] == Fault.SHIFT_ROUTING
        values[told_cache] = ""
    others = Fingerprint(values | {"version.torch": "0"})
    return {
        "same": told(await check(SUBJECT, Fingerprint(values), scale, said.append)),
        "others": told(await check(SUBJECT, others, scale, said.append)),
        "roles": sorted(roles),
        "said": said,
    }


def main(arguments: Sequence[str]) -> int:
    """Run it, and leave the report."""
    model, out = map(Path, arguments)
    preload()
    (out / "report.json").write_text(json.dumps(asyncio.run(run(model, out))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
