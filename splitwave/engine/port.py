"""The engine port: what a worker needs of a group of inference engines.

Two implementations: `splitwave.engine.vllm` (real engines) and
`splitwave.engine.sim` (a lock-step simulator). A group is all data-parallel
ranks that step together; the worker in front of it drives them through one
`Engine`. Nothing here is per token: outputs come once a step and rank.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from splitwave.core.errors import Reason
from splitwave.core.generation import FinishReason, Sampling, TokenLogprob
from splitwave.core.grant_reports import RankLoad
from splitwave.core.mode_guard import StepViolation
from splitwave.core.strict_json import Scalar
from splitwave.core.wave_record import WaveStatus
from splitwave.core.wave_segment import Link, SegmentKey, WaveSegment
from splitwave.core.worker import RankCounters as RankCounters
from splitwave.core.worker import Role as Role


class EngineDied(Exception):
    """The group cannot go on: a rank's process ended, or its loop failed.

    `rank` is None if the whole group is meant; `log_tail` holds the end of its log.
    """

    def __init__(self, message: str, *, rank: int | None = None, log_tail: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.log_tail = log_tail


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDescription:
    """What a started group is. Fixed for one epoch."""

    group_id: str
    epoch: int
    """Grows with each start of the group; with group_id and rank it names one rank's life."""
    role: Role
    mode: str
    """Name of the execution mode in `splitwave.core.mode`."""
    model: str
    """Served model name."""
    ranks: int
    block_size_tokens: int
    blocks_per_rank: int
    """KV blocks that requests can hold on one rank."""
    seats_per_rank: int
    """Requests that one rank steps at once."""
    model_len_max_tokens: int
    batch_max_tokens: int
    """Tokens of one step of one rank (prefill: the batch that the queue bound counts in)."""
    block_bytes: int
    """Bytes of one KV block over all layers of one rank."""
    kv_layout: str
    """Digest of all that two KV caches must agree on: model, dtype, block size, layers, heads."""
    lease_ttl_s: float = 0.0
    """Prefill: how long the engine holds a finished prompt's blocks."""
    tensor_parallel: int = 1
    """Workers of one rank."""
    capture_grid: tuple[int, ...] = ()
    """Batch sizes that are captured or warmed up, ascending; empty in an eager mode."""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """KV that a decode engine pulls before its first step."""

    handoff_id: str
    remote_tokens: int
    """Prompt tokens whose KV the prefill engine holds; never counts a token sampled by it."""
    connector_params: bytes
    """What the prefill engine's `Held.connector_params` said; only adapters read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request to one rank. `engine_request_id` is never used twice in an epoch."""

    engine_request_id: str
    rank: int
    token_ids: Sequence[int]
    sampling: Sampling
    pull: Pull | None = None
    """Decode: required. Prefill: None."""
    hold: bool = False
    """Prefill: keep the prompt's KV under a lease when the request ends after its one token."""
    prompt_logprobs: int | None = None
    """Prefill: k asks for log probabilities of the prompt's tokens and of the k most likely."""
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A finished prompt whose KV waits to be pulled."""

    connector_params: bytes
    block_count: int
    remote_tokens: int
    expires_at_s: float
    """When the engine itself may free the blocks, on this host's monotonic clock; the engine's
    own figure, taken no later than the lease's true start plus its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What a decode request's pull moved and where its first step began."""

    bytes_moved: int
    first_position: int
    """Position of the first computed token; the guard asserts it is at least 1."""


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What one step gave one request. Ends with `finish` or `failure`, never both."""

    engine_request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop or end-of-sequence token that ended it, if one did."""
    failure: Reason | None = None
    failure_message: str = ""
    held: Held | None = None
    """Prefill: set with `finish` of a request that asked to hold."""
    pulled: Pulled | None = None
    """Decode: set on the request's first output."""
    cached_tokens: int = 0
    """Prefill: prompt tokens that a prefix cache had, on the request's first output."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """Prefill: on the first output of a request that asked: a row a prompt token but the first."""


@dataclass(slots=True, kw_only=True)
class StepOutputs:
    """One step of one rank."""

    rank: int
    step: int
    """Counts this rank's output batches from 1."""
    at_s: float
    """When the engine finished the step, on this host's monotonic clock."""
    outputs: list[RequestOutput]
    running: int | None = None
    waiting: int | None = None
    blocks_used: int | None = None
    pulls_ended: Sequence[str] = ()
    """Decode: requests that were aborted before their first output and of whose handoff nothing
    is read any more, since the transfer has ended or never began. Once each."""
    violations: Sequence[StepViolation] = ()
    """Steps of this rank outside the group's mode, as it recorded them. Once each."""


class Engine(Protocol):
    """One started group. Not safe for use from several event loops."""

    @property
    def description(self) -> GroupDescription:
        """What was started."""

    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Hand requests to their ranks. Failures come as outputs, or as EngineDied."""

    async def abort(self, engine_request_ids: Sequence[str]) -> None:
        """Stop requests; unknown ids are ignored. No output follows for an aborted request.

        Decode: blocks of a running transfer are freed when it ends, others within a step.
        """

    async def release(self, engine_request_ids: Sequence[str]) -> None:
        """Prefill: free what these requests hold, at the next engine tick even when idle.

        Idempotent; also for ids that are not yet known (they then hold nothing when they end)
        and for running ones (they are aborted).
        """

    def steps(self) -> AsyncIterator[Sequence[StepOutputs]]:
        """Outputs as they come; all that is ready at once comes together.

        Raises EngineDied when the group ends without `close`.
        """

    async def counters(self) -> Sequence[RankCounters]:
        """Counts of every rank, from the engine itself."""

    async def fingerprint_facts(self) -> Sequence[Mapping[str, Scalar]]:
        """What decides how each rank's steps run, read in its own running process, one entry a
        rank: names and sections as `splitwave.core.fingerprint` has them, weights left out."""

    def loads(self) -> Sequence[RankLoad]:
        """What each rank last said that it holds; of those that have said anything."""

    def waves(self) -> WaveStatus | None:
        """The waves of its ranks, now; None if nobody coordinates them."""

    def wave_segments(self) -> list[WaveSegment]:
        """Segments of its waves that have ended since the last call."""

    def note_work(self, request: Link, since_s: float, until_s: float) -> Sequence[SegmentKey]:
        """A traced request was worked on meanwhile; times are of this host's monotonic clock.

        Returns the wave segments of its first and last step, which link to it unless they are
        over: none, one or two.
        """

    async def close(self) -> None:
        """Stop all processes of the group. Idempotent; bounded in time."""
