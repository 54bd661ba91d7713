"""One message of each kind, as it was on the wire when the contract was last released.

`python -m tests.contract.golden_messages` writes tests/contract/golden anew. Do so on
purpose only: a file that changes is a message that older services read differently.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any  # messages of every kind, each with its own functions

from google.protobuf.message import Message

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
from splitwave.v1alpha1 import decode_service_pb2, prefill_service_pb2, worker_service_pb2
from splitwave.wire.batch import responses_in, router_messages_to_proto, worker_messages_to_proto
from splitwave.wire.errors import to_status
from splitwave.wire.prefill import (
    prefill_call_from_proto,
    prefill_call_to_proto,
    prefill_result_from_proto,
    prefill_result_to_proto,
)
from splitwave.wire.session import (
    RouterMessages,
    router_message_to_proto,
    worker_message_from_proto,
    worker_message_to_proto,
)
from splitwave.wire.worker import description_from_proto, description_to_proto, observation_to_proto
from tests.contract.messages import Failure, even

FOLDER = Path(__file__).parent / "golden"
NUMBER = 7


@dataclass(frozen=True)
class Golden:
    """A message in the core's words and the proto message that says it."""

    name: str
    core: Any
    proto: Message

    @property
    def path(self) -> Path:
        """Where its bytes are kept."""
        return FOLDER / f"{self.name}.binpb"

    def encoded(self) -> bytes:
        """Its bytes; map entries are sorted, which the wire does not promise."""
        return self.proto.SerializeToString(deterministic=True)

    def decoded(self, data: bytes) -> object:
        """What today's code reads in `data`."""
        message = type(self.proto).FromString(data)
        match message:
            case decode_service_pb2.SessionRequest(number=0) if message.HasField("batch"):
                return list(RouterMessages().read(message))
            case decode_service_pb2.SessionRequest():
                return RouterMessages().feed(message)
            case decode_service_pb2.SessionResponse(number=0) if message.HasField("batch"):
                read = worker_message_from_proto
                return [(each.number, read(each, even)) for each in responses_in(message)]
            case decode_service_pb2.SessionResponse():
                return message.number, worker_message_from_proto(message, even)
            case prefill_service_pb2.PrefillRequest():
                return prefill_call_from_proto(message)
            case prefill_service_pb2.PrefillResponse():
                return prefill_result_from_proto(message)
            case worker_service_pb2.DescribeWorkerResponse():
                return description_from_proto(message)
        return message


SAMPLING = Sampling(
    max_tokens=64,
    min_tokens=2,
    temperature=0.75,
    top_p=0.5,
    top_k=40,
    min_p=0.125,
    seed=-5,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    repetition_penalty=1.25,
    logit_bias={11: -1.5, 5: 2.0},
    stop_token_ids=(3, 4),
    eos_token_ids=(2,),
    ignore_eos=True,
    logprobs=2,
)
HANDOFF = Handoff(
    handoff_id="req-1/0/2",
    prefill_worker_id="prefill-0",
    prefill_address="10.0.0.1:7001",
    group_id="pg",
    epoch=3,
    rank=1,
    prompt_tokens=5,
    block_count=1,
    kv_layout="abc123",
    lease_remaining_s=29.5,
    connector="nixl",
    connector_params=b"\x00\x01\xff",
)
ROW = TokenLogprob(42, -0.5, 1, ((42, -0.5), (7, -1.25)))
FAILURE = Failure(Reason.OVERLOADED, "the queue for decode room is full", retry_after_s=0.25)
LOAD = WorkerLoad(
    draining=True,
    queued_tokens=(10, 0),
    seats_used=(3, 4),
    blocks_used=(30, 40),
    asks_waiting=2,
    ready=True,
    standing=Standing.DECERTIFIED,
)

ROUTER = {
    "hello": Hello(
        router_id="router-0",
        session_id="s-1",
        reattach=True,
        epoch=3,
        received_number=9,
        attempt_ids=("req-1/0/2",),
    ),
    "router_ack": Ack(12),
    "submit": Submit(
        attempt_id="req-1/0/2",
        request_id="req-1",
        grant_id="g17",
        handoff=HANDOFF,
        token_ids=[1, 300, 70000],
        offset=1,
        sampling=SAMPLING,
        remaining_s=59.75,
        stall_max_s=10.0,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        priority=-1,
    ),
    "cancel": Cancel(("req-1/0/2", "req-2/0/1")),
    "ask": AskGrant("ask-1", 20, 1.5),
    "cancel_ask": CancelAsk("ask-1"),
    "take": TakeGrant("g17", 9, 30.0),
    "return_grants": ReturnGrants(("g18", "g19")),
}
WORKER = {
    "welcome": Welcome(
        worker_id="decode-0",
        group_id="dg",
        epoch=3,
        reattached=True,
        received_number=12,
        known=(("req-1/0/2", True), ("req-2/0/1", False)),
        reattach_s=2.0,
        kv_layout="abc123",
        block_size_tokens=16,
        grant_blocks=16,
        model_len_max_tokens=4096,
        blocks_per_rank=1000,
    ),
    "worker_ack": Ack(9),
    "grants": Grants(
        (Granted("g17", 1, 16, 2.0), Granted("g18", 0, 20, 2.0, "ask-1")),
        (("ask-2", FAILURE),),
        GroupLoad(5, 500, 1, False),
    ),
    "accepted": Accepted("req-1/0/2", 4, 1),
    "refused": Refused("req-2/0/1", FAILURE),
    "frame": Frame(
        step=1000,
        slots=[4, 7],
        offsets=[1, 0],
        token_counts=[1, 2],
        token_ids=[42, 43, 44],
        logprobs=[ROW],
        ended=[
            Ended(
                slot=4,
                attempt_id="req-1/0/2",
                finish_reason=FinishReason.STOP,
                stop_token_id=2,
                handoff_bytes=123456,
                handoff_s=0.125,
            ),
            Ended(slot=7, attempt_id="req-2/0/1", error=FAILURE),
        ],
    ),
    "pulled": Frame(
        step=1001,
        slots=[9],
        offsets=[0],
        token_counts=[1],
        token_ids=[42],
        pulled=[Pulled(9, 123456, 0.125)],
    ),
}
CALL = PrefillCall(
    request_id="req-1",
    handoff_id="req-1/0/2",
    token_ids=[1, 300, 70000],
    sampling=SAMPLING,
    keep_first_token=True,
    kv_layout="abc123",
    priority=-1,
)
HELD = PrefillResult(
    handoff=HANDOFF, token_id=42, logprob=ROW, cached_tokens=3, queued_s=0.25, computed_s=0.5
)
ENDED = PrefillResult(token_id=2, finish_reason=FinishReason.STOP, stop_token_id=2)
DESCRIPTION = WorkerDescription(
    worker_id="decode-0",
    role=Role.DECODE,
    group_id="dg",
    epoch=3,
    mode="decode_cpu_eager",
    model="tiny",
    ranks=2,
    block_size_tokens=16,
    blocks_per_rank=1000,
    block_bytes=8192,
    seats_per_rank=32,
    model_len_max_tokens=4096,
    batch_max_tokens=2048,
    kv_layout="abc123",
    uncertified=True,
    versions={"vllm": "0.32.0", "python": "3.11.7"},
    load=LOAD,
    rank_counters=(
        RankCounters(
            rank=1,
            steps_by_kind={"eager": 10, "full": 90},
            dummy_steps=5,
            prefill_tokens_computed=0,
            pulls=4,
            bytes_pulled=4096,
            leases_live=1,
            blocks_used=7,
            guard_refusals={"no handoff": 1},
        ),
    ),
    lease_ttl_s=30.0,
    leases=LeaseCounts(started=9, pulled=5, released=2, expired=1, live=1),
    certification=Certification(
        certificate_id="0123456789abcdef",
        level="full",
        envelope=Envelope(
            ranks=2,
            capture_grid=(8, 16, 32),
            step_min_tokens=4,
            step_max_tokens=2048,
            seats_max=32,
            prompt_max_tokens=2000,
            sequence_max_tokens=4096,
            traffic=Traffic(output_max_tokens=2096, sampling=("temperature", "top_p")),
        ),
        violations=(
            StepViolation(
                rank=1,
                step=77,
                kind="eager",
                tokens=3,
                requests=(
                    ViolatingRequest(
                        engine_request_id="r/0/1", length_tokens=99, step_tokens=1, sampling=("n",)
                    ),
                ),
            ),
        ),
        violating_steps=2,
    ),
)
STATUS = to_status(ServingError(Reason.HANDOFF_EXPIRED, "the lease has ended", retry_after_s=1.0))


def _router(name: str, core: Any) -> Golden:
    (proto,) = router_message_to_proto(NUMBER, core)
    return Golden(name, (proto.number, core), proto)


def _worker(name: str, core: Any) -> Golden:
    proto = worker_message_to_proto(NUMBER, core)
    return Golden(name, (proto.number, core), proto)


ROUTER_BATCH: Any = [(7, ROUTER["take"]), (8, ROUTER["submit"]), (0, ROUTER["router_ack"])]
WORKER_BATCH: Any = [(7, WORKER["accepted"]), (8, WORKER["frame"]), (0, WORKER["worker_ack"])]

_OBSERVATION = observation_to_proto(3, LOAD)
GOLDEN = [
    *(_router(name, core) for name, core in ROUTER.items()),
    *(_worker(name, core) for name, core in WORKER.items()),
    Golden("router_batch", ROUTER_BATCH, next(router_messages_to_proto(ROUTER_BATCH))),
    Golden("worker_batch", WORKER_BATCH, next(worker_messages_to_proto(WORKER_BATCH))),
    Golden("prefill_call", CALL, prefill_call_to_proto(CALL)),
    Golden("prefill_held", HELD, prefill_result_to_proto(HELD)),
    Golden("prefill_ended", ENDED, prefill_result_to_proto(ENDED)),
    Golden("description", DESCRIPTION, description_to_proto(DESCRIPTION)),
    Golden("observation", _OBSERVATION, _OBSERVATION),
    Golden("status", STATUS, STATUS),
]
"""Every kind of message; compare by `core`, encode by `proto`."""


def write() -> None:
    """Make today's bytes the golden ones."""
    FOLDER.mkdir(exist_ok=True)
    for stale in FOLDER.glob("*.binpb"):
        stale.unlink()
    for golden in GOLDEN:
        golden.path.write_bytes(golden.encoded())


if __name__ == "__main__":
    write()
