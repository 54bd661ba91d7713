"""What a group is certified for, and how it stands <-> proto."""

from typing import Final

from splitwave.core.envelope import Envelope, EnvelopeError, Traffic
from splitwave.core.errors import Reason, ServingError
from splitwave.core.mode_guard import Action, Standing, StepViolation, ViolatingRequest
from splitwave.core.worker import Certification
from splitwave.v1alpha1 import worker_service_pb2 as pb

_STANDING: Final = {
    Standing.CERTIFIED: pb.GROUP_STANDING_CERTIFIED,
    Standing.UNCERTIFIED: pb.GROUP_STANDING_UNCERTIFIED,
    Standing.DECERTIFIED: pb.GROUP_STANDING_DECERTIFIED,
    Standing.DEGRADED: pb.GROUP_STANDING_DEGRADED,
}
_OURS: Final = {theirs: ours for ours, theirs in _STANDING.items()}
_JUDGEMENT: Final = {
    Action.DRAIN: pb.JUDGEMENT_DRAIN,
    Action.SERVE_ON: pb.JUDGEMENT_SERVE_ON,
}


def standing_to_proto(standing: Standing) -> "pb.GroupStanding.ValueType":
    """A standing as it travels."""
    return _STANDING[standing]


def standing_from_proto(standing: "pb.GroupStanding.ValueType") -> Standing:
    """A standing as it arrived; what is not known here is worth nothing."""
    return _OURS.get(standing, Standing.UNCERTIFIED)


def judge_request(epoch: int, action: Action, why: str) -> pb.JudgeWorkerRequest:
    """Tell a decertified worker to drain, or to serve on."""
    return pb.JudgeWorkerRequest(epoch=epoch, judgement=_JUDGEMENT[action], why=why)


def judgement_from_proto(message: pb.JudgeWorkerRequest) -> Action:
    """What a worker is told. Raises INVALID_REQUEST for no judgement."""
    for action, theirs in _JUDGEMENT.items():
        if theirs == message.judgement:
            return action
    raise ServingError(Reason.INVALID_REQUEST, "judgement: say drain or serve on")


def judge_response(standing: Standing) -> pb.JudgeWorkerResponse:
    """How the group stands after a judgement."""
    return pb.JudgeWorkerResponse(standing=standing_to_proto(standing))


def certification_to_proto(certification: Certification) -> pb.Certification:
    """A certification as it travels."""
    envelope = certification.envelope
    return pb.Certification(
        certificate_id=certification.certificate_id,
        level=certification.level,
        refusal=certification.refusal,
        envelope=None if envelope is None else _envelope_to_proto(envelope),
        violations=[_violation_to_proto(x) for x in certification.violations],
        violating_steps=certification.violating_steps,
    )


def certification_from_proto(message: pb.Certification) -> Certification:
    """A certification as it arrived. Raises INTERNAL for an envelope that contradicts itself."""
    has_envelope = message.HasField("envelope")
    return Certification(
        certificate_id=message.certificate_id,
        level=message.level,
        refusal=message.refusal,
        envelope=_envelope_from_proto(message.envelope) if has_envelope else None,
        violations=tuple(_violation_from_proto(x) for x in message.violations),
        violating_steps=message.violating_steps,
    )


def _envelope_to_proto(envelope: Envelope) -> pb.Envelope:
    return pb.Envelope(
        ranks=envelope.ranks,
        tensor_parallel=envelope.tensor_parallel,
        capture_grid=envelope.capture_grid,
        step_min_tokens=envelope.step_min_tokens,
        step_max_tokens=envelope.step_max_tokens,
        seats_max=envelope.seats_max,
        prompt_max_tokens=envelope.prompt_max_tokens,
        sequence_max_tokens=envelope.sequence_max_tokens,
        output_max_tokens=envelope.traffic.output_max_tokens,
        sampling=envelope.traffic.sampling,
    )


def _envelope_from_proto(message: pb.Envelope) -> Envelope:
    try:
        return Envelope(
            ranks=message.ranks,
            tensor_parallel=message.tensor_parallel,
            capture_grid=tuple(message.capture_grid),
            step_min_tokens=message.step_min_tokens,
            step_max_tokens=message.step_max_tokens,
            seats_max=message.seats_max,
            prompt_max_tokens=message.prompt_max_tokens,
            sequence_max_tokens=message.sequence_max_tokens,
            traffic=Traffic(
                output_max_tokens=message.output_max_tokens, sampling=tuple(message.sampling)
            ),
        )
    except EnvelopeError as error:
        raise ServingError(Reason.INTERNAL, f"certification.envelope.{error}") from error


def _violation_to_proto(violation: StepViolation) -> pb.StepViolation:
    return pb.StepViolation(
        rank=violation.rank,
        step=violation.step,
        kind=violation.kind,
        tokens=violation.tokens,
        requests=[
            pb.ViolatingRequest(
                engine_request_id=request.engine_request_id,
                length_tokens=request.length_tokens,
                step_tokens=request.step_tokens,
                sampling=request.sampling,
            )
            for request in violation.requests
        ],
    )


def _violation_from_proto(message: pb.StepViolation) -> StepViolation:
    return StepViolation(
        rank=message.rank,
        step=message.step,
        kind=message.kind,
        tokens=message.tokens,
        requests=tuple(
            ViolatingRequest(
                engine_request_id=request.engine_request_id,
                length_tokens=request.length_tokens,
                step_tokens=request.step_tokens,
                sampling=tuple(request.sampling),
            )
            for request in message.requests
        ),
    )
