"""NIXL without its progress thread, which spins on one core an engine, idle or not.

vLLM has no option for it. Without the thread a transfer advances when an engine polls it: the
reading side, which does so every millisecond while it reads, and the side that is read. That one
must not fall asleep: a pull from an idle prefill engine would stand still until its next request.
So an idle prefill engine takes an empty step, without a forward, every POLL_S; and while a step
computes, a thread polls as often (`polling.py`).
Meant for machines with few cores.
"""

import functools
from collections.abc import Callable
from typing import Any  # vLLM's objects are untyped here

from splitwave.engine.vllm.switches import nixl_progress_thread_wanted

POLL_S = 0.05
"""Longest time that a pull stands still. A poll costs some tenths of a millisecond."""

_MARK = "splitwave_installed"


def install() -> None:
    """Replace NIXL's progress thread by polling, if the environment says so. Idempotent."""
    if nixl_progress_thread_wanted():
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from vllm.v1.engine.core import EngineCoreProc

    if getattr(EngineCoreProc, _MARK, False):
        return
    setattr(EngineCoreProc, _MARK, True)
    if base_worker.nixl_agent_config is not None:
        base_worker.nixl_agent_config = functools.partial(
            base_worker.nixl_agent_config, enable_prog_thread=False
        )
    notify = EngineCoreProc._notify_idle_state_callbacks  # noqa: SLF001  # there is no public hook
    EngineCoreProc._notify_idle_state_callbacks = _then_nap(notify)  # noqa: SLF001  # likewise


def _then_nap(notify: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wait for input here for at most POLL_S; vLLM's own wait comes next and would not end."""
    from vllm.v1.engine import EngineCoreRequestType

    @functools.wraps(notify)
    def notified(core: Any) -> None:
        notify(core)
        connector = core.scheduler.get_kv_connector()
        if connector is None or not connector.handoffs.polls:
            return
        inputs = core.input_queue
        with inputs.not_empty:
            if not inputs.queue:
                inputs.not_empty.wait(POLL_S)
        if inputs.empty():
            inputs.put_nowait((EngineCoreRequestType.WAKEUP, None))

    return notified
