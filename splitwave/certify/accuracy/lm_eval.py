"""Runs lm-evaluation-harness, from an environment of its own, and reads what it scored."""

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

from splitwave.certify.accuracy.gateway import Command
from splitwave.certify.accuracy.task import TASK

CONCURRENT = 8
TAIL_CHARS = 3000


class HarnessFailed(Exception):
    """The harness did not score the task; the message says why, with the end of what it said."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the harness has of one item."""

    place: int
    text: str
    is_right: bool


async def score(python: Path, command: Command, task_directory: Path, out: Path) -> list[Sample]:
    """Run the task against a running stack; samples are in the items' order."""
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
        "--model_args", arguments, "--include_path", str(task_directory), "--tasks", TASK,
        "--output_path", str(out), "--log_samples",
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT, start_new_session=True,
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
    return read_samples(out)


def read_samples(out: Path) -> list[Sample]:
    """The newest samples below the harness's output path."""
    found = sorted(out.rglob(f"samples_{TASK}_*.jsonl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise HarnessFailed(f"lm-eval left no samples below {out}")
    rows = [json.loads(line) for line in found[-1].read_text().splitlines()]
    samples = [
        Sample(row["doc_id"], row["filtered_resps"][0], row["exact_match"] == 1.0) for row in rows
    ]
    return sorted(samples, key=lambda sample: sample.place)
