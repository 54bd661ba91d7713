"""What is shown of one answer, between the loop that makes it and the task that sends it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any  # asyncio itself types what a coroutine yields so

from services.router.order import Ending
from services.router.sink import Part
from splitwave.core.generation import TokenLogprob


@dataclass(slots=True)
class News:
    """What has come of one choice since the last look."""

    prompt: Sequence[TokenLogprob] = ()
    parts: list[Part] = field(default_factory=list)
    ending: Ending | None = None


class Parts:
    """Collects what is shown; whoever sends takes all that has come since.

    Bounded by the completions' lengths: a sender that waits for its client finds one
    larger message a choice later, never a queue of small ones.
    """

    def __init__(self) -> None:
        self._news: dict[int, News] = {}
        self._changed = asyncio.Event()
        self._ended = False

    def prompt(self, choice: int, rows: Sequence[TokenLogprob]) -> None:
        """Add log probabilities of the prompt."""
        self._of(choice).prompt = rows

    def part(self, choice: int, part: Part) -> None:
        """Add a part."""
        self._of(choice).parts.append(part)

    def end(self, choice: int, ending: Ending) -> None:
        """Add the end of a choice."""
        self._of(choice).ending = ending

    async def came(self) -> bool:
        """Wait for news; False once all were taken and no more will come."""
        while not self._news and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        return bool(self._news)

    def take(self) -> dict[int, News]:
        """All that has come, by choice."""
        news, self._news = self._news, {}
        return news

    @contextlib.asynccontextmanager
    async def filled_by(
        self, answer: Coroutine[Any, Any, None]
    ) -> AsyncIterator[asyncio.Task[None]]:
        """Run what shows itself here; leaving the block cancels it and waits for its end."""
        task = asyncio.get_running_loop().create_task(answer)
        task.add_done_callback(self._end)
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _of(self, choice: int) -> News:
        self._changed.set()
        return self._news.setdefault(choice, News())

    def _end(self, _: asyncio.Task[None]) -> None:
        self._ended = True
        self._changed.set()
