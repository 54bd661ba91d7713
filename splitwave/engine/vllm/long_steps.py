"""The fault `long_steps`: a step with a long prompt in it computes for STEP_S, as on a slow CPU."""

import functools
import time
from collections.abc import Callable
from typing import Any  # vLLM's objects are untyped here

FROM_TOKENS = 256
"""The tokens in a step from which on it is a long one."""
STEP_S = 5.0
_MARK = "splitwave_long_steps"


def install() -> None:
    """Lengthen the steps of this process's worker. Idempotent."""
    from vllm.v1.worker.gpu_worker import Worker

    if getattr(Worker, _MARK, False):
        return
    setattr(Worker, _MARK, True)
    Worker.execute_model = _lengthened(Worker.execute_model)


def _lengthened(execute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    import torch

    @functools.wraps(execute)
    def executed(self: Any, scheduler_output: Any) -> Any:  # vLLM's Worker and what it returns
        until_s = time.monotonic() + STEP_S
        result = execute(self, scheduler_output)
        if scheduler_output.total_num_scheduled_tokens >= FROM_TOKENS:
            # It computes and does not sleep: other threads then run as beside a real step.
            rows = torch.ones(256, 256)
            while time.monotonic() < until_s:
                torch.mm(rows, rows)
        return result

    return executed
