"""lm-eval as the battery runs it: `make clients-all` does, `make test` does not."""

import asyncio
import os
import sys
from pathlib import Path

from splitwave.certify.accuracy import gateway
from splitwave.certify.accuracy.gateway import Command
from splitwave.certify.accuracy.lm_eval import Sample, score
from splitwave.certify.accuracy.task import few_shot
from tests.clients.environments import client
from tests.e2e.live_stack import free_ports


def test_lm_eval_scores_the_batterys_task(model_dir: Path, tmp_path: Path) -> None:
    first = free_ports(8)
    http, metrics = f"127.0.0.1:{first + 1}", f"127.0.0.1:{first + 4}"
    ports = ("grpc", "http", "prefill", "decode", "metrics")
    flags = [word for n, name in enumerate(ports) for word in (f"--{name}-port", str(first + n))]
    words = [sys.executable, "-m", "services.cli.main", "up", "--engine", "sim", "--model",
             str(model_dir), "--run-dir", str(tmp_path / "run"), *flags]  # fmt: skip
    command = Command(
        words=words, http=http, metrics=[metrics], model=model_dir.name, model_path=str(model_dir)
    )
    asked = few_shot(12, 6)

    async def scored() -> tuple[list[Sample], int]:
        async with gateway.running(command, os.environ):
            python = client("lm-eval") / "python"
            return await score(python, command, asked, tmp_path), await gateway.steps_run(command)

    samples, steps = asyncio.run(scored())

    assert [sample.place for sample in samples] == list(range(12))
    assert all(sample.text for sample in samples)
    assert steps > 0
