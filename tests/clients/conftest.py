"""The stacks that clients are run against, and a gateway in front of one."""

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any  # JSON

import pytest

from splitwave.demo_model import DemoModelOptions, Variant, build
from tests.clients.documented import Target, command
from tests.clients.environments import ROOT
from tests.clients.sessions import openai_session
from tests.e2e.live_stack import free_ports, running

SMG_READY_S = 60.0


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("model") / "tiny"
    build(model, DemoModelOptions(variant=Variant.TINY), lambda line: None)
    return model


@pytest.fixture(scope="session")
def target(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Simulated engines under the tiny model's tokenizer."""
    with stack(model_dir, tmp_path_factory.mktemp("run"), "--engine", "sim") as started:
        yield started


@pytest.fixture(scope="session")
def told(target: Target) -> dict[str, Any]:
    """What the openai package saw of that stack."""
    return openai_session(target.http, target.model)


@contextlib.contextmanager
def stack(model_dir: Path, run_dir: Path, *flags: str) -> Iterator[Target]:
    """A stack as `splitwave up` starts it."""
    with running(model_dir, run_dir, *flags) as started:
        yield Target(
            http=started.address("http"),
            grpc=started.address("grpc"),
            model=started.served_model,
            model_dir=model_dir,
        )


@contextlib.contextmanager
def smg_in_front(target: Target) -> Iterator[Target]:
    """The documented gateway in front of a stack; stopped afterwards."""
    port = free_ports(2)
    target = replace(target, smg=f"127.0.0.1:{port}", smg_metrics_port=port + 1)
    argv, environment = command("smg", target, kind="serve")
    argv[-1] = f"exec {argv[-1]}"  # The shell makes way, so that a signal reaches the gateway.
    process = subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline_s = time.monotonic() + SMG_READY_S
        while not _serves(target):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline_s, "smg does not serve"
            time.sleep(0.2)
        yield target
    finally:
        process.terminate()
        try:
            process.communicate(timeout=20.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _serves(target: Target) -> bool:
    """True once it has the tokenizer too, which it takes in the background."""
    body = {"model": target.model, "prompt": "x", "max_tokens": 1}
    ask = urllib.request.Request(
        f"http://{target.smg}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(ask, timeout=30.0) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
