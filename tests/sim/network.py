"""A network in memory: the router's production code on the workers', in virtual time.

Messages take time, keep their order on a connection, and go through the production
translation to proto and back. Whoever holds the network can reset connections, kill
and restart workers, and lose calls. It asserts I2 and I6 where they could break:

  I2  the router never releases a handoff that a decode worker has accepted
  I6  a prefill continues its prompt with exactly the tokens that its client has
"""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from services.decode.config import DecodeConfig
from services.decode.worker import DecodeWorker
from services.prefill.config import PrefillConfig
from services.prefill.worker import PrefillWorker
from services.router.attempts import Unreached
from services.router.fleet import Network
from services.router.peer import Received
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.handoff import Handoff
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.session import Ack, Hello, RouterMessage, Welcome, WorkerMessage
from splitwave.core.worker import WorkerDescription, WorkerLoad
from splitwave.engine.port import EngineDied
from splitwave.engine.sim import SimEngine, SimFabric, SimSettings, start_sim_group
from splitwave.runtime.watch import watch
from splitwave.v1alpha1 import decode_service_pb2 as pb
from splitwave.wire.batch import (
    responses_in,
    router_messages_to_proto,
    worker_messages_to_proto,
)
from splitwave.wire.prefill import (
    prefill_call_from_proto,
    prefill_call_to_proto,
    prefill_result_from_proto,
    prefill_result_to_proto,
)
from splitwave.wire.session import (
    FromRouter,
    RouterMessages,
    worker_message_from_proto,
)
from tests.sim.weather import Pipe, Weather, lost, now_s
from tests.unit.traced import NO_TRACES, Traces


class Connection:
    """One call of Session, with both of its ends."""

    def __init__(self, worker: DecodeWorker, weather: Weather) -> None:
        self._up: Pipe[object] = Pipe(weather)
        self._down: Pipe[object] = Pipe(weather)
        self._came: deque[pb.SessionResponse] = deque()
        self._worker = worker
        self.error: ServingError | None = None
        self.serving = asyncio.create_task(self._serve(), name="network: session")

    async def _serve(self) -> None:
        async def write(messages: Sequence[tuple[int, WorkerMessage | Welcome | Ack]]) -> None:
            for response in worker_messages_to_proto(messages):
                self._down.put(response)
                await asyncio.sleep(0)

        try:
            await self._worker.session(self._incoming(), write)
        except ServingError as error:
            self.error = error
        # What was written before the status still arrives.
        await asyncio.sleep(1.0)
        self._down.end(lose=False)

    async def _incoming(self) -> AsyncIterator[tuple[int, FromRouter]]:
        reader = RouterMessages()
        while (request := await self._up.get()) is not None:
            for message in reader.read(request):  # type: ignore[arg-type]  # what `send` put there
                yield message

    def reset(self) -> None:
        """Break it: both ends see that it is gone, and messages on their way are lost."""
        self.error = self.error or lost("connection reset")
        self._up.end()
        self._down.end()
        self.serving.cancel()

    def hang(self) -> None:
        """The worker's process hangs: nothing is read or sent, and the connection stands."""
        self._up.hole = self._down.hole = True

    async def send(self, messages: Sequence[tuple[int, RouterMessage | Hello | Ack]]) -> None:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        for request in router_messages_to_proto(messages):
            self._up.put(request)

    async def receive(self) -> Received | None:
        if not self._came:
            response = await self._down.get()
            if response is None:
                if self.error is not None:
                    raise self.error
                return None
            self._came.extend(responses_in(response))  # type: ignore[arg-type]  # what `write` put there
        came = self._came.popleft()
        return Received(came.number, functools.partial(worker_message_from_proto, came))


class DecodeNode:
    """A host of a decode worker, which can be killed and started again."""

    def __init__(self, address: str, network: "SimNetwork", settings: SimSettings) -> None:
        self.address, self.settings = address, settings
        self.worker: DecodeWorker | None = None
        self.engine: SimEngine | None = None
        self.connections: set[Connection] = set()
        self.options: dict[str, float] = {}
        self._network = network
        self._running: asyncio.Task[None] | None = None
        self.hung = False

    def hang(self) -> None:
        """Its process stands still; its host keeps its connections."""
        self.hung = True
        for connection in self.connections:
            connection.hang()

    async def start(self) -> None:
        """Start an engine group and its worker, at the next epoch."""
        self.settings = replace(self.settings, epoch=self.settings.epoch + 1)
        self.engine = await start_sim_group(self.settings, self._network.fabric)
        config = DecodeConfig(engine="sim", worker_id=self.address, **self.options)  # type: ignore[arg-type]  # numbers
        traces = self._network.traces.decode
        self.worker = DecodeWorker(self.engine, self._network, config, now_s, traces)
        self._running = asyncio.create_task(self._run(self.worker), name=f"{self.address} worker")

    async def _run(self, worker: DecodeWorker) -> None:
        with contextlib.suppress(EngineDied):
            await worker.run()

    def reset(self) -> None:
        """Break every connection of its sessions."""
        for connection in list(self.connections):
            connection.reset()

    async def kill(self) -> None:
        """The process ends, with everything in it."""
        if self.worker is None or self.engine is None or self._running is None:
            return
        self.worker = None
        self.reset()
        self._running.cancel()
        await self.engine.close()


class PrefillNode:
    """A host of a prefill worker, which can be killed and started again."""

    def __init__(self, address: str, network: "SimNetwork", settings: SimSettings) -> None:
        self.address, self.settings = address, settings
        self.worker: PrefillWorker | None = None
        self.engine: SimEngine | None = None
        self.calls: set[asyncio.Task[PrefillResult]] = set()
        self.watches: set[Pipe[tuple[int, WorkerLoad]]] = set()
        self._network = network
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start an engine group and its worker, at the next epoch."""
        self.settings = replace(self.settings, epoch=self.settings.epoch + 1)
        self.engine = await start_sim_group(self.settings, self._network.fabric)
        config = PrefillConfig(engine="sim", worker_id=self.address)
        self.worker = PrefillWorker(self.engine, config, now_s, self._network.traces.prefill)
        self.worker.listen_at(self.address)
        self._running = asyncio.create_task(self._run(self.worker), name=f"{self.address} worker")

    async def _run(self, worker: PrefillWorker) -> None:
        with contextlib.suppress(EngineDied):
            await worker.run()

    async def kill(self) -> None:
        """The process ends, with everything in it."""
        if self.worker is None or self.engine is None or self._running is None:
            return
        self.worker = None
        for call in list(self.calls):
            call.cancel()
        for pipe in list(self.watches):
            pipe.end()
        self._running.cancel()
        await self.engine.close()


class PrefillTransport:
    """The router's way to one prefill worker."""

    def __init__(self, node: PrefillNode, network: "SimNetwork") -> None:
        self._node, self._network = node, network

    def _there(self) -> PrefillWorker:
        if self._node.worker is None:
            raise Unreached(f"{self._node.address} does not answer")
        return self._node.worker

    async def describe(self, timeout_s: float) -> WorkerDescription:
        await self._network.weather.carry()
        return await self._there().describe(counters=False)

    async def watch(self, router_id: str) -> AsyncIterator[tuple[int, WorkerLoad]]:
        worker = self._there()
        pipe: Pipe[tuple[int, WorkerLoad]] = Pipe(self._network.weather)
        self._node.watches.add(pipe)

        async def write(item: tuple[int, WorkerLoad]) -> None:
            pipe.put(item)

        writing = asyncio.create_task(watch(lambda: (worker.group.epoch, worker.load()), write))
        writing.add_done_callback(lambda _: pipe.end())
        try:
            while (item := await pipe.get()) is not None:
                yield item
            raise lost("watch reset")
        finally:
            self._node.watches.discard(pipe)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def prefill(self, call: PrefillCall, timeout_s: float) -> PrefillResult:
        self._network.check_resume(call)
        weather = self._network.weather
        arrived = prefill_call_from_proto(prefill_call_to_proto(call), call.traceparent)
        try:
            async with asyncio.timeout(timeout_s):
                await weather.carry(weather.call_lost_rate / 2)
                result = await self._serve(arrived, timeout_s)
                await weather.carry(weather.call_lost_rate / 2)
        except TimeoutError:
            raise ServingError(Reason.DEADLINE_EXCEEDED, "the call's time is over") from None
        result = prefill_result_from_proto(prefill_result_to_proto(result))
        return self._network.on_prefilled(result)

    async def _serve(self, call: PrefillCall, timeout_s: float) -> PrefillResult:
        """The call at the worker: it goes on until the word of a cancel arrives there."""
        serving = asyncio.create_task(self._there().prefill(call, Deadline(now_s() + timeout_s)))
        self._node.calls.add(serving)
        serving.add_done_callback(self._node.calls.discard)
        try:
            return await asyncio.shield(serving)
        except asyncio.CancelledError:
            if serving.cancelled():
                raise lost("the worker ended during the call") from None
            delay_s = self._network.weather.delay_s()
            asyncio.get_running_loop().call_later(delay_s, serving.cancel)
            serving.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise

    async def release(self, handoff_id: str, timeout_s: float) -> None:
        self._network.check_release(handoff_id)
        await self._network.weather.carry(self._network.weather.release_lost_rate)
        self._there().release(handoff_id)

    async def close(self) -> None: ...


class SimNetwork:
    """Nodes, the way between them, and what is asserted on it."""

    def __init__(self, weather: Weather, traces: Traces = NO_TRACES) -> None:
        self.weather = weather
        self.traces = traces
        self.fabric = SimFabric()
        self.decode: dict[str, DecodeNode] = {}
        self.prefill: dict[str, PrefillNode] = {}
        self.prefills = 0
        self.on_prefilled: Callable[[PrefillResult], PrefillResult] = lambda result: result
        self.shown: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
        """By request id: the prompt, and the tokens that its client has."""

    def as_network(self) -> Network:
        """What the router's fleet takes."""
        return Network(
            dial_decode=self._dial,
            connect_prefill=lambda address: PrefillTransport(self.prefill[address], self),
        )

    @contextlib.asynccontextmanager
    async def _dial(self, address: str) -> AsyncIterator[Connection]:
        await self.weather.carry()
        node = self.decode[address]
        if node.worker is None:
            raise lost(f"{address} does not answer")
        connection = Connection(node.worker, self.weather)
        if node.hung:
            connection.hang()
        node.connections.add(connection)
        try:
            yield connection
        finally:
            node.connections.discard(connection)
            connection.reset()

    # What decode workers ask of prefill workers.

    async def confirm(self, handoff: Handoff, traceparent: str = "") -> float:
        """See services.decode.peers.Peers."""
        await self.weather.carry(self.weather.confirm_lost_rate / 2)
        holder = self._holder(handoff)
        left_s = holder.confirm(handoff.handoff_id, handoff.epoch, traceparent)
        await self.weather.carry(self.weather.confirm_lost_rate / 2)
        return left_s

    async def release(self, handoff: Handoff, traceparent: str = "") -> None:
        """See services.decode.peers.Peers."""
        await self.weather.carry(self.weather.release_lost_rate)
        self._holder(handoff).release(handoff.handoff_id, traceparent)

    def _holder(self, handoff: Handoff) -> PrefillWorker:
        worker = self.prefill[handoff.prefill_address].worker
        if worker is None:
            raise lost(f"{handoff.prefill_address} does not answer")
        return worker

    # Invariants.

    def check_release(self, handoff_id: str) -> None:
        """I2: what the router releases, no decode worker has accepted."""
        for node in self.decode.values():
            for session in node.worker.sessions.by_id.values() if node.worker else ():
                for attempt in session.attempts.values():
                    assert attempt.submit.handoff.handoff_id != handoff_id, f"I2: {handoff_id}"

    def check_resume(self, call: PrefillCall) -> None:
        """I6: a prefill continues its prompt with exactly what its client has."""
        self.prefills += 1
        prompt, shown = self.shown.get(call.request_id, (call.token_ids, ()))
        assert list(call.token_ids) == [*prompt, *shown], f"I6: {call.request_id}"
