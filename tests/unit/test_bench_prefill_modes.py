"""Prefill with and without microbatches: which rows there are, and what a row must have run."""

# ruff: noqa: SLF001  # one step's time is measured by itself

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any  # reports are JSON, and engines are none

import pytest

from bench.decode_modes import engine, environment_facts
from bench.decode_modes.tree import Outcome
from bench.prefill_modes import rank
from bench.prefill_modes.__main__ import Run, parser
from bench.prefill_modes.merge import merged
from bench.prefill_modes.rows import equal_share, first_tokens, judged
from bench.prefill_modes.spec import PrefillSpec, load, phases
from bench.prefill_modes.variants import ratio_to_whole, variants


def test_rows_are_whole_steps_and_microbatches_with_each_number_of_sms() -> None:
    whole, *split = variants("cuda", (8, 20))

    assert (whole.name, whole.mode.name, whole.arguments.get("enable_dbo")) == (
        "whole", "prefill_eager_ht", None,
    )  # fmt: skip
    assert [(v.name, v.env["VLLM_DBO_COMM_SMS"]) for v in split] == [
        ("dbo_sms8", "8"), ("dbo_sms20", "20"),
    ]  # fmt: skip
    assert all(v.arguments["enable_dbo"] is True for v in split)
    assert {v.env["VLLM_USE_V2_MODEL_RUNNER"] for v in (whole, *split)} == {"1"}


@pytest.mark.parametrize("sms", [(24,), (0,), (7,)])
def test_numbers_of_sms_that_vllm_would_change_are_refused(sms: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"{sms[0]} SMs"):
        variants("cuda", sms)


def test_a_step_is_due_to_be_split_from_the_threshold_on() -> None:
    whole, split = variants("cuda", (20,))
    (_, early) = variants("cuda", (20,), threshold=128)

    assert [split.kind_of(n) for n in (511, 512)] == ["eager", "eager_ubatched"]
    assert [early.kind_of(n) for n in (127, 128)] == ["eager", "eager_ubatched"]
    assert whole.kind_of(8192) == "eager"


def test_each_length_runs_alone_and_as_often_as_a_step_holds_it() -> None:
    assert phases([512, 8192], 8192) == [
        ("512 one", 512, 1), ("512 full", 512, 16), ("8192 one", 8192, 1),
    ]  # fmt: skip


def report(kinds: dict[str, int], median_ms: float = 10.0) -> dict[str, Any]:
    return {
        "phase": "1024 one", "prompts": 1, "prompt_tokens": 1024, "steps": 10,
        "median_ms": median_ms, "p99_ms": 12.0, "steps_by_kind": kinds, "dummy_steps": 0,
    }  # fmt: skip


def outcome(kinds: dict[str, int], status: str = "done") -> Outcome:
    return Outcome(status, 60.0, [0, 0], [[report(kinds)], [report(kinds, 20.0)]])


def test_a_rows_rate_is_that_of_both_ranks_by_the_slower_one() -> None:
    (split,) = variants("cuda", (20,))[1:]

    phase = judged(split, outcome({"eager_ubatched": 10}))["phases"]["1024 one"]

    assert phase["tokens_per_s"] == 2 * 1024 * 1000 / 20.0
    assert phase["as_due"]


@pytest.mark.parametrize(
    ("kinds", "as_due"),
    [
        ({"eager_ubatched": 10}, True),
        ({"eager_ubatched": 10, "eager": 10}, True),  # dummy steps behind
        ({"eager": 10}, False),
        ({"eager_ubatched": 9, "eager": 1}, False),
        ({"eager_ubatched": 10, "piecewise": 1}, False),
    ],
)
def test_a_row_whose_steps_were_not_split_as_was_due_is_told(
    kinds: dict[str, int], as_due: bool
) -> None:
    (split,) = variants("cuda", (20,))[1:]

    assert judged(split, outcome(kinds))["phases"]["1024 one"]["as_due"] is as_due


def test_a_failed_row_says_why() -> None:
    failed = Outcome("failed", 5.0, [1, None], [[{"failed": "out of memory"}], []], ["log"])

    assert judged(variants("cuda", ())[0], failed)["why"] == ["out of memory"]


def test_first_tokens_are_compared_by_prompt(tmp_path: Path) -> None:
    (tmp_path / "tokens0.json").write_text(json.dumps({"p": {"a": [1], "b": [2]}}))
    (tmp_path / "tokens1.json").write_text(json.dumps({"p": {"c": [3]}}))

    assert first_tokens(tmp_path) == {"a": [1], "b": [2], "c": [3]}
    assert equal_share({"a": [1], "b": [9]}, first_tokens(tmp_path)) == 0.5
    assert equal_share({}, {"a": [1]}) is None


def test_rates_are_told_as_shares_of_whole_steps() -> None:
    rates = {"whole": {"512 one": 100.0}, "dbo_sms20": {"512 one": 120.0, "1024 one": 1.0}}

    assert ratio_to_whole(rates) == {"dbo_sms20": {"512 one": 1.2}}


def test_a_spec_survives_its_file(tmp_path: Path) -> None:
    spec = PrefillSpec(
        row="r", model_dir="m", arguments={"enable_dbo": True}, dtype="bfloat16", vocabulary=9,
        kv_token_bytes=2, out_dir="o", lengths=[1], step_max_tokens=8, warm=1, timed=2,
    )  # fmt: skip
    spec.save(tmp_path / "spec.json")

    assert load(tmp_path / "spec.json") == spec


def test_rows_that_are_done_are_not_run_again_and_failed_ones_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(environment_facts, "collect", lambda *_: {})
    out = tmp_path / "rows.json"
    rows = {"small/whole": {"status": "done"}, "small/dbo_sms20": {"status": "late"}}
    out.write_text(json.dumps({"rows": rows}))

    def one(self: Run, model: str, variant: object, name: str) -> None:
        del model, variant
        ran.append(name)
        self.results.rows[name] = {"status": "done"}

    monkeypatch.setattr(Run, "_one", one)
    words = ["--out", str(out), "--models", "small", "--sms", "8,20", "--work-dir", str(tmp_path)]
    asked: argparse.Namespace = parser().parse_args(words)

    assert Run(asked, words).all()
    assert ran == ["small/dbo_sms8", "small/dbo_sms20"]


def test_rows_that_ran_side_by_side_are_compared_once_all_have_ended(tmp_path: Path) -> None:
    def part(name: str, rate: float, tokens: int) -> dict[str, Any]:
        folder = tmp_path / "rows" / f"small.{name}"
        folder.mkdir(parents=True)
        (folder / "tokens0.json").write_text(json.dumps({"p": {"a": [tokens], "b": [2]}}))
        phases = {"512 one": {"tokens_per_s": rate}}
        return {"rows": {f"small/{name}": {"status": "done", "phases": phases}}}

    found = merged([part("dbo_sms20", 120.0, 9), part("whole", 100.0, 1)], tmp_path)

    assert found["ratio_to_whole"] == {"small": {"dbo_sms20": {"512 one": 1.2}}}
    assert found["rows"]["small/dbo_sms20"]["first_tokens_equal_to_whole"] == 0.5


def test_the_dummy_step_behind_a_prefill_is_none_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As vLLM's core does it: the step is launched, then awaited, and then a dummy one runs."""
    clock = [100.0]

    def takes(seconds: float) -> None:
        clock[0] += seconds

    done = SimpleNamespace(
        request_id="a", new_token_ids=[7], finish_reason=SimpleNamespace(name="LENGTH")
    )
    steps = iter([(2.0, None, True), (3.0, {0: SimpleNamespace(outputs=[done])}, False)])

    def step() -> tuple[Any, bool]:
        seconds, outputs, executed = next(steps)
        takes(seconds)
        return outputs, executed

    for module in (rank, engine):
        now = SimpleNamespace(perf_counter=lambda: clock[0])
        monkeypatch.setattr(module, "time", now)
    lock_step: Any = engine.LockStep.__new__(engine.LockStep)
    lock_step.core = SimpleNamespace(
        batch_queue=[], scheduler=SimpleNamespace(has_requests=lambda: True),
        post_step=lambda _: None, step_fn=step, execute_dummy_batch=lambda: takes(50.0),
    )  # fmt: skip
    lock_step.iterations, lock_step.tokens, lock_step.unfinished = 0, {"a": []}, {"a"}
    lock_step.add, lock_step.any_rank = lambda _: None, lambda says: says
    unused: Any = None

    took_ms = rank.Prefills(unused, 0, lock_step, lambda _: None, unused)._step([])

    assert lock_step.tokens == {"a": [7]}
    assert took_ms == 5000.0
    assert clock == [155.0]
