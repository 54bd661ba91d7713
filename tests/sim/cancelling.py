"""Cancel a coroutine at a chosen one of its awaits, without checkpoints in what runs."""

import asyncio
import enum
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar  # Any: asyncio itself types what a coroutine yields so

T = TypeVar("T")


class When(enum.Enum):
    """Where in an await the cancel strikes."""

    BEGIN = "as the wait begins"
    END = "as what was waited for is there, but not yet seen"


class CancelledAt(Generic[T]):
    """Awaits a coroutine and cancels the awaiting task at its k-th real wait, counted from 1."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], k: int, when: When) -> None:
        self._coroutine, self._k, self._when = coroutine, k, when
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, T]:
        task = asyncio.current_task()
        assert task is not None
        step = self._coroutine.send
        value: Any = None
        while True:
            try:
                waited_for = step(value)
            except StopIteration as done:
                result: T = done.value
                return result
            self.waits += 1
            if self.waits == self._k:
                self._strike(task, waited_for)
            try:
                value = yield waited_for
                step = self._coroutine.send
            except BaseException as error:  # noqa: BLE001  # handed on to where it belongs
                value, step = error, self._coroutine.throw

    def _strike(self, task: "asyncio.Task[Any]", waited_for: Any) -> None:
        if self._when is When.END and isinstance(waited_for, asyncio.Future):
            # Added before the task's own, so it comes first: the result is there, and lost.
            waited_for.add_done_callback(lambda _: task.cancel())
        else:
            asyncio.get_running_loop().call_soon(task.cancel)
