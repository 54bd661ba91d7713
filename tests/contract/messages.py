"""Strategies for every message that crosses the wire, in the core's words."""

from hypothesis import strategies as st

from splitwave.core.envelope import Envelope, Traffic
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, Sampling, TokenLogprob
from splitwave.core.handoff import Handoff
from splitwave.core.mode_guard import Standing, StepViolation, ViolatingRequest
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.session import (
    Accepted,
    Ack,
    AskGrant,
    Cancel,
    CancelAsk,
    Ended,
    Frame,
    Granted,
    Grants,
    GroupLoad,
    Hello,
    Pulled,
    Refused,
    ReturnGrants,
    Submit,
    TakeGrant,
    Welcome,
)
from splitwave.core.worker import (
    Certification,
    LeaseCounts,
    RankCounters,
    Role,
    WorkerDescription,
    WorkerLoad,
)

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
sint32 = st.integers(-(2**31), 2**31 - 1)
positive = st.integers(1, 2**32 - 1)
token = st.integers(0, 200_000)
tokens = st.lists(token, max_size=12)
text = st.text(max_size=12)
name = st.text(min_size=1, max_size=12)
names = st.lists(text, max_size=4).map(tuple)
seconds = st.integers(0, 10**9).map(lambda ms: ms / 1000)
"""Milliseconds survive a Duration exactly."""
logprob = st.floats(-1e4, 0, width=32)


def real(low: float, high: float) -> st.SearchStrategy[float]:
    """Floats that survive the wire, which has 32 bits for them."""
    return st.floats(low, high, width=32)


def same(error: ServingError) -> tuple[Reason, str, float | None]:
    """What two equal errors have in common: exceptions compare by identity."""
    return error.reason, error.message, error.retry_after_s


class Failure(ServingError):
    """A ServingError that compares by value, so that whole messages can be compared."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ServingError) and same(self) == same(other)

    __hash__ = ServingError.__hash__


def _failure(reason: Reason, message: str, retry_after_s: float | None) -> Failure:
    return Failure(reason, message, retry_after_s=retry_after_s)


failures = st.builds(_failure, st.sampled_from(Reason), text, st.none() | seconds)

samplings = st.integers(1, 2**31).flatmap(
    lambda max_tokens: st.builds(
        Sampling,
        max_tokens=st.just(max_tokens),
        min_tokens=st.integers(0, max_tokens),
        temperature=real(0, 100),
        top_p=real(2**-20, 1),
        top_k=uint32,
        min_p=real(0, 1),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        presence_penalty=real(-2, 2),
        frequency_penalty=real(-2, 2),
        repetition_penalty=real(2**-20, 100),
        logit_bias=st.dictionaries(token, real(-100, 100), max_size=4),
        stop_token_ids=tokens.map(tuple),
        eos_token_ids=tokens.map(tuple),
        ignore_eos=st.booleans(),
        logprobs=st.none() | st.integers(0, 20),
    )
)

handoffs = st.builds(
    Handoff,
    handoff_id=text,
    prefill_worker_id=text,
    prefill_address=text,
    group_id=text,
    epoch=uint64,
    rank=uint32,
    prompt_tokens=uint32,
    block_count=uint32,
    kv_layout=text,
    lease_remaining_s=seconds,
    connector=text,
    connector_params=st.binary(max_size=20),
)


def row_of(token_id: int) -> st.SearchStrategy[TokenLogprob]:
    """Log probabilities of one sampled token."""
    top = st.lists(st.tuples(token, logprob), max_size=3).map(tuple)
    return st.builds(TokenLogprob, st.just(token_id), logprob, positive, top)


prefill_calls = st.builds(
    PrefillCall,
    request_id=name,
    handoff_id=name,
    token_ids=st.lists(token, min_size=1, max_size=12),
    sampling=samplings,
    keep_first_token=st.booleans(),
    kv_layout=text,
    priority=sint32,
    prompt_logprobs=st.none() | uint32,
)


PROMPT = (1, 2, 3, 4)
"""The prompt of every prefill result."""


@st.composite
def prefill_results(draw: st.DrawFn) -> PrefillResult:
    """Held with or without a first token, or ended by it."""
    ended = draw(st.booleans())
    token_id = draw(token if ended else st.none() | token)
    wants = token_id is not None and draw(st.booleans())
    return PrefillResult(
        handoff=None if ended else draw(handoffs),
        token_id=token_id,
        logprob=draw(row_of(token_id)) if token_id is not None and wants else None,
        finish_reason=draw(st.sampled_from(FinishReason)) if ended else None,
        stop_token_id=draw(st.none() | token),
        prompt_logprobs=draw(st.none() | st.tuples(*map(row_of, PROMPT[1:])).map(list)),
        cached_tokens=draw(uint32),
        queued_s=draw(seconds),
        computed_s=draw(seconds),
        waves=draw(st.lists(text, max_size=2).map(tuple)),
    )


submits = st.builds(
    Submit,
    attempt_id=name,
    request_id=name,
    grant_id=name,
    handoff=handoffs,
    token_ids=st.lists(token, min_size=1, max_size=12),
    offset=uint32,
    sampling=samplings,
    remaining_s=seconds,
    stall_max_s=seconds,
    traceparent=text,
    priority=sint32,
)
hellos = st.builds(
    Hello,
    router_id=name,
    session_id=name,
    reattach=st.booleans(),
    epoch=uint64,
    received_number=uint64,
    attempt_ids=names,
    takes_batches=st.booleans(),
)
acks = st.builds(Ack, uint64)
router_messages = st.one_of(
    submits,
    st.builds(Cancel, names),
    st.builds(AskGrant, text, positive, seconds),
    st.builds(CancelAsk, text),
    st.builds(TakeGrant, text, positive, seconds),
    st.builds(ReturnGrants, names),
)

welcomes = st.builds(
    Welcome,
    worker_id=text,
    group_id=text,
    epoch=uint64,
    reattached=st.booleans(),
    received_number=uint64,
    known=st.lists(st.tuples(text, st.booleans()), max_size=3).map(tuple),
    reattach_s=seconds,
    kv_layout=text,
    block_size_tokens=positive,
    grant_blocks=positive,
    model_len_max_tokens=positive,
    blocks_per_rank=positive,
    takes_batches=st.booleans(),
    ranks=uint32,
    seats_per_rank=uint32,
)
granted = st.builds(Granted, name, uint32, positive, seconds, text)
grants = st.builds(
    Grants,
    st.lists(granted, max_size=3).map(tuple),
    st.lists(st.tuples(text, failures), max_size=3).map(tuple),
    st.builds(GroupLoad, uint32, uint32, uint32, st.booleans()),
)


@st.composite
def endeds(draw: st.DrawFn) -> Ended:
    """Ended well or failed, never both."""
    error = draw(st.none() | failures)
    return Ended(
        slot=draw(uint32),
        attempt_id=draw(text),
        finish_reason=None if error else draw(st.sampled_from(FinishReason)),
        stop_token_id=draw(st.none() | token),
        error=error,
        handoff_bytes=draw(uint64),
        handoff_s=draw(seconds),
        waves=draw(st.lists(text, max_size=2).map(tuple)),
    )


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    """Columns that agree; even slots have asked for log probabilities."""
    frame = Frame(step=draw(uint64), slots=draw(st.lists(uint32, unique=True, max_size=5)))
    for slot in frame.slots:
        new = draw(st.lists(token, min_size=1, max_size=3))
        frame.offsets.append(draw(uint32))
        frame.token_counts.append(len(new))
        frame.token_ids += new
        if even(slot):
            frame.logprobs += [draw(row_of(token_id)) for token_id in new]
    frame.ended = draw(st.lists(endeds(), max_size=3))
    frame.pulled = draw(st.lists(st.builds(Pulled, uint32, uint64, seconds), max_size=3))
    return frame


def even(slot: int) -> bool:
    """Which slots of `frames` have asked for log probabilities."""
    return slot % 2 == 0


worker_messages = st.one_of(
    grants,
    st.builds(Accepted, text, uint32, uint32),
    st.builds(Refused, text, failures),
    frames(),
)

columns = st.lists(uint32, max_size=4).map(tuple)
counts = st.dictionaries(text, uint64, max_size=3)
loads = st.builds(
    WorkerLoad,
    draining=st.booleans(),
    queued_tokens=columns,
    seats_used=columns,
    blocks_used=columns,
    asks_waiting=uint32,
    ready=st.booleans(),
    seats_held=columns,
    standing=st.sampled_from(Standing),
)
sizes = st.integers(1, 2**31)
names = st.sets(text, max_size=3).map(lambda found: tuple(sorted(found)))
envelopes = st.builds(
    Envelope,
    ranks=sizes,
    tensor_parallel=sizes,
    capture_grid=st.sets(sizes, max_size=3).map(lambda found: tuple(sorted(found))),
    step_min_tokens=st.just(1),
    step_max_tokens=sizes,
    seats_max=st.just(1),
    prompt_max_tokens=st.just(1),
    sequence_max_tokens=sizes,
    traffic=st.builds(Traffic, output_max_tokens=sizes, sampling=names),
)
violations = st.builds(
    StepViolation,
    rank=uint32,
    step=uint64,
    kind=text,
    tokens=uint32,
    requests=st.lists(
        st.builds(
            ViolatingRequest,
            engine_request_id=text,
            length_tokens=uint32,
            step_tokens=uint32,
            sampling=st.lists(text, max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
)
certifications = st.builds(
    Certification,
    certificate_id=text,
    level=text,
    refusal=text,
    envelope=st.none() | envelopes,
    violations=st.lists(violations, max_size=2).map(tuple),
    violating_steps=uint64,
)
rank_counters = st.builds(
    RankCounters,
    rank=uint32,
    steps_by_kind=counts,
    dummy_steps=uint64,
    prefill_tokens_computed=uint64,
    pulls=uint64,
    bytes_pulled=uint64,
    leases_live=uint32,
    blocks_used=uint32,
    guard_refusals=counts,
)
descriptions = st.builds(
    WorkerDescription,
    worker_id=text,
    role=st.sampled_from(Role),
    group_id=text,
    epoch=uint64,
    mode=text,
    model=text,
    ranks=uint32,
    block_size_tokens=uint32,
    blocks_per_rank=uint32,
    block_bytes=uint64,
    seats_per_rank=uint32,
    model_len_max_tokens=uint32,
    batch_max_tokens=uint32,
    kv_layout=text,
    uncertified=st.booleans(),
    versions=st.dictionaries(text, text, max_size=3),
    load=loads,
    rank_counters=st.lists(rank_counters, max_size=2).map(tuple),
    lease_ttl_s=seconds,
    leases=st.builds(
        LeaseCounts, started=uint64, pulled=uint64, released=uint64, expired=uint64, live=uint32
    ),
    certification=certifications,
)
