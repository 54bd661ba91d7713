"""One submission to a decode worker and what becomes of it."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.router.generate import Finish, Sink
from services.router.held import Held
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, OffsetBroken, TokenLogprob
from splitwave.core.session import Submit

if TYPE_CHECKING:
    from services.router.session import Session


class Attempt:
    """One submission and what becomes of it."""

    __slots__ = (
        "_ended",
        "answered",
        "attempt_id",
        "grant_id",
        "handoff_bytes",
        "handoff_s",
        "held",
        "logprobs",
        "session",
        "sink",
    )

    def __init__(self, session: "Session", submit: Submit, held: Held, sink: Sink) -> None:
        self.attempt_id = submit.attempt_id
        self.grant_id = submit.grant_id
        self.logprobs = submit.sampling.logprobs is not None
        self.session = session
        self.held = held
        self.handoff_bytes, self.handoff_s = 0, 0.0
        """What its handoff has cost, once it was pulled."""
        self.sink: Sink | None = sink
        """None once nobody wants its tokens."""
        loop = asyncio.get_running_loop()
        # Errors are results here: nobody may be left to retrieve an exception.
        self.answered: asyncio.Future[ServingError | None] = loop.create_future()
        self._ended: asyncio.Future[ServingError | Finish] = loop.create_future()

    async def accepted(self) -> None:
        """Wait for the worker's answer. Raises why it refused."""
        try:
            error = await self.answered
        except BaseException:
            self.session.cancel(self)
            raise
        if error is not None:
            raise error

    async def finish(self) -> Finish:
        """Wait for its end. Raises what it failed with; cancels it if the caller is cancelled."""
        try:
            end = await self._ended
        finally:
            self.session.cancel(self)
        if isinstance(end, ServingError):
            raise end
        return end

    def answer(self, error: ServingError | None) -> None:
        """The worker has accepted it, or refused it with an error."""
        if not self.answered.done():
            self.answered.set_result(error)

    def end(self, end: ServingError | Finish) -> None:
        """It is over."""
        self.mute()
        if not self._ended.done():
            self._ended.set_result(end)

    def mute(self) -> bool:
        """Nobody wants further tokens. False if that was so before."""
        if self.sink is None:
            return False
        self.sink = None
        self.session.running -= 1
        return True

    def write(
        self, offset: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> bool:
        """Give tokens to the sink; False if it wants no more, or cannot take them."""
        assert self.sink is not None
        try:
            if not self.sink.write(offset, token_ids, logprobs):
                return True
            self.end(Finish(FinishReason.STOP))
        except OffsetBroken as error:
            self.end(broken(str(error)))
        except Exception as error:  # noqa: BLE001  # One request's text must not end the others'.
            self.end(ServingError(Reason.INTERNAL, f"the sink failed: {type(error).__name__}"))
        return False


def broken(message: str) -> ServingError:
    """What is said of a worker that sent what it must not."""
    return ServingError(Reason.INTERNAL, f"{message}: a worker broke the contract")
