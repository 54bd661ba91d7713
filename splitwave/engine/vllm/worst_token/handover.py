"""Microbatch threads hand over within a bound, and an error in one of them ends both.

vLLM parks a microbatch's thread until the other one signals. One that has failed never does, and
the step would hang for ever: the waits are bounded here, and a failure wakes the other thread with
its cause.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any  # vLLM's microbatch contexts are untyped here

HANDOVER_TIMEOUT_S = 300.0
"""A kernel that is compiled at its first use may take minutes; a hang is forever."""
_MARK = "splitwave_handovers"


class MicrobatchFailed(RuntimeError):
    """The other microbatch of this step has failed; its error is the cause."""


class HandoverTimeout(RuntimeError):
    """The other microbatch has not handed over in time."""


class Handover(threading.Event):
    """An event that one thread waits on, of two that share their `failures`."""

    def __init__(self, failures: list[BaseException], timeout_s: float) -> None:
        super().__init__()
        self._failures = failures
        self._timeout_s = timeout_s

    def wait(self, timeout: float | None = None) -> bool:
        """Wait to be handed over to. Raises MicrobatchFailed or HandoverTimeout."""
        bound_s = self._timeout_s if timeout is None else timeout
        came = super().wait(bound_s)
        if self._failures:
            raise MicrobatchFailed("the other microbatch failed") from self._failures[0]
        if not came:
            raise HandoverTimeout(f"the other microbatch did not hand over within {bound_s:g} s")
        return True


def bounded(make: Callable[..., Any], timeout_s: float = HANDOVER_TIMEOUT_S) -> Callable[..., Any]:
    """Wrap vLLM's make_ubatch_contexts: the same contexts, whose waits are bounded."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        contexts = make(*args, **kwargs)
        failures: list[BaseException] = []
        events = [Handover(failures, timeout_s) for _ in contexts]
        for i, context in enumerate(contexts):
            context.cpu_wait_event = events[i]
            context.cpu_signal_event = events[(i + 1) % len(events)]
            context.splitwave_failures = failures
        return contexts

    return made


def told(leave: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap UBatchContext.__exit__: a failure is known to the other thread before it is woken."""

    @functools.wraps(leave)
    def left(self: Any, exc_type: Any, error: BaseException | None, traceback: Any) -> Any:
        failures = getattr(self, "splitwave_failures", None)
        if error is not None and failures is not None and not isinstance(error, MicrobatchFailed):
            failures.append(error)
        try:
            return leave(self, exc_type, error, traceback)
        except BaseException as late:
            if failures is not None:
                failures.append(late)
            self.cpu_signal_event.set()
            raise

    return left


def met(init: Callable[..., None], timeout_s: float = HANDOVER_TIMEOUT_S) -> Callable[..., None]:
    """Wrap UBatchRunner.__init__: threads that start together wait for each other within a bound.

    One that fails before it comes there (out of memory, a lost device) would be waited for for
    ever; as it is the others raise BrokenBarrierError.
    """

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.ready_barrier = threading.Barrier(self.ready_barrier.parties, timeout=timeout_s)

    return made


def plain_when_one_is_empty(agree: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap sync_cudagraph_and_dp_padding: a step that cannot be split replays the plain graph.

    vLLM would run it as eager microbatches. Every rank sees the same agreed numbers, so every rank
    asks again, and all agree on the plain graph of the same size.
    """

    @functools.wraps(agree)
    def agreed(*args: Any, **kwargs: Any) -> Any:
        found = agree(*args, **kwargs)
        desc = found[0]
        if desc.num_ubatches > 1 and not desc.cg_mode.value:
            return agree(*args, **(kwargs | {"allow_ubatching": False}))
        return found

    return agreed


def install() -> None:
    """Bound the waits of this process's microbatch threads, in captured and in eager steps.

    Idempotent: what is wrapped is marked.
    """
    from vllm.v1.worker import ubatching
    from vllm.v1.worker.gpu import ubatch_utils

    runner, context = ubatch_utils.UBatchRunner, ubatching.UBatchContext
    if getattr(runner, _MARK, False):
        return
    setattr(runner, _MARK, True)
    ubatch_utils.make_ubatch_contexts = bounded(ubatch_utils.make_ubatch_contexts)
    runner.__init__ = met(runner.__init__)
    context.__exit__ = told(context.__exit__)
