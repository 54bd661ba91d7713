"""Calls that reach the probe of an engine core, and through it those of its workers."""

from collections.abc import Callable, Sequence
from typing import Any  # vLLM's objects are untyped here

from splitwave.engine.vllm.probe import scheduling, working
from splitwave.engine.vllm.probe.breaks import OF_THE_SCHEDULER, Break
from splitwave.engine.vllm.switches import probing_wanted


def splitwave_probe_steps(core: Any, since: int) -> list[working.Row]:
    """The first worker's steps with a number above `since`. The first call starts the log."""
    _check_allowed()
    rows: list[working.Row] = core.collective_rpc("splitwave_worker_steps", args=(since,))[0]
    return rows


def splitwave_probe_memory(core: Any) -> dict[str, int]:
    """Bytes that the workers of this rank hold, by where; one process counts once."""
    _check_allowed()
    found: list[dict[str, int]] = core.collective_rpc("splitwave_worker_memory")
    return {where: sum(each[where] for each in found) for where in found[0]}


def splitwave_probe_walk(core: Any, plan: Sequence[int], needed: int) -> None:
    """Limit the next steps to these sizes, once `needed` requests run; an empty plan ends it."""
    _check_allowed()
    probe = _of(core)
    probe.stop_walk()
    if plan:
        probe.start_walk(plan, needed)


def splitwave_probe_walked(core: Any) -> tuple[list[int], int]:
    """Sizes that a walk has run so far, and how many of its steps are left."""
    _check_allowed()
    return _of(core).walked()


def splitwave_probe_break(core: Any, what: str, argument: float) -> None:
    """Break something."""
    _check_allowed()
    if what in OF_THE_SCHEDULER:
        _of(core).start_break(Break(what), argument)
    else:
        core.collective_rpc("splitwave_worker_break", args=(what, argument))


def splitwave_probe_mend(core: Any, what: str) -> None:
    """Take a break back."""
    _check_allowed()
    if what in OF_THE_SCHEDULER:
        _of(core).end_break(Break(what))
    else:
        core.collective_rpc("splitwave_worker_mend", args=(what,))


CALLS: tuple[Callable[..., Any], ...] = (
    splitwave_probe_steps,
    splitwave_probe_memory,
    splitwave_probe_walk,
    splitwave_probe_walked,
    splitwave_probe_break,
    splitwave_probe_mend,
)


def install() -> None:
    """Add the calls to EngineCore and to the workers of this process. Idempotent.

    Where probing is off they are there and refuse.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    for call in CALLS:
        setattr(EngineCore, call.__name__, call)
    Worker.splitwave_worker_steps = lambda worker, since: working.of(worker).rows(since)
    Worker.splitwave_worker_memory = working.memory
    Worker.splitwave_worker_break = lambda worker, what, argument: working.of(worker).start_break(
        Break(what), argument
    )
    Worker.splitwave_worker_mend = lambda worker, what: working.of(worker).end_break(Break(what))


def _check_allowed() -> None:
    if not probing_wanted():
        raise PermissionError("this engine was not started to be probed (SPLITWAVE_PROBE=1)")


def _of(core: Any) -> scheduling.CoreProbe:
    """The probe of a core, made when it is first asked for."""
    found = getattr(core, "splitwave_probe_state", None)
    if found is None:
        found = core.splitwave_probe_state = scheduling.CoreProbe(core)
    assert isinstance(found, scheduling.CoreProbe)
    return found
