"""docs/clients.md names each client that is run, in the version that is pinned."""

import re

import pytest

from tests.clients.documented import PAGE, blocks
from tests.clients.environments import version

RUN = ("openai", "buf", "smg", "vllm-bench", "lm-eval", "aiperf")
"""By the page's own commands against the demo stack, in `test_vllm_demo_stack.py`."""


def test_every_documented_block_is_run() -> None:
    assert {name for kind, name in blocks() if kind == "run"} == {*RUN}
    assert {name for kind, name in blocks() if kind == "serve"} == {"smg"}


@pytest.mark.parametrize("name", ["openai", "buf", "smg", "lm-eval", "aiperf"])
def test_the_documented_version_is_the_pinned_one(name: str) -> None:
    row = re.search(rf"^\| \[{name}\]\(.*?\) \| ([\w.]+) \|", PAGE.read_text(), re.M)

    assert row is not None
    assert row[1] == version(name)
