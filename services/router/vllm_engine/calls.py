"""The Generate calls that Abort can end, by the id that their callers chose."""

import asyncio
import contextlib
from collections.abc import Iterator


class Call:
    """One call."""

    def __init__(self) -> None:
        self.aborted = False
        self._answer: asyncio.Future[None] | None = None

    def runs(self, answer: "asyncio.Future[None]") -> None:
        """From now on there is something to cancel."""
        self._answer = answer
        if self.aborted:
            answer.cancel()

    def abort(self) -> None:
        """End it, now or as soon as it runs."""
        self.aborted = True
        if self._answer is not None:
            self._answer.cancel()


class Calls:
    """All live calls. Two callers may have chosen the same id: an abort ends both."""

    def __init__(self) -> None:
        self._live: dict[str, set[Call]] = {}

    @contextlib.contextmanager
    def abortable(self, request_id: str) -> Iterator[Call]:
        """Let `abort` find a call until the block ends."""
        call = Call()
        same = self._live.setdefault(request_id, set())
        same.add(call)
        try:
            yield call
        finally:
            same.discard(call)
            if not same:
                del self._live[request_id]

    def abort(self, request_id: str) -> None:
        """End every call of an id; one that has ended already is no error."""
        for call in self._live.get(request_id, ()):
            call.abort()
