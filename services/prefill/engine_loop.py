"""The one task that reads a group's steps and completes the calls that wait for them."""

import asyncio
import logging
from collections.abc import Callable

from splitwave.engine.port import Engine, EngineDied, EngineRequest, RequestOutput, StepOutputs
from splitwave.runtime.outbox import Outbox

log = logging.getLogger(__name__)

Done = Callable[[RequestOutput], None]


class EngineLoop:
    """Requests in, their one output each out. Nothing waits for the engine but this."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._outbox = Outbox()
        self._waiting: dict[str, Done] = {}
        self._stepped: set[int] = set()
        self.on_violations: Callable[[StepOutputs], None] | None = None
        """Told of each step that holds violations."""
        self.died: EngineDied | None = None
        self.progress_s = clock()
        """When the engine last showed that it works, or had nothing to do."""

    def submit(self, request: EngineRequest, done: Done) -> None:
        """Send a request; `done` is called with its output unless it is freed before."""
        if not self._waiting:
            self.progress_s = self._clock()
        self._waiting[request.engine_request_id] = done
        self._outbox.put(self._engine.submit, request)

    def free(self, engine_request_id: str) -> None:
        """Stop a request that runs and free what it holds or would hold."""
        self._waiting.pop(engine_request_id, None)
        self._outbox.put(self._engine.release, engine_request_id)

    def stalled(self, stall_s: float) -> bool:
        """True if there is work and the engine has not stepped for so long."""
        return bool(self._waiting) and self._clock() - self.progress_s > stall_s

    async def run(self) -> None:
        """Until the engine dies, which raises EngineDied."""
        sending = asyncio.create_task(self._outbox.run(), name="prefill: to the engine")
        reading = asyncio.create_task(self._read(), name="prefill: from the engine")
        try:
            await asyncio.wait({sending, reading}, return_when=asyncio.FIRST_COMPLETED)
            for task in (reading, sending):
                if task.done():
                    task.result()
        except EngineDied as died:
            self.died = died
            raise
        finally:
            sending.cancel()
            reading.cancel()
            await asyncio.gather(sending, reading, return_exceptions=True)

    async def _read(self) -> None:
        async for batch in self._engine.steps():
            self.progress_s = self._clock()
            for step in batch:
                if step.rank not in self._stepped:
                    self._stepped.add(step.rank)
                    log.info("first step", extra={"rank": step.rank})
                if step.violations and self.on_violations is not None:
                    self.on_violations(step)
                for output in step.outputs:
                    done = self._waiting.pop(output.engine_request_id, None)
                    if done is not None:
                        done(output)
        raise EngineDied("the engine closed while the worker ran")
