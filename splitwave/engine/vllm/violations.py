"""Steps outside the group's mode, recorded where they ran and told with the next outputs.

The worker records, the engine core's loop sends: at once if the worker runs in the core's own
process, as one rank on one device does; else its counts tell of the step, a second later at most.
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any  # vLLM's objects are untyped here

from splitwave.core.mode import MODES
from splitwave.core.mode_guard import REQUESTS_KEPT_MAX, StepViolation, ViolatingRequest
from splitwave.engine.vllm.switches import MODE

VIOLATION = "splitwave_violation"
"""Key in the kv_transfer_params of an output that belongs to no request."""
_ID = "splitwave/violation"
_MARK = "splitwave_violations_installed"
_UNSENT_MAX = 1024

_FEATURES: Mapping[str, object] = {
    "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "min_tokens": 0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    "logprobs": None, "logit_bias": None,
}  # fmt: skip
"""vLLM's sampling parameters, and the value that asks for nothing."""


class Record:
    """What one worker has run outside its mode."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        mode = MODES.get(environ.get(MODE, ""))
        self._kinds = None if mode is None else mode.step_kinds
        self.unsent: list[dict[str, Any]] = []

    def look(self, kind: str, step: int, plan: Any, worker: Any) -> None:  # vLLM's
        """Record a step if its kind is none of the mode's; `plan` is None for a dummy step."""
        if self._kinds is None or kind in self._kinds or len(self.unsent) >= _UNSENT_MAX:
            return
        tokens = 0 if plan is None else plan.total_num_scheduled_tokens
        requests = [] if plan is None else _requests(plan, worker.model_runner.requests)
        self.unsent.append({"step": step, "kind": kind, "tokens": tokens, "requests": requests})

    def take(self) -> list[dict[str, Any]]:  # plain values
        """What was not sent yet."""
        unsent, self.unsent = self.unsent, []
        return unsent


@functools.cache
def record() -> Record:
    """This process's; made at its first step, when the environment is that of its group."""
    return Record()


def _requests(plan: Any, states: Mapping[str, Any]) -> list[dict[str, Any]]:  # vLLM's, plain values
    computed = dict(
        zip(
            plan.scheduled_cached_reqs.req_ids,
            plan.scheduled_cached_reqs.num_computed_tokens,
            strict=True,
        )
    )
    computed |= {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
    return [
        {
            "engine_request_id": name,
            "length_tokens": computed.get(name, 0) + count,
            "step_tokens": count,
            "sampling": features(getattr(states.get(name), "sampling_params", None)),
        }
        for name, count in list(plan.num_scheduled_tokens.items())[:REQUESTS_KEPT_MAX]
    ]


def features(params: Any) -> list[str]:  # vLLM's SamplingParams, or None
    """Names of the sampling features that a request uses, sorted."""
    if params is None:
        return []
    idle = {name: (value, None, -1) for name, value in _FEATURES.items()}
    return sorted(name for name in idle if getattr(params, name, None) not in idle[name])


def violation_in(output: Any, rank: int) -> StepViolation | None:  # vLLM's EngineCoreOutput
    """The violation that an output tells of, or None if it is a request's."""
    told = (output.kv_transfer_params or {}).get(VIOLATION)
    if told is None:
        return None
    requests = tuple(
        ViolatingRequest(
            engine_request_id=request["engine_request_id"],
            length_tokens=request["length_tokens"],
            step_tokens=request["step_tokens"],
            sampling=tuple(request["sampling"]),
        )
        for request in told["requests"]
    )
    return StepViolation(
        rank=rank, step=told["step"], kind=told["kind"], tokens=told["tokens"], requests=requests
    )


def install() -> None:
    """Send what this process records. Idempotent."""
    from vllm.v1.engine.core import EngineCoreProc

    if getattr(EngineCoreProc, _MARK, False):
        return
    setattr(EngineCoreProc, _MARK, True)
    for name in ("_process_engine_step", "execute_dummy_batch"):
        setattr(EngineCoreProc, name, _then_tell(getattr(EngineCoreProc, name)))


def _then_tell(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    @functools.wraps(run)
    def ran(core: Any) -> Any:  # vLLM's EngineCoreProc, and what it returns
        result = run(core)
        for found in record().take():
            output = EngineCoreOutput(
                request_id=_ID, new_token_ids=[], kv_transfer_params={VIOLATION: found}
            )
            core.output_queue.put_nowait((0, EngineCoreOutputs(outputs=[output])))
        return result

    return ran
