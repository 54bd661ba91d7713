"""An event loop whose clock jumps to the next timer instead of waiting for it.

Hours of protocol time run in seconds, and the same seed gives the same run. A
deadlock is an exception that names every waiting task, not a hang. Time is all
that is replaced: code under test must not use threads, sockets or processes.
"""

import asyncio
import gc
import random
import selectors
from collections.abc import Coroutine, Iterator
from pathlib import PurePath
from types import FrameType
from typing import Any, TypeVar  # Any: as asyncio types a coroutine's yields

T = TypeVar("T")

RUN_MAX_S = 3_600.0


class Deadlock(Exception):
    """Nothing can happen any more, or nothing has come of it for too long: a bug in what ran.

    Either every task waits and no timer is due, or the virtual clock passed the
    limit of the run because periodic timers hide that everything else waits.
    """


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0.0 s; `rng` is the seeded source for whatever a scenario leaves to chance."""

    def __init__(self, seed: int = 0, *, run_max_s: float = RUN_MAX_S) -> None:
        self.now_s = 0.0
        self.rng = random.Random(seed)
        self.run_max_s = run_max_s
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self.now_s


class _JumpingSelector(selectors.DefaultSelector):
    """Where asyncio would wait for I/O, moves the clock instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._virtual_loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        loop = self._virtual_loop
        if timeout is None:
            raise Deadlock(_describe(loop, "every task waits and no timer is due"))
        loop.now_s += max(0.0, timeout)
        if loop.now_s > loop.run_max_s:
            limit_s = loop.run_max_s
            loop.run_max_s += limit_s  # The tasks still have to be cancelled.
            raise Deadlock(_describe(loop, f"the run passed its limit of {limit_s:g} s"))
        return ready


def run(
    main: Coroutine[Any, Any, T],
    seed: int = 0,
    *,
    run_max_s: float = RUN_MAX_S,
) -> T:
    """Run `main` to its end in virtual time; a failure carries its seed as a note.

    The module-level `random` is seeded too, for code that draws from it.
    """
    random.seed(seed)
    try:
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed, run_max_s=run_max_s)) as runner:
            return runner.run(main)
    except BaseException as error:
        error.add_note(f"virtual-time seed: {seed}")
        raise


def _describe(loop: VirtualLoop, what: str) -> str:
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    lines = [f"  {task.get_name()}: {' > '.join(_places(task))}" for task in tasks]
    return "\n".join([f"{what} at {loop.now_s:g} s; waiting:", *lines])


def _places(task: asyncio.Task[object]) -> Iterator[str]:
    """Where a task waits, from its outermost await to its innermost."""
    waiting: object = task.get_coro()
    while waiting is not None:
        # Coroutines and async generators name the same two things differently.
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "ag_frame", None)
        if isinstance(frame, FrameType):
            path = PurePath(frame.f_code.co_filename)
            yield f"{frame.f_code.co_qualname} ({path.name}:{frame.f_lineno})"
        waiting = _inner(waiting)


def _inner(waiting: object) -> object:
    """What a coroutine or generator awaits, or None.

    The step of an async generator does not name its generator; the collector knows it.
    """
    if type(waiting).__name__.startswith("async_generator_"):
        return next((x for x in gc.get_referents(waiting) if hasattr(x, "ag_frame")), None)
    return getattr(waiting, "cr_await", None) or getattr(waiting, "ag_await", None)
