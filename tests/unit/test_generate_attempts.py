"""When `generate` offers elsewhere, tries again, resumes, or must not."""

import math
from dataclasses import replace

import pytest

from services.router.attempts import ATTEMPTS_MAX, Call, NoAnswer, Trail, Unreached
from services.router.generate import OFFERS_MAX, Finish, generate
from services.router.grants import POOL_WAIT_LOST_S
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, Request, Sampling
from tests.fakes import (
    FakeDecode,
    FakeFleet,
    FakePrefill,
    FakeSink,
    blocks_of,
    now_s,
    token_after,
)

PROMPT = (1, 2, 3)
GREEDY = Sampling(max_tokens=6, temperature=0.0)
EMPTY = {"leased blocks": 0, "decode blocks": 0, "decode seats": 0}


class Served:
    """One request and all that is left to look at."""

    def __init__(self, *, decodes: int = 1, sampling: Sampling = GREEDY) -> None:
        self.prefill = FakePrefill()
        self.decodes = [FakeDecode(f"d{i}", self.prefill) for i in range(decodes)]
        self.fleet = FakeFleet(self.prefill, *self.decodes)
        self.sink, self.trail = FakeSink(), Trail()
        self.request = Request("r", PROMPT, sampling)
        self.reserve_tokens, self.deadline_s = 4, 600.0

    async def run(self) -> Finish:
        call = Call(
            request=self.request,
            key="r#1",
            deadline=Deadline(now_s() + self.deadline_s),
            stall_max_s=60,
            reserve_tokens=self.reserve_tokens,
        )
        try:
            return await generate(call, self.fleet, self.sink, self.trail)
        finally:
            await self.fleet.settled()
            assert self.fleet.held() == EMPTY


def right_tokens(count: int, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(token_after(token_ids))
    return token_ids[len(prompt) :]


def failure(reason: Reason) -> ServingError:
    return ServingError(reason, "no")


async def test_a_request_is_prefilled_once_and_decoded_behind_its_first_token() -> None:
    served = Served()

    finish = await served.run()

    assert finish.finish_reason is FinishReason.LENGTH
    assert served.sink.token_ids == right_tokens(6)
    (call,), (submit,) = served.prefill.calls, served.decodes[0].submits
    assert (call.keep_first_token, call.kv_layout, list(call.token_ids)) == (
        True,
        "layout",
        [1, 2, 3],
    )
    assert list(submit.token_ids) == [*PROMPT, *right_tokens(1)]
    assert (submit.offset, submit.sampling.max_tokens) == (1, 5)


async def test_decode_makes_every_token_where_the_first_cannot_be_kept() -> None:
    served = Served(sampling=replace(GREEDY, presence_penalty=0.5))

    await served.run()

    assert not served.prefill.calls[0].keep_first_token
    assert served.decodes[0].submits[0].offset == 0
    assert served.sink.token_ids == right_tokens(6)


async def test_a_request_of_one_token_needs_no_decode_room() -> None:
    served = Served(decodes=0, sampling=replace(GREEDY, max_tokens=1))

    finish = await served.run()

    assert finish.finish_reason is FinishReason.LENGTH
    assert (served.prefill.calls[0].kv_layout, served.fleet.needs) == ("", [])


@pytest.mark.parametrize("feature", ["seed", "min_tokens", "repetition_penalty"])
async def test_a_prompt_of_one_token_is_refused_where_decode_must_begin(feature: str) -> None:
    value = {"seed": 1, "min_tokens": 2, "repetition_penalty": 1.1}[feature]
    served = Served(sampling=replace(GREEDY, temperature=1.0, **{feature: value}))  # type: ignore[arg-type]  # named fields
    served.request = replace(served.request, token_ids=(1,))

    with pytest.raises(ServingError, match="prompt: one token is too short") as refused:
        await served.run()

    assert refused.value.reason is Reason.UNSUPPORTED_FEATURE
    assert served.prefill.calls == []


async def test_a_prompt_of_one_token_is_served_where_prefill_begins() -> None:
    served = Served()
    served.request = replace(served.request, token_ids=(1,))

    await served.run()

    assert served.sink.token_ids == right_tokens(6, (1,))


@pytest.mark.parametrize("reason", Reason)
async def test_a_failed_prefill_is_tried_again_only_where_that_can_help(reason: Reason) -> None:
    served = Served()
    served.prefill.failures = [failure(reason)] * 10

    with pytest.raises(ServingError) as failed:
        await served.run()

    tries = ATTEMPTS_MAX if reason.resumable else 1
    quarantined = reason in (Reason.WORKER_LOST, Reason.GROUP_DECERTIFIED)
    tries = 2 if quarantined else 1 if reason is Reason.OVERLOADED else tries
    assert len(served.prefill.calls) == tries
    assert failed.value.reason is (Reason.REQUEST_QUARANTINED if quarantined else reason)
    assert len({call.handoff_id for call in served.prefill.calls}) == tries
    assert served.prefill.released == [call.handoff_id for call in served.prefill.calls]


@pytest.mark.parametrize("reason", Reason)
async def test_an_ended_attempt_is_resumed_only_where_that_can_help(reason: Reason) -> None:
    served = Served()
    served.decodes[0].ends = [(2, failure(reason))]
    resumable = reason.resumable and reason is not Reason.OVERLOADED

    if resumable:
        await served.run()
    else:
        with pytest.raises(ServingError) as failed:
            await served.run()
        assert failed.value.reason is reason

    assert served.sink.token_ids == right_tokens(6 if resumable else 3)
    assert len(served.prefill.calls) == (2 if resumable else 1)


async def test_a_resume_continues_the_prompt_and_exactly_what_the_client_has() -> None:
    served = Served()
    served.decodes[0].ends = [(2, failure(Reason.PREEMPTED))]

    await served.run()

    first, second = served.prefill.calls
    assert list(second.token_ids) == [*PROMPT, *right_tokens(3)]
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (6, 3)
    assert [submit.offset for submit in served.decodes[0].submits] == [1, 4]
    assert served.trail.attempts == 2
    assert served.trail.handoff_bytes == len(PROMPT) + 1 + len(PROMPT) + 4, "both were pulled"


async def test_a_resume_reserves_all_that_is_left_of_it() -> None:
    served = Served(sampling=replace(GREEDY, max_tokens=40))
    served.decodes[0].ends = [(2, failure(Reason.PREEMPTED))]

    await served.run()

    assert served.decodes[0].grants == [blocks_of(3 + 4), blocks_of(3 + 40)]


@pytest.mark.parametrize("feature", ["", "repetition_penalty"])
async def test_who_has_lost_an_attempt_is_not_kept_waiting_for_a_worker(feature: str) -> None:
    sampling = replace(GREEDY, repetition_penalty=1.2) if feature else GREEDY
    served = Served(sampling=sampling)  # With the feature, decode makes every token.
    served.decodes[0].ends = [(0, failure(Reason.WORKER_LOST)), (2, failure(Reason.PREEMPTED))]

    await served.run()

    waits = [need.pool_wait_s for need in served.fleet.needs]
    assert waits == [math.inf, POOL_WAIT_LOST_S, POOL_WAIT_LOST_S]


async def test_a_resume_that_has_one_token_left_needs_no_decode_room() -> None:
    served = Served()
    served.decodes[0].ends = [(4, failure(Reason.PREEMPTED))]

    await served.run()

    assert served.sink.token_ids == right_tokens(6)
    assert len(served.fleet.needs) == 1


@pytest.mark.parametrize("reason", [r for r in Reason if r.worker_elsewhere])
async def test_a_refused_handoff_is_offered_elsewhere_without_a_second_prefill(
    reason: Reason,
) -> None:
    served = Served(decodes=2)
    for decode in served.decodes:
        decode.refusals = [failure(reason)]
    served.decodes[1].refusals = []

    await served.run()

    assert len(served.prefill.calls) == 1
    submits = [submit for decode in served.decodes for submit in decode.submits]
    assert len({submit.attempt_id for submit in submits}) == 2
    assert len({submit.handoff.handoff_id for submit in submits}) == 1
    assert served.sink.token_ids == right_tokens(6)


async def test_a_grant_that_ran_out_is_replaced_at_the_same_worker() -> None:
    served = Served()
    served.decodes[0].refusals = [failure(Reason.GRANT_UNKNOWN)]

    await served.run()

    assert len(served.prefill.calls) == 1
    assert len(served.decodes[0].submits) == 2


async def test_offers_end_after_a_few_and_the_prompt_is_prefilled_again() -> None:
    served = Served()
    served.decodes[0].refusals = [failure(Reason.GRANT_UNKNOWN)] * OFFERS_MAX

    await served.run()

    assert len(served.prefill.calls) == 2
    assert len(served.prefill.released) == 1


async def test_a_handoff_whose_lease_ends_soon_is_not_offered_again() -> None:
    served = Served(decodes=2)
    served.prefill.lease_s = 0.4
    served.decodes[0].refusals = [failure(Reason.KV_CAPACITY_EXHAUSTED)]

    await served.run()

    assert len(served.prefill.calls) == 2


async def test_an_invalid_submission_is_not_offered_elsewhere() -> None:
    served = Served(decodes=2)
    for decode in served.decodes:
        decode.refusals = [failure(Reason.INVALID_REQUEST)]

    with pytest.raises(ServingError) as failed:
        await served.run()

    assert failed.value.reason is Reason.INVALID_REQUEST
    assert len(served.decodes[0].submits) == 1


async def test_an_expired_handoff_is_prefilled_again() -> None:
    served = Served()
    served.prefill.lease_s = -1.0

    with pytest.raises(ServingError) as failed:
        await served.run()

    assert failed.value.reason is Reason.HANDOFF_EXPIRED
    assert len(served.prefill.calls) == ATTEMPTS_MAX


@pytest.mark.parametrize(
    "reasons",
    [
        (Reason.WORKER_LOST, Reason.WORKER_LOST),
        (Reason.GROUP_DECERTIFIED, Reason.GROUP_DECERTIFIED),
        (Reason.WORKER_LOST, Reason.GROUP_DECERTIFIED),
    ],
)
async def test_a_request_that_was_running_where_two_workers_went_is_quarantined(
    reasons: tuple[Reason, Reason],
) -> None:
    served = Served()
    served.decodes[0].ends = [(1, failure(reason)) for reason in reasons]

    with pytest.raises(ServingError) as failed:
        await served.run()

    assert failed.value.reason is Reason.REQUEST_QUARANTINED
    assert len(served.prefill.calls) == 2


@pytest.mark.parametrize("reason", [Reason.WORKER_LOST, Reason.GROUP_DECERTIFIED])
async def test_a_worker_that_is_asked_again_before_its_death_is_known_has_died_once(
    reason: Reason,
) -> None:
    served = Served()
    served.prefill.starts_over = False
    served.prefill.failures = [failure(reason)] * 2

    await served.run()

    assert served.sink.token_ids == right_tokens(6)
    assert (len(served.prefill.calls), served.trail.deaths) == (3, 1)


async def test_a_group_that_left_its_mode_once_is_no_reason_against_a_request() -> None:
    served = Served()
    served.decodes[0].ends = [(1, failure(Reason.GROUP_DECERTIFIED))]

    await served.run()

    assert served.sink.token_ids == right_tokens(6)


@pytest.mark.parametrize("reason", [Reason.WORKER_LOST, Reason.PREEMPTED])
async def test_a_resume_that_is_too_long_to_prefill_ends_as_it_was_interrupted(
    reason: Reason,
) -> None:
    served = Served()
    served.prefill.prompt_max_tokens = len(PROMPT)
    served.decodes[0].ends = [(2, failure(reason))]

    with pytest.raises(ServingError, match="too long to go on: prefill") as failed:
        await served.run()

    assert failed.value.reason is reason, "the request itself is within every limit"
    assert (len(served.prefill.calls), served.trail.deaths) == (2, reason is Reason.WORKER_LOST)
    assert not served.trail.at_work


async def test_a_prompt_that_no_group_is_certified_for_is_the_clients_fault() -> None:
    served = Served()
    served.prefill.prompt_max_tokens = len(PROMPT) - 1

    with pytest.raises(ServingError) as failed:
        await served.run()

    assert failed.value.reason is Reason.OUTSIDE_ENVELOPE


@pytest.mark.parametrize("kind", [NoAnswer, Unreached])
async def test_a_worker_that_is_merely_slow_or_out_of_reach_is_no_death(
    kind: type[NoAnswer],
) -> None:
    served = Served()
    served.prefill.failures = [kind("no"), kind("no")]

    await served.run()

    assert len(served.prefill.calls) == 3


async def test_a_spent_budget_sheds_the_resume() -> None:
    served = Served()
    served.fleet.resumes_left = 0
    served.decodes[0].ends = [(1, failure(Reason.PREEMPTED))]

    with pytest.raises(ServingError) as failed:
        await served.run()

    assert failed.value.reason is Reason.RESUME_BUDGET_EXHAUSTED
    assert served.sink.token_ids == right_tokens(2)


@pytest.mark.parametrize("stop_after", [1, 3])
async def test_a_sink_that_wants_no_more_ends_the_request_as_stopped(stop_after: int) -> None:
    served = Served()
    served.sink.stop_after = stop_after

    finish = await served.run()

    assert finish.finish_reason is FinishReason.STOP
    assert served.sink.token_ids == right_tokens(stop_after)


async def test_a_generation_that_ends_at_its_first_token_holds_nothing() -> None:
    served = Served()
    served.prefill.finish = FinishReason.STOP

    finish = await served.run()

    assert finish.finish_reason is FinishReason.STOP
    assert served.decodes[0].submits == []


async def test_the_deadline_ends_a_request_and_frees_what_it_holds() -> None:
    served = Served(sampling=replace(GREEDY, max_tokens=10**9))
    served.deadline_s = 0.05

    with pytest.raises(ServingError) as failed:
        await served.run()

    assert failed.value.reason is Reason.DEADLINE_EXCEEDED
