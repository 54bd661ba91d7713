"""Two ends of one call, each in a task of its own: what ends the call, and how it is told."""

import asyncio
from collections.abc import Callable, Coroutine

STATUS_WAIT_S = 0.1
"""A write that meets a call's end says only that it has ended; the reader then has its status."""


async def first_end(
    read: Coroutine[None, None, None],
    write: Coroutine[None, None, None],
    *others: Coroutine[None, None, None],
    ended: Callable[[], bool],
) -> None:
    """Run all until one ends, and raise how; the reader is asked first, for it knows the status.

    `ended` is called at once and says whether the reader's status is worth a short wait.

    No TaskGroup: in Python 3.11 it drops a cancellation that meets an error of its tasks, and then
    nothing stops the caller any more.
    """
    reading, writing, *rest = tasks = [asyncio.create_task(end) for end in (read, write, *others)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if ended() and writing.done():
            await asyncio.wait((reading,), timeout=STATUS_WAIT_S)
        first = next(task for task in (reading, writing, *rest) if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    first.result()
