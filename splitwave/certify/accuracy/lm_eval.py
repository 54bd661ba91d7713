"""Runs lm-evaluation-harness, from an environment of its own, and reads what it scored."""

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # JSON

from splitwave.certify.accuracy.gateway import Command
from splitwave.certify.accuracy.task import Task, is_right, write

CONCURRENT = 16
TAIL_CHARS = 3000


class HarnessFailed(Exception):
    """The harness did not score the task; the message says why, with the end of what it said."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the harness has of one item."""

    place: int
    text: str
    is_right: bool
    """By the harness, or where that cannot judge, by the task."""


async def score(python: Path, command: Command, task: Task, directory: Path) -> list[Sample]:
    """Run a task against a running stack; samples are in the items' order.

    The task's files and the harness's are left in `directory`.
    """
    write(directory / "task", task)
    arguments = ",".join(
        [
            f"model={command.model}",
            f"base_url=http://{command.http}/v1/completions",
            f"tokenizer={command.model_path}",
            f"num_concurrent={CONCURRENT}",
            "max_retries=1",
            "timeout=600",
        ]
    )
    process = await asyncio.create_subprocess_exec(
        str(python), "-m", "lm_eval", "run", "--model", "local-completions",
        "--model_args", arguments, "--include_path", str(directory / "task"), "--tasks", task.name,
        "--output_path", str(directory / "out"), "--log_samples",
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,  # In this process's group, and ended with it.
    )  # fmt: skip
    try:
        said, _ = await process.communicate()
    except BaseException:
        if process.returncode is None:
            process.kill()
        raise
    if process.returncode:
        tail = said.decode(errors="replace")[-TAIL_CHARS:]
        raise HarnessFailed(f"lm-eval ended with {process.returncode}:\n{tail}")
    return read_samples(directory / "out", task)


def read_samples(out: Path, task: Task) -> list[Sample]:
    """The newest samples below the harness's output path."""
    paths = out.rglob(f"samples_{task.name}_*.jsonl")
    found = sorted(paths, key=lambda path: path.stat().st_mtime)
    if not found:
        raise HarnessFailed(f"lm-eval left no samples below {out}")
    rows = [json.loads(line) for line in found[-1].read_text().splitlines()]
    samples = [_sample(row, task) for row in rows]
    return sorted(samples, key=lambda sample: sample.place)


def _sample(row: dict[str, Any], task: Task) -> Sample:
    place, text = row["doc_id"], row["filtered_resps"][0]
    item = task.items[place]
    exact = row["exact_match"] == 1.0
    return Sample(place, text, is_right(item, text) if item.kind == "gsm8k" else exact)
