"""A GPU engine whose mode splits eager steps bounds its microbatches' waits; no other does.

Nor is one forked from a process that has wrapped vLLM for a group of another kind.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any  # a C library

import pytest

from splitwave.core.mode import MODES, Mode, StepKind
from splitwave.engine.vllm import forking, plugin
from splitwave.engine.vllm.switches import (
    HANDOVERS,
    WORST_TOKEN,
    handovers_wanted,
    worst_token_transport,
)

ROOT = Path(__file__).parents[2]
REGISTERED = """
import os
from vllm.platforms import current_platform
from splitwave.engine.vllm import jit_caches, plugin, seams
from vllm.v1.worker.gpu import ubatch_utils

before = ubatch_utils.make_ubatch_contexts
type(current_platform).is_cpu = lambda _self: False  # as in a GPU engine
plugin.register()
bounded = ubatch_utils.make_ubatch_contexts is not before
assert plugin.fits()
os.environ["SPLITWAVE_WORST_TOKEN"] = "v2"
plugin.register()
assert not plugin.fits(), "what a fork would inherit is of the first group, too"
print(bounded)
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


def no_driver(name: str) -> Any:
    raise OSError(name)


def test_a_process_that_has_wrapped_nothing_fits_any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_wrapped_for", None)
    monkeypatch.setenv(WORST_TOKEN, "legacy")

    assert plugin.fits()


@pytest.mark.parametrize(
    ("first", "then", "fits"),
    [
        ("decode_graph_ht", "decode_graph_ht", True),
        ("decode_graph_ht", "prefill_eager_ht", False),
        ("prefill_eager_ht", "decode_graph_ht", False),
        ("prefill_eager_ht", "prefill_eager_ht_dbo", False),
        ("decode_graph_ht", "decode_graph_ht_legacy", False),
        ("prefill_eager_ht", "decode_graph_ag", True),
    ],
)
def test_engines_of_a_second_group_are_forked_only_if_it_asks_for_the_same(
    monkeypatch: pytest.MonkeyPatch, first: str, then: str, fits: bool
) -> None:
    wrapped = worst_token_transport(MODES[first].env), handovers_wanted(MODES[first].env)
    monkeypatch.setattr(plugin, "_wrapped_for", wrapped)
    monkeypatch.setattr(forking, "_touched", False)
    for name in (WORST_TOKEN, HANDOVERS):
        monkeypatch.delenv(name, raising=False)
    for name, value in MODES[then].env.items():
        monkeypatch.setenv(name, value)

    assert plugin.fits() is fits
    assert forking.start_method(no_driver) == ("fork" if fits else "spawn")
