"""The engine port on vLLM's step-batched core client."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any  # vLLM's client and outputs are untyped here

from splitwave.core.errors import Reason
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
from splitwave.engine.vllm.outputs import decode_params, holds_blocks, translate
from splitwave.engine.vllm.sampling import build, first_token_only

DEATH_WAIT_S = 1.0
HOLD_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}
"""What makes vLLM's connector keep a finished prompt's blocks."""
COUNTERS = frozenset(RankCounters.__dataclass_fields__) - {"rank"}


class RefusedRequest(Exception):
    """A request that must not reach the engine; it ends with this reason instead."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class VllmEngine:
    """One started group of vLLM engines; see `splitwave.engine.port.Engine`."""

    def __init__(self, *, client: Any, processes: Processes, description: GroupDescription) -> None:
        self._client = client
        self._processes = processes
        self._description = description
        self._model_config = client.vllm_config.model_config
        self._vocabulary = self._model_config.get_vocab_size()
        self._decodes = description.role is Role.DECODE
        self._ledger = Ledger(lease_ttl_s=max(1.0, description.lease_ttl_s))
        self._steps = [0] * description.ranks
        self._refused: list[tuple[int, RequestOutput]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._processes.died.add_done_callback(self._wake_for_death)

    @property
    def description(self) -> GroupDescription:
        """What was started."""
        return self._description

    @property
    def died(self) -> asyncio.Future[EngineDied]:
        """Resolved with the cause when the group ends without `close`."""
        return self._processes.died

    @property
    def process_ids(self) -> list[int]:
        """The processes that the group consists of."""
        return self._processes.pids()

    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Hand requests to their ranks. Refusals come as outputs."""
        self._raise_if_dead()
        for request in requests:
            try:
                core_request = self._prepare(request)
            except RefusedRequest as refusal:
                self._refuse(request, refusal)
                continue
            await self._client.add_request_async(core_request)

    def _prepare(self, request: EngineRequest) -> Any:
        """Check a request, register it, and put it in vLLM's words."""
        from vllm.v1.engine import EngineCoreRequest

        self._check(request)
        params = self._params(request)
        admission = self._ledger.admit(
            request.engine_request_id,
            rank=request.rank,
            hold=request.hold,
            now_s=time.monotonic(),
        )
        if admission is Admission.REFUSE:
            raise RefusedRequest(
                Reason.INTERNAL, f"engine_request_id {request.engine_request_id} is in use"
            )
        if admission is Admission.RUN_WITHOUT_HOLD:
            params.extra_args = None
        return EngineCoreRequest(
            request_id=request.engine_request_id,
            prompt_token_ids=list(request.token_ids),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=request.rank if self._description.ranks > 1 else None,
            priority=request.priority,
        )

    def _check(self, request: EngineRequest) -> None:
        """Refuse what would make an engine process fail, or break the port's contract."""
        if not 0 <= request.rank < self._description.ranks:
            raise RefusedRequest(Reason.INTERNAL, f"rank {request.rank} is not in the group")
        if self._decodes and (request.pull is None or request.hold):
            raise RefusedRequest(Reason.INTERNAL, "a decode request has a pull and holds nothing")
        if not self._decodes and request.pull is not None:
            raise RefusedRequest(Reason.INTERNAL, "a prefill request has no pull")
        tokens = request.token_ids
        if not tokens:
            raise RefusedRequest(Reason.INVALID_REQUEST, "the prompt has no token")
        if len(tokens) >= self._description.model_len_max_tokens:
            raise RefusedRequest(
                Reason.INVALID_REQUEST,
                f"the prompt has {len(tokens)} tokens; with at least one more generated, "
                f"{self._description.model_len_max_tokens} is the longest sequence",
            )
        if min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise RefusedRequest(
                Reason.INVALID_REQUEST, f"a token id is outside 0 to {self._vocabulary - 1}"
            )

    def _params(self, request: EngineRequest) -> Any:
        """Make vLLM's sampling parameters, with what its connector is to do."""
        sampling = first_token_only(request.sampling) if request.hold else request.sampling
        try:
            params = build(sampling, self._transfer(request))
            params.verify(self._model_config, None, None, None)
        except (ValueError, OverflowError) as error:
            raise RefusedRequest(Reason.INVALID_REQUEST, f"sampling: {error}") from error
        return params

    def _transfer(self, request: EngineRequest) -> dict[str, Any] | None:
        """Return the connector's parameters: what to hold, or what to pull."""
        if request.hold:
            return dict(HOLD_PARAMS)
        if request.pull is None:
            return None
        try:
            params = decode_params(request.pull.connector_params)
        except ValueError as error:
            raise RefusedRequest(Reason.HANDOFF_FAILED, f"connector_params: {error}") from error
        if not 0 < request.pull.remote_tokens <= len(request.token_ids):
            raise RefusedRequest(
                Reason.INTERNAL, "remote_tokens is not within 1 to the prompt's length"
            )
        return params | {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_num_tokens": request.pull.remote_tokens,
        }

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
        return await self._client._call_utility_async(  # noqa: SLF001  # no public per-rank call
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
        steps = [
            self._step(batch.engine_index, batch.timestamp, outputs)
            for batch in batches
            if not isinstance(batch, Exception) and (outputs := self._outputs(batch))
        ]
        refused, self._refused = self._refused, []
        steps += [self._step(rank, time.monotonic(), [output]) for rank, output in refused]
        return steps

    def _step(self, rank: int, at_s: float, outputs: list[RequestOutput]) -> StepOutputs:
        """Number one batch of a rank."""
        self._steps[rank] += 1
        return StepOutputs(rank=rank, step=self._steps[rank], at_s=at_s, outputs=outputs)

    def _outputs(self, batch: Any) -> list[RequestOutput]:
        """Translate what is still wanted; release what nobody will ask for."""
        wanted: list[RequestOutput] = []
        for output in batch.outputs:
            name = output.request_id
            running = self._ledger.running(name)
            ours = None
            if running is not None:
                ours = translate(output, hold=running.hold, pulls=self._decodes)
                wanted.append(ours)
            if output.finish_reason is None:
                continue
            if ours is not None and ours.held is not None:
                self._ledger.held(name, ours.held.expires_at_s)
                continue
            self._ledger.ended(name)
            if not self._decodes and holds_blocks(output):
                self._release_late(batch.engine_index, name)
        return wanted

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
        """Raise the cause of the group's death, or that it is closed."""
        if self.died.done():
            raise self.died.result()
        if self._closed:
            raise EngineDied("the group was closed")

    async def _cause(self) -> EngineDied:
        """Return why the group died; a core reports its death just before its process ends."""
        await asyncio.wait({self.died}, timeout=DEATH_WAIT_S)
        if self.died.done():
            return self.died.result()
        return EngineDied("an engine core reported that it failed, and its process still runs")

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

    async def close(self) -> None:
        """Stop all processes of the group. Idempotent; bounded in time."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._wake()
        await self._processes.close()
        self._client.shutdown()
