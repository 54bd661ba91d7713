"""Experts that differ: a token sent to a wrong one shows in log probabilities, and none is."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any  # JSON

import numpy as np
from safetensors.numpy import load_file, save_file

from splitwave.demo_model import DemoModelOptions, Variant, build
from splitwave.wire.client import Ask, generate
from tests.e2e.adapter_cases import routing_cases
from tests.e2e.live_stack import LiveStack, running

ROOT = Path(__file__).parents[2]
ORACLE_LIMIT_S = 300
TOLERANCE = 1e-3
"""Of a natural log probability, in float32."""

Rows = list[dict[str, float]]


def aggregated(model: Path, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.e2e.adapter_oracle", str(model), str(out), "routing"]
    subprocess.run(command, cwd=ROOT, timeout=ORACLE_LIMIT_S, check=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def misrouted(model: Path, out: Path) -> Path:
    """The same model with each router's rows moved by one: every token goes to wrong experts."""
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(model / "model.safetensors")
    for name in [name for name in tensors if name.endswith("block_sparse_moe.gate.weight")]:
        tensors[name] = np.ascontiguousarray(np.roll(tensors[name], 1, axis=0))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def difference(ours: Rows, theirs: Rows) -> float:
    """Largest difference of a token's log probability that both sides list."""
    return max(
        abs(row[token] - other[token])
        for row, other in zip(ours, theirs, strict=True)
        for token in row.keys() & other.keys()
    )


async def by_the_stack(stack: LiveStack) -> dict[str, tuple[list[int], Rows]]:
    async def complete(token_ids: list[int], sampling: Any) -> tuple[list[int], Rows]:
        async with stack.channel("grpc") as channel:
            ask = Ask(prompt=token_ids, sampling=sampling)
            answers = [answer async for answer in generate(channel, ask, 240.0)]
        rows = [
            {str(token): logprob for token, logprob in ((row.token_id, row.logprob), *row.top)}
            for answer in answers
            for row in answer.logprobs
        ]
        return [token for answer in answers for token in answer.token_ids], rows

    cases = routing_cases()
    found = await asyncio.gather(*(complete(case.token_ids, case.sampling) for case in cases))
    return {case.name: result for case, result in zip(cases, found, strict=True)}


def test_no_token_goes_to_a_wrong_expert(tmp_path: Path) -> None:
    model = tmp_path / "distinct"
    build(model, DemoModelOptions(variant=Variant.DISTINCT))
    right = aggregated(model, tmp_path / "right.json")
    with running(model, tmp_path / "stack") as stack:
        ours = asyncio.run(by_the_stack(stack))
    wrong = aggregated(misrouted(model, tmp_path / "misrouted"), tmp_path / "wrong.json")

    for name, (token_ids, rows) in ours.items():
        assert token_ids == right[name]["tokens"]
        assert difference(rows, right[name]["logprobs"]) < TOLERANCE
    for name, found in right.items():  # The control: the check sees what it is there to see.
        first = difference(found["logprobs"][:1], wrong[name]["logprobs"][:1])
        assert first > 10 * TOLERANCE, name
