"""Clients with large environments: `make clients-all` runs them, `make test` does not."""

import asyncio
import json
import os
import re
import sys
from pathlib import Path

from splitwave.certify.accuracy import gateway
from splitwave.certify.accuracy.gateway import Command
from splitwave.certify.accuracy.lm_eval import Sample, score
from splitwave.certify.accuracy.task import few_shot
from tests.clients.documented import Target, run
from tests.clients.environments import ROOT, client
from tests.e2e.live_stack import free_ports


def test_lm_eval_generates_and_compares_likelihoods(target: Target) -> None:
    said = run("lm-eval", target)

    rows = dict(re.findall(r"^\|(\w+)\s*\|Yaml.*?\|↑\s*\|\s*([\d.]+)\|", said, re.M))
    assert rows.keys() == {"capitals", "colours"}
    assert all(0.0 <= float(value) <= 1.0 for value in rows.values())


def test_aiperf(target: Target) -> None:
    run("aiperf", target)

    told = json.loads((ROOT / "build/aiperf/profile_export_aiperf.json").read_text())
    assert told["request_count"]["avg"] == 8
    assert told["output_sequence_length"]["avg"] == 8
    assert told["time_to_first_token"]["avg"] > 0


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
