"""The engine port on vLLM's step-batched core client."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any  # vLLM's client and outputs are untyped here

from splitwave.core.errors import Reason
from splitwave.core.grant_reports import RankLoad
from splitwave.core.mode_guard import StepViolation
from splitwave.core.strict_json import Scalar
from splitwave.core.wave_record import WaveStatus
from splitwave.core.wave_segment import Link, SegmentKey, WaveSegment
from splitwave.engine.port import (
    EngineDied,
    EngineRequest,
    GroupDescription,
    RankCounters,
    RequestOutput,
    Role,
    StepOutputs,
)
from splitwave.engine.vllm.launch import Processes, or_death
from splitwave.engine.vllm.ledger import Admission, Ledger
from splitwave.engine.vllm.outputs import ends_pull, holds_blocks, translate
from splitwave.engine.vllm.requests import Preparation, RefusedRequest
from splitwave.engine.vllm.violations import violation_in

if TYPE_CHECKING:
    from splitwave.engine.vllm.coordinator import Coordinator

DEATH_WAIT_S = 1.0
GIVE_UP_S = 1.0
COUNTERS = frozenset(RankCounters.__dataclass_fields__) - {"rank"}


class VllmEngine:
    """One started group of vLLM engines; see `splitwave.engine.port.Engine`."""

    def __init__(self, *, client: Any, processes: Processes, description: GroupDescription) -> None:
        self._client = client
        self._processes = processes
        self._description = description
        self._prepare = Preparation(description, client.vllm_config.model_config)
        self._decodes = description.role is Role.DECODE
        self._ledger = Ledger(lease_ttl_s=max(1.0, description.lease_ttl_s), pulls=self._decodes)
        self._steps = [0] * description.ranks
        self._refused: list[tuple[int, RequestOutput]] = []
        self._violations: list[StepViolation] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._processes.died.add_done_callback(self._wake_for_death)

    @property
    def description(self) -> GroupDescription:
        """What was started."""
        return self._description

    @property
    def died(self) -> asyncio.Future[EngineDied]:
        """Resolved with the cause when the group ends; `close` is one."""
        return self._processes.died

    @property
    def process_ids(self) -> list[int]:
        """The processes that the group consists of."""
        return self._processes.pids()

    @property
    def coordinator(self) -> "Coordinator | None":
        """Of the group's waves; None for a single rank, and for ranks that do not step together."""
        return self._processes.coordinator

    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Hand requests to their ranks. Refusals come as outputs."""
        self._raise_if_dead()
        for request in requests:
            try:
                core_request = self._prepare(request)
            except RefusedRequest as refusal:
                self._refuse(request, refusal)
                continue
            admission = self._admit(request)
            if admission is Admission.REFUSE:
                await self._end_both(request)
                continue
            if admission is Admission.RUN_WITHOUT_HOLD:
                core_request.sampling_params.extra_args = None
            self._exemplify(request)
            await self._client.add_request_async(core_request)

    def _admit(self, request: EngineRequest) -> Admission:
        """Register a request's id."""
        return self._ledger.admit(
            request.engine_request_id,
            rank=request.rank,
            hold=request.hold,
            now_s=time.monotonic(),
        )

    async def _end_both(self, request: EngineRequest) -> None:
        """End a request whose id another one has, and that one too, since an id ends once."""
        name = request.engine_request_id
        self._refuse(request, RefusedRequest(Reason.INTERNAL, f"the id {name} is in use"))
        await (self.abort if self._decodes else self.release)([name])

    def _refuse(self, request: EngineRequest, refusal: RefusedRequest) -> None:
        """End a request before it reached an engine."""
        output = RequestOutput(
            engine_request_id=request.engine_request_id,
            token_ids=[],
            failure=refusal.reason,
            failure_message=str(refusal),
        )
        self._refused.append((max(0, min(request.rank, self._description.ranks - 1)), output))
        self._wake()

    async def abort(self, engine_request_ids: Sequence[str]) -> None:
        """Stop requests; unknown ids are ignored, and no output follows."""
        self._raise_if_dead()
        if live := self._ledger.aborted(engine_request_ids):
            await self._client.abort_requests_async(live)

    async def release(self, engine_request_ids: Sequence[str]) -> None:
        """Free what these requests hold, will hold or would hold; returns when it is done."""
        self._raise_if_dead()
        release = self._ledger.released(engine_request_ids, time.monotonic())
        if release.abort:
            await self._client.abort_requests_async(release.abort)
        calls = [
            self._call(rank, "splitwave_release", ids) for rank, ids in release.by_rank.items()
        ]
        if release.unknown:
            calls.append(self._call_all("splitwave_release", release.unknown))
        if calls:
            await or_death(asyncio.gather(*calls), self.died)

    async def _call(self, rank: int, method: str, *args: object) -> Any:
        """Call a method of one rank's engine core."""
        engine = self._client.core_engines[rank]
        return await self._client._call_utility_async(  # noqa: SLF001  # vLLM has no public call of one rank
            method, *args, engine=engine
        )

    async def _call_all(self, method: str, *args: object) -> list[Any]:
        """Call a method of all engine cores at once; results are in rank order."""
        results: list[Any] = await self._client.call_utility_all_async(method, *args)
        return results

    async def steps(self) -> AsyncIterator[Sequence[StepOutputs]]:
        """Yield outputs as they come; all that is ready at once comes together."""
        queue = self._client.outputs_queue
        while True:
            batches = [await queue.get()]
            while not queue.empty():
                batches.append(queue.get_nowait())
            if self._closed:
                return
            steps = self._collect(batches)
            if steps:
                yield steps
            if self.died.done() or any(isinstance(batch, Exception) for batch in batches):
                raise await self._cause()

    def _collect(self, batches: Iterable[Any]) -> list[StepOutputs]:
        """Translate batches of engine outputs, and add the refusals that wait."""
        steps = []
        for batch in batches:
            if isinstance(batch, Exception):
                continue
            wanted, pulls_ended = self._outputs(batch)
            violations, self._violations = self._violations, []
            if wanted or pulls_ended or violations:
                step = self._step(batch.engine_index, batch.timestamp, wanted)
                step.pulls_ended, step.violations = pulls_ended, violations
                steps.append(step)
        refused, self._refused = self._refused, []
        steps += [self._step(rank, time.monotonic(), [output]) for rank, output in refused]
        return steps

    def _step(self, rank: int, at_s: float, outputs: list[RequestOutput]) -> StepOutputs:
        """Number one batch of a rank."""
        self._steps[rank] += 1
        return StepOutputs(rank=rank, step=self._steps[rank], at_s=at_s, outputs=outputs)

    def _outputs(self, batch: Any) -> tuple[list[RequestOutput], list[str]]:
        """Translate what is still wanted, and name the aborted requests whose pull has ended."""
        wanted: list[RequestOutput] = []
        pulls_ended: list[str] = []
        for output in batch.outputs:
            name = output.request_id
            running = self._ledger.running(name)
            if running is None:
                self._unwanted(batch.engine_index, output, pulls_ended)
                continue
            running.started = True
            ours = translate(output, hold=running.hold, pulls=self._decodes)
            wanted.append(ours)
            if ours.held is not None:
                self._ledger.held(name, ours.held.expires_at_s)
            elif output.finish_reason is not None:
                self._ledger.ended(name)
                self._release_if_held(batch.engine_index, output)
        return wanted, pulls_ended

    def _unwanted(self, rank: int, output: Any, pulls_ended: list[str]) -> None:
        """Take what still matters from the output of no request, or of one that was given up."""
        if (violation := violation_in(output, rank)) is not None:
            self._violations.append(violation)
            return
        if self._decodes:
            if ends_pull(output) and self._ledger.pull_ended(output.request_id):
                pulls_ended.append(output.request_id)
        elif output.finish_reason is not None:
            self._release_if_held(rank, output)

    def _release_if_held(self, rank: int, output: Any) -> None:
        """Release what a prefill engine holds for a request that nobody will hand over."""
        if not self._decodes and holds_blocks(output):
            self._release_late(rank, output.request_id)

    def _release_late(self, rank: int, request_id: str) -> None:
        """Free what an engine holds for a request that ended as, or after, we gave it up."""
        task = asyncio.create_task(self._call_released(rank, request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call_released(self, rank: int, request_id: str) -> None:
        """Release one request, unless the group dies first."""
        try:
            await or_death(self._call(rank, "splitwave_release", [request_id]), self.died)
        except EngineDied:
            return

    def _wake(self) -> None:
        """Make `steps` look around: an empty batch is a nudge."""
        from vllm.v1.engine import EngineCoreOutputs

        self._client.outputs_queue.put_nowait(EngineCoreOutputs())

    def _wake_for_death(self, _: object) -> None:
        """Let calls on the client fail from now on, and `steps` end."""
        self._client.resources.engine_dead = True
        self._wake()

    def _raise_if_dead(self) -> None:
        """Raise why the group has ended, if it has."""
        if self.died.done():
            raise self.died.result()

    async def _cause(self) -> EngineDied:
        """Return why the group died; a core reports its death just before its process ends."""
        await asyncio.wait({self.died}, timeout=DEATH_WAIT_S)
        if self.died.done():
            return self.died.result()
        return EngineDied("an engine core reported that it failed, and its process still runs")

    async def call_rank(self, rank: int, method: str, *args: object) -> Any:  # as it answers
        """Call a method of one rank's engine core; EngineDied if the group ends meanwhile."""
        self._raise_if_dead()
        return await or_death(self._call(rank, method, *args), self.died)

    async def call_ranks(self, method: str, *args: object) -> list[Any]:  # as they answer
        """The same of all ranks at once; answers are in rank order."""
        self._raise_if_dead()
        answers: list[Any] = await or_death(self._call_all(method, *args), self.died)
        return answers

    async def counters(self) -> Sequence[RankCounters]:
        """Counts of every rank, from the engine cores themselves."""
        self._raise_if_dead()
        counted: list[Mapping[str, Any]] = await or_death(
            self._call_all("splitwave_counters"), self.died
        )
        return [
            RankCounters(rank=rank, **{name: counts[name] for name in COUNTERS if name in counts})
            for rank, counts in enumerate(counted)
        ]

    async def fingerprint_facts(self) -> Sequence[Mapping[str, Scalar]]:
        """What each engine core says of itself, from its own process."""
        self._raise_if_dead()
        facts: list[Mapping[str, Scalar]] = await or_death(
            self._call_all("splitwave_fingerprint"), self.died
        )
        return facts

    def loads(self) -> Sequence[RankLoad]:
        """What each rank last said that it holds; none without a wave coordinator."""
        coordinator = self._processes.coordinator
        if coordinator is None:
            return ()
        return coordinator.record.rank_loads(self._description.blocks_per_rank)

    def waves(self) -> WaveStatus | None:
        """The waves of its ranks; None if they do not step together."""
        coordinator = self._processes.coordinator
        return None if coordinator is None else coordinator.status()

    def wave_segments(self) -> list[WaveSegment]:
        """Segments of its waves that have ended since the last call."""
        coordinator = self._processes.coordinator
        if coordinator is None:
            return []
        ended = list(coordinator.ended_segments)
        coordinator.ended_segments.clear()
        return ended

    def note_work(self, request: Link, since_s: float, until_s: float) -> Sequence[SegmentKey]:
        """A traced request was worked on meanwhile; returns its first and last wave segment."""
        coordinator = self._processes.coordinator
        if coordinator is None:
            return ()
        return coordinator.segments.note_work(request, since_s, until_s)

    def _exemplify(self, request: EngineRequest) -> None:
        """Tell the waves of a request that is traced."""
        coordinator = self._processes.coordinator
        link = Link.sampled((request.trace_headers or {}).get("traceparent", ""))
        if coordinator is not None and link is not None:
            coordinator.segments.note_request(link)

    async def _give_up_leases(self) -> None:
        """Release all that is held: an engine that is told to stop first waits for its leases."""
        if self.died.done():
            return
        calls = [
            self._call(rank, "splitwave_release", ids)
            for rank, ids in self._ledger.holding().items()
        ]
        if calls:
            with contextlib.suppress(EngineDied, TimeoutError):
                async with asyncio.timeout(GIVE_UP_S):
                    await or_death(asyncio.gather(*calls), self.died)

    async def close(self) -> None:
        """Stop all processes of the group. Idempotent; bounded in time."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await self._give_up_leases()
        self._wake()
        await self._processes.close()
        self._client.shutdown()
