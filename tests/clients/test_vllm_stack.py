"""Clients against real engines, prefill and decode apart, on the tiny model."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import smg_in_front, stack
from tests.clients.documented import Target, run
from tests.clients.sessions import check_texts, openai_session

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def real(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with stack(model_dir, tmp_path_factory.mktemp("real")) as started:
        yield started


def test_the_openai_package(real: Target) -> None:
    run("openai", real)
    check_texts(openai_session(real.http, real.model), real.model)


def test_smg_in_front(real: Target) -> None:
    with smg_in_front(real) as front:
        through = openai_session(front.smg, real.model)
        run("smg", front)

    check_texts(through, real.model)


def test_vllm_bench_serve(real: Target) -> None:
    said = run("vllm-bench", real)

    assert re.findall(r"Successful requests:\s+(\d+)", said) == ["16", "16"]
    assert re.findall(r"Failed requests:\s+(\d+)", said) == ["0", "0"]
    assert re.findall(r"Total generated tokens:\s+(\d+)", said) == [str(16 * 16)] * 2
