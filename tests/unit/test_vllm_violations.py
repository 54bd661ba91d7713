"""Steps outside the mode: recorded by the worker, told by the engine core, read by the adapter."""

import queue
from types import SimpleNamespace
from typing import Any  # vLLM's objects are untyped here

import pytest
from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.v1.engine import EngineCoreOutput

from splitwave.core.mode_guard import StepViolation, ViolatingRequest
from splitwave.engine.vllm import violations
from splitwave.engine.vllm.planted import AT_STEP, PLANTED, PlantedStep
from splitwave.engine.vllm.violations import Record, features, violation_in

COMPILED = {"SPLITWAVE_MODE": "decode_cpu_compiled"}
FAULTY = {"SPLITWAVE_FAULTS": "out_of_mode_step"}


def plan() -> SimpleNamespace:
    """A step with a new request, and one that has run before."""
    return SimpleNamespace(
        total_num_scheduled_tokens=2,
        num_scheduled_tokens={"old": 1, "new": 1},
        scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=40)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["old"], num_computed_tokens=[99]),
    )


def worker() -> SimpleNamespace:
    old = SimpleNamespace(sampling_params=SamplingParams(temperature=0.5, top_p=0.9))
    new = SimpleNamespace(sampling_params=SamplingParams(temperature=0.0))
    return SimpleNamespace(model_runner=SimpleNamespace(requests={"old": old, "new": new}))


def test_a_step_of_another_kind_is_recorded_with_its_requests_and_no_text() -> None:
    record = Record(COMPILED)

    record.look("compiled", 6, plan(), worker())
    record.look("eager", 7, plan(), worker())
    assert record.take() == [
        {
            "step": 7,
            "kind": "eager",
            "tokens": 2,
            "requests": [
                {"engine_request_id": "old", "length_tokens": 100, "step_tokens": 1,
                 "sampling": ["temperature", "top_p"]},
                {"engine_request_id": "new", "length_tokens": 41, "step_tokens": 1, "sampling": []},
            ],
        }
    ]  # fmt: skip
    assert record.take() == []


def test_a_dummy_step_of_another_kind_is_recorded_too() -> None:
    record = Record(COMPILED)

    record.look("unseen", 3, None, worker())
    assert record.take() == [{"step": 3, "kind": "unseen", "tokens": 0, "requests": []}]


@pytest.mark.parametrize("environ", [{}, {"SPLITWAVE_MODE": "no_such_mode"}])
def test_an_engine_that_knows_no_mode_has_no_violations(environ: dict[str, str]) -> None:
    record = Record(environ)

    record.look("eager", 1, None, worker())
    assert record.take() == []


def test_every_feature_that_is_asked_for_is_named() -> None:
    asked = SamplingParams(
        temperature=1.0, top_k=5, min_p=0.1, seed=3, min_tokens=2, presence_penalty=0.1,
        frequency_penalty=0.2, repetition_penalty=1.1, logprobs=0, logit_bias={1: 2.0},
    )  # fmt: skip

    assert features(asked) == [
        "frequency_penalty", "logit_bias", "logprobs", "min_p", "min_tokens", "presence_penalty",
        "repetition_penalty", "seed", "temperature", "top_k",
    ]  # fmt: skip
    assert features(None) == []


def test_what_is_recorded_arrives_as_a_violation_and_an_output_of_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = Record(COMPILED)
    monkeypatch.setattr(violations, "record", lambda: record)
    core = SimpleNamespace(output_queue=queue.Queue())

    def step(core: Any) -> bool:  # vLLM's core
        record.look("eager", 7, plan(), worker())
        return True

    assert violations._then_tell(step)(core) is True  # noqa: SLF001  # what is installed
    client, outputs = core.output_queue.get_nowait()
    (output,) = outputs.outputs
    assert client == 0
    assert violation_in(output, 1) == StepViolation(
        rank=1,
        step=7,
        kind="eager",
        tokens=2,
        requests=(
            ViolatingRequest(
                engine_request_id="old",
                length_tokens=100,
                step_tokens=1,
                sampling=("temperature", "top_p"),
            ),
            ViolatingRequest(engine_request_id="new", length_tokens=41, step_tokens=1),
        ),
    )


@pytest.mark.parametrize("params", [None, {}, {"splitwave_pull_ended": True}])
def test_a_requests_own_output_is_no_violation(params: dict[str, Any] | None) -> None:
    output = EngineCoreOutput(request_id="r", new_token_ids=[1], kv_transfer_params=params)

    assert violation_in(output, 0) is None


def odd_steps(environ: dict[str, str], *, is_compiled: bool) -> list[tuple[int, str | None, bool]]:
    """Which of fifty steps of work were odd: number, kind to count, whether it skips the code."""
    planted, found = PlantedStep(environ), []
    for number in range(1, 51):
        planted.begin(0)  # A dummy step between any two.
        assert planted.act(SimpleNamespace(), is_compiled=is_compiled) is None
        planted.begin(1)
        context = SimpleNamespace(skip_compiled=False, cudagraph_runtime_mode=CUDAGraphMode.FULL)
        kind = planted.act(context, is_compiled=is_compiled)
        skips = context.skip_compiled and context.cudagraph_runtime_mode is CUDAGraphMode.NONE
        if kind or skips:
            found.append((number, kind, skips))
    return found


def test_the_planted_step_of_compiled_code_passes_it_by_once() -> None:
    assert odd_steps(FAULTY, is_compiled=True) == [(AT_STEP, None, True)]


def test_the_planted_step_of_an_eager_rank_is_counted_as_planted() -> None:
    assert odd_steps(FAULTY, is_compiled=False) == [(AT_STEP, PLANTED, False)]


@pytest.mark.parametrize("environ", [{}, FAULTY | {"SPLITWAVE_RESTARTS": "1"}])
def test_without_the_fault_or_after_a_start_over_no_step_is_odd(environ: dict[str, str]) -> None:
    assert odd_steps(environ, is_compiled=True) == []
