"""Counting steps by kind, and prompt tokens that were computed."""

from types import SimpleNamespace
from typing import Any  # vLLM's objects are untyped here

import pytest
import torch
from vllm import forward_context
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu_worker import Worker

from splitwave.core.mode import StepKind
from splitwave.engine.vllm import steps, violations
from splitwave.engine.vllm.steps import (
    StepCounter,
    is_without_batch,
    sized_kind,
    step_kind,
    step_width_tokens,
)


def scheduled(
    counts: dict[str, int],
    *,
    new: dict[str, tuple[int, int]] | None = None,
    speculated: dict[str, list[int]] | None = None,
    finished: set[str] | None = None,
) -> SimpleNamespace:
    """A step's plan; `new` maps a request to its prompt's length and how much is there already."""
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        scheduled_spec_decode_tokens=speculated or {},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=[1] * length, num_computed_tokens=there)
            for name, (length, there) in (new or {}).items()
        ],
        finished_req_ids=finished or set(),
    )


def test_a_decode_step_of_one_token_a_request_is_no_prefill() -> None:
    counter = StepCounter()

    counter.count_decode(scheduled({"a": 1, "b": 1}))
    assert counter.prefill_tokens_computed == 0


def test_tokens_beyond_one_a_request_are_prefill_and_speculated_ones_are_not() -> None:
    counter = StepCounter()

    counter.count_decode(scheduled({"a": 5, "b": 3}, speculated={"b": [7, 8]}))
    assert counter.prefill_tokens_computed == 4


def test_prompt_tokens_count_over_chunks_and_generated_ones_do_not() -> None:
    counter = StepCounter()

    counter.count_prompt(scheduled({"a": 64}, new={"a": (100, 0)}))
    counter.count_prompt(scheduled({"a": 36}))
    counter.count_prompt(scheduled({"a": 1}))
    assert counter.prefill_tokens_computed == 100


def test_cached_prompt_tokens_do_not_count() -> None:
    counter = StepCounter()

    counter.count_prompt(scheduled({"a": 8}, new={"a": (200, 192)}))
    assert counter.prefill_tokens_computed == 8


def test_a_request_that_ends_amid_its_prompt_is_forgotten() -> None:
    counter = StepCounter()

    counter.count_prompt(scheduled({"a": 64}, new={"a": (100, 0)}))
    counter.count_prompt(scheduled({}, finished={"a"}))
    counter.count_prompt(scheduled({"a": 36}))
    assert counter.prefill_tokens_computed == 64


def test_the_first_forward_of_a_step_names_its_kind() -> None:
    counter = StepCounter()

    for kinds, tokens in ((["full", "eager"], 3), (["eager"], 0), ([], 2)):
        counter.begin()
        for width_tokens, kind in enumerate(kinds, start=4):
            counter.saw_forward(kind, width_tokens)
        counter.end(tokens=tokens)
    assert counter.report() == {
        "steps_by_kind": {"full": 1, "eager": 1, "unseen": 1},
        "steps_by_size": {4: 1},
        "dummy_steps": 1,
        "prefill_tokens_computed": 0,
        "tokens": 5,
        "padded_tokens": 4 + 4 + 2,
    }


def test_a_replay_is_what_the_step_was_whatever_was_opened_to_prepare_it() -> None:
    counter = StepCounter()

    counter.begin()
    counter.saw_forward("eager", 2)
    counter.saw_replay("ubatched_full", 64)
    counter.end(tokens=60)
    assert counter.report()["steps_by_kind"] == {"ubatched_full": 1}
    assert counter.report()["padded_tokens"] == 64


def test_eager_microbatches_are_told_from_an_eager_step() -> None:
    counter = StepCounter()

    counter.begin()
    for kind, width in (("eager", 4), ("eager", 4), ("eager_ubatched", 8), ("eager", 4)):
        counter.saw_forward(kind, width)
    counter.end(tokens=7)
    assert counter.report()["steps_by_kind"] == {"eager_ubatched": 1}
    assert counter.report()["padded_tokens"] == 8, "as wide as the whole step, not as one of two"


def test_steps_of_a_grid_are_counted_by_their_rows_and_others_are_not() -> None:
    counter = StepCounter()

    for kind, rows in (("full", 64), ("ubatched_full", 64), ("full", 32), ("compiled", 3)):
        counter.begin()
        counter.saw_replay(kind, rows)
        counter.end(tokens=rows)
    for kind in ("eager", "eager_ubatched", "compiled_unwarmed"):
        counter.begin()
        counter.saw_forward(kind, 64)
        counter.end(tokens=64)
    assert counter.report()["steps_by_size"] == {64: 2, 32: 1, 3: 1}


def test_a_context_that_a_connector_opens_to_load_runs_no_model() -> None:
    nothing = SimpleNamespace(attn_metadata=None, dp_metadata=None, batch_descriptor=None)

    assert is_without_batch(nothing)
    for name in vars(nothing):
        assert not is_without_batch(SimpleNamespace(**(vars(nothing) | {name: object()})))


def test_a_step_is_as_wide_as_the_widest_rank_or_as_its_graph() -> None:
    ranks = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([3, 8]))
    graph = SimpleNamespace(num_tokens=16)

    for dp_metadata, batch_descriptor, width_tokens in (
        (ranks, graph, 8), (None, graph, 16), (None, None, 0),
    ):  # fmt: skip
        context = SimpleNamespace(dp_metadata=dp_metadata, batch_descriptor=batch_descriptor)
        assert step_width_tokens(context) == width_tokens


@pytest.mark.parametrize(
    ("graph", "ubatched", "compiled", "kind"),
    [
        (CUDAGraphMode.NONE, False, False, StepKind.EAGER),
        (CUDAGraphMode.NONE, True, False, StepKind.EAGER_UBATCHED),
        (CUDAGraphMode.NONE, False, True, StepKind.COMPILED),
        (CUDAGraphMode.FULL, False, True, StepKind.FULL),
        (CUDAGraphMode.FULL, True, True, StepKind.UBATCHED_FULL),
        (CUDAGraphMode.PIECEWISE, False, True, "piecewise"),
        (CUDAGraphMode.NONE, True, True, "compiled_ubatched"),
    ],
)
def test_a_forward_context_tells_the_step_kind(
    graph: CUDAGraphMode, ubatched: bool, compiled: bool, kind: str
) -> None:
    context = SimpleNamespace(
        cudagraph_runtime_mode=graph,
        ubatch_slices=[slice(0, 1)] if ubatched else None,
        skip_compiled=False,
    )

    assert step_kind(context, is_compiled=compiled) == kind


def test_a_forward_that_passes_by_the_compiled_code_is_eager() -> None:
    context = SimpleNamespace(
        cudagraph_runtime_mode=CUDAGraphMode.NONE, ubatch_slices=None, skip_compiled=True
    )

    assert step_kind(context, is_compiled=True) == StepKind.EAGER


@pytest.mark.parametrize(
    ("kind", "tokens", "sizes", "counted"),
    [
        ("compiled", 4, range(1, 5), "compiled"),
        ("compiled", 5, range(1, 5), "compiled_unwarmed"),
        ("compiled", None, range(1, 5), "compiled_unwarmed"),
        ("compiled", 5, None, "compiled"),
        ("eager", 5, range(1, 5), "eager"),
    ],
)
def test_compiled_code_that_was_not_warmed_up_is_of_no_modes_kind(
    kind: str, tokens: int | None, sizes: range | None, counted: str
) -> None:
    batch = None if tokens is None else SimpleNamespace(num_tokens=tokens)

    assert sized_kind(kind, SimpleNamespace(batch_descriptor=batch), sizes) == counted
    assert (counted in set(StepKind)) == (counted != "compiled_unwarmed")


def _installed_on(monkeypatch: pytest.MonkeyPatch, worker: Any) -> None:
    """Have what `steps.install` changes restored after the test, and let it install."""
    for name in ("execute_model", "execute_dummy_batch", "compile_or_warm_up_model"):
        monkeypatch.setattr(worker, name, getattr(worker, name))
    for name in ("splitwave_steps", "splitwave_installed"):
        monkeypatch.setattr(worker, name, None, raising=False)
    monkeypatch.setattr(
        forward_context, "create_forward_context", forward_context.create_forward_context
    )


def test_what_a_worker_runs_to_warm_up_is_no_step_and_no_violation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = violations.Record({"SPLITWAVE_MODE": "decode_graph_ht"})
    monkeypatch.setattr(violations, "record", lambda: record)
    monkeypatch.setattr(steps, "_counter", counter := StepCounter())
    plan = scheduled({"a": 2}, new={"a": (2, 0)})
    plan.total_num_scheduled_tokens = 2
    plan.scheduled_cached_reqs = SimpleNamespace(req_ids=[], num_computed_tokens=[])

    _installed_on(monkeypatch, Worker)
    Worker.execute_model = lambda _worker, _plan: counter.saw_forward("eager")
    Worker.compile_or_warm_up_model = lambda worker: worker.execute_model(plan) or "times"
    steps.install()

    worker: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(kv_transfer_config=None),
        model_runner=SimpleNamespace(requests={}),
        execute_model=lambda plan: Worker.execute_model(worker, plan),
    )
    assert Worker.compile_or_warm_up_model(worker) == "times"
    assert counter.report() == StepCounter().report()
    assert not record.take()

    worker.execute_model(plan)
    assert counter.report()["steps_by_kind"] == {"eager": 1}
    assert [found["kind"] for found in record.take()] == ["eager"]
