"""A GPU engine whose mode splits eager steps bounds its microbatches' waits; no other does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from splitwave.core.mode import MODES, Mode, StepKind
from splitwave.engine.vllm.switches import HANDOVERS, handovers_wanted, worst_token_transport

ROOT = Path(__file__).parents[2]
REGISTERED = """
from vllm.platforms import current_platform
from splitwave.engine.vllm import jit_caches, plugin, seams
from vllm.v1.worker.gpu import ubatch_utils

before = ubatch_utils.make_ubatch_contexts
type(current_platform).is_cpu = lambda _self: False  # as in a GPU engine
plugin.register()
print(ubatch_utils.make_ubatch_contexts is not before)
"""


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_who_splits_steps_bounds_their_waits(mode: Mode) -> None:
    splits = bool({StepKind.EAGER_UBATCHED, StepKind.UBATCHED_FULL} & mode.step_kinds)
    bounded = handovers_wanted(mode.env) or worst_token_transport(mode.env) is not None

    assert bounded or not splits


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("value", "bounded"), [("1", "True"), ("0", "False")])
def test_an_engine_bounds_them_if_it_is_told_to(value: str, bounded: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REGISTERED],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
        env=os.environ | {HANDOVERS: value},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == bounded
