"""What a worker does with an engine, reduced to what tests of an engine need."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from splitwave.core.errors import Reason
from splitwave.core.generation import FinishReason, Sampling, TokenLogprob
from splitwave.engine.port import Engine, EngineRequest, Held, Pull, Pulled, StepOutputs


@dataclass(slots=True)
class Got:
    """All outputs of one engine request so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    failure: Reason | None = None
    message: str = ""
    held: Held | None = None
    pulled: list[Pulled] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Client:
    """Reads an engine's batches and sorts their outputs by request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.batches: list[StepOutputs] = []
        self.pulls_ended: list[str] = []
        self._got: dict[str, Got] = {}

    def got(self, request_id: str) -> Got:
        """What came for a request; empty if nothing has."""
        return self._got.setdefault(request_id, Got())

    async def ended(self, request_id: str) -> Got:
        """Wait for a request's last output."""
        got = self.got(request_id)
        await got.ended.wait()
        return got

    async def submit(
        self, request_id: str, token_ids: Sequence[int], sampling: Sampling, **more: object
    ) -> None:
        """Submit one request to rank 0, or to `more["rank"]`."""
        fields = {"rank": 0, **more}
        request = EngineRequest(
            engine_request_id=request_id,
            token_ids=token_ids,
            sampling=sampling,
            **fields,  # type: ignore[arg-type]  # the fields of EngineRequest, named by the test
        )
        await self.engine.submit([request])

    async def prefill(
        self, request_id: str, token_ids: Sequence[int], sampling: Sampling, *, rank: int = 0
    ) -> Got:
        """Prefill and hold; returns the one sampled token and what is held."""
        await self.submit(request_id, token_ids, sampling, hold=True, rank=rank)
        return await self.ended(request_id)

    async def read(self) -> None:
        """Read until the engine is closed."""
        async for batches in self.engine.steps():
            self.batches += batches
            for batch in batches:
                self.pulls_ended += batch.pulls_ended
                for output in batch.outputs:
                    got = self.got(output.engine_request_id)
                    assert not got.ended.is_set(), "an output came after the last"
                    got.token_ids += output.token_ids
                    got.logprobs += output.logprobs or []
                    got.held = output.held or got.held
                    got.finish, got.failure = output.finish, output.failure
                    got.stop_token_id, got.message = output.stop_token_id, output.failure_message
                    got.pulled += [output.pulled] if output.pulled else []
                    if output.finish or output.failure:
                        got.ended.set()


@contextlib.asynccontextmanager
async def reading(engine: Engine) -> AsyncIterator[Client]:
    """A client that reads `engine` in the background; the engine is closed at the end."""
    client = Client(engine)
    reader = asyncio.create_task(client.read(), name="reads the engine")
    try:
        yield client
    finally:
        await engine.close()
        await reader


def pull_of(got: Got) -> Pull:
    """The pull that fetches what a prefill holds."""
    assert got.held is not None
    return Pull(
        handoff_id="any",
        remote_tokens=got.held.remote_tokens,
        connector_params=got.held.connector_params,
    )
