"""What a rank takes in, and what it refuses before any step."""

from collections.abc import Sequence as TokenIds

from splitwave.core.errors import Reason
from splitwave.core.generation import Sampling
from splitwave.engine.port import EngineRequest, Pull, Role
from splitwave.engine.sim.fabric import Offer
from splitwave.engine.sim.sequence import Sequence
from splitwave.engine.sim.settings import SimSettings
from splitwave.engine.sim.tokens import Continuation, SimModel, extend


class Refused(Exception):
    """The request ends without a step. `guard` names the rule, if it was the decode guard's."""

    def __init__(self, reason: Reason, message: str, *, guard: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.guard = guard


def model_of(settings: SimSettings) -> SimModel:
    """The simulated model that a group serves."""
    return SimModel(
        seed=settings.model_seed,
        eos_rate=settings.eos_rate,
        length_max_tokens=settings.model_len_max_tokens,
        recites=settings.recites,
    )


def blocks_for(settings: SimSettings, tokens: int) -> int:
    """KV blocks that so many tokens take."""
    return -(-tokens // settings.block_size_tokens)


def sequence_of(settings: SimSettings, model: SimModel, request: EngineRequest) -> Sequence:
    """What a rank keeps of a request. Raises Refused."""
    _check_bounds(settings, request.token_ids, request.sampling)
    if settings.role is Role.DECODE:
        return _to_decode(settings, model, request)
    if request.pull is not None:
        raise Refused(Reason.INTERNAL, "pull is set, but this is a prefill group: leave it out")
    if request.hold and request.sampling.max_tokens != 1:
        raise Refused(
            Reason.INTERNAL,
            f"sampling.max_tokens is {request.sampling.max_tokens} with hold set: it must be 1",
        )
    token_ids = request.token_ids
    before_last = _extend(model.empty_state, token_ids[:-1])
    state = _extend(before_last, token_ids[-1:])
    return Sequence(
        request,
        Continuation(model, state=state, length=len(token_ids), sampling=request.sampling),
        state_before_last=before_last,
    )


def _check_bounds(settings: SimSettings, token_ids: TokenIds[int], sampling: Sampling) -> None:
    length_max = settings.model_len_max_tokens
    if not token_ids:
        raise Refused(Reason.INVALID_REQUEST, "token_ids is empty: send at least one token")
    if len(token_ids) >= length_max:
        raise Refused(
            Reason.INVALID_REQUEST,
            f"token_ids has {len(token_ids)} tokens, which leaves no room to generate within "
            f"the model's {length_max}: shorten it",
        )
    if sampling.max_tokens < 1:
        raise Refused(
            Reason.INVALID_REQUEST,
            f"sampling.max_tokens is {sampling.max_tokens}: set it to at least 1",
        )


def _to_decode(settings: SimSettings, model: SimModel, request: EngineRequest) -> Sequence:
    pull, token_ids = request.pull, request.token_ids
    if pull is None:
        raise Refused(
            Reason.INTERNAL, "a decode group takes no request without pull", guard="no_handoff"
        )
    if len(token_ids) < 2:
        raise Refused(
            Reason.INTERNAL,
            "the first computed position would be 0: a prompt of one token needs prefill's token",
            guard="first_position",
        )
    if pull.remote_tokens not in (len(token_ids), len(token_ids) - 1):
        raise Refused(
            Reason.INTERNAL,
            f"pull.remote_tokens is {pull.remote_tokens} for {len(token_ids)} tokens: "
            "a decode group computes exactly one token in a request's first step",
            guard="many_tokens",
        )
    offer = _offer(settings, pull)
    recomputes = pull.remote_tokens == len(token_ids)
    state = _extend(offer.state_before_last if recomputes else offer.state, token_ids[-1:])
    return Sequence(
        request,
        Continuation(model, state=state, length=len(token_ids), sampling=request.sampling),
        offer=offer,
    )


def _offer(settings: SimSettings, pull: Pull) -> Offer:
    try:
        offer = Offer.from_bytes(pull.connector_params)
    except ValueError as error:
        raise Refused(Reason.HANDOFF_FAILED, f"pull.connector_params: {error}") from error
    if offer.kv_layout != settings.kv_layout:
        raise Refused(
            Reason.KV_LAYOUT_MISMATCH,
            f"the handoff has KV layout {offer.kv_layout}, this group {settings.kv_layout}",
        )
    if offer.tokens != pull.remote_tokens:
        raise Refused(
            Reason.HANDOFF_FAILED,
            f"pull.remote_tokens is {pull.remote_tokens}, but the handoff holds {offer.tokens}",
        )
    return offer


def _extend(state: int, token_ids: TokenIds[int]) -> int:
    try:
        return extend(state, token_ids)
    except (OverflowError, TypeError) as error:
        raise Refused(
            Reason.INVALID_REQUEST, "token_ids holds what is no id of 0 or more: remove it"
        ) from error
