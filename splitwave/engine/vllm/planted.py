"""The fault `out_of_mode_step`: one step that runs in another way than the mode has it."""

import functools
import os
from collections.abc import Mapping
from typing import Any  # vLLM's objects are untyped here

from splitwave.engine.vllm.switches import RESTARTS, Fault, fault

AT_STEP = 20
"""Which of a rank's steps with work: requests run, and most have more to come."""
PLANTED = "planted"


class PlantedStep:
    """Makes one step of this process's worker an odd one, if a test asked for it."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        is_first_life = environ.get(RESTARTS, "0") == "0"
        self._left = AT_STEP if fault(Fault.OUT_OF_MODE_STEP, environ) and is_first_life else 0
        self._is_now = False

    def begin(self, tokens: int) -> None:
        """A step begins, with so many tokens of requests."""
        self._is_now = self._left == 1 and tokens > 0
        if self._left and tokens > 0:
            self._left -= 1

    def act(self, context: Any, *, is_compiled: bool) -> str | None:
        """Pass compiled code and graphs by in this forward; or the kind to count it as."""
        if not self._is_now:
            return None
        if not is_compiled:
            return PLANTED
        context.skip_compiled = True
        context.cudagraph_runtime_mode = type(context.cudagraph_runtime_mode).NONE
        return None


@functools.cache
def planted() -> PlantedStep:
    """This process's; made at its first step, when the environment is that of its group."""
    return PlantedStep()
