"""What a router takes on, and how often it tries again."""

import pytest

from services.router.budget import Admission, ResumeBudget
from splitwave.core.errors import Reason, ServingError


def test_a_burst_is_let_through_and_refills_with_time() -> None:
    budget = ResumeBudget(per_s=2.0, burst=3, now_s=0.0)
    for _ in range(3):
        budget.spend(now_s=0.0)

    with pytest.raises(ServingError) as spent:
        budget.spend(now_s=0.25)
    budget.spend(now_s=0.5)

    assert spent.value.reason is Reason.RESUME_BUDGET_EXHAUSTED
    assert spent.value.retry_after_s == pytest.approx(0.25)


def test_a_long_calm_is_no_licence_for_more_than_a_burst() -> None:
    budget = ResumeBudget(per_s=2.0, burst=1, now_s=0.0)
    budget.spend(now_s=1000.0)

    with pytest.raises(ServingError):
        budget.spend(now_s=1000.0)


def test_a_budget_without_refill_names_no_time_to_wait() -> None:
    budget = ResumeBudget(per_s=0.0, burst=0, now_s=0.0)

    with pytest.raises(ServingError) as spent:
        budget.spend(now_s=5.0)

    assert spent.value.retry_after_s is None


def test_requests_beyond_the_limit_are_refused_until_one_ends() -> None:
    admission = Admission(live_max=1)
    with admission.admit():
        assert not admission.idle.is_set()
        with pytest.raises(ServingError) as refused, admission.admit():
            pass

    with admission.admit():
        pass
    assert refused.value.reason is Reason.OVERLOADED
    assert (admission.live, admission.idle.is_set()) == (0, True)


def test_a_failed_request_is_live_no_more() -> None:
    admission = Admission(live_max=1)
    with pytest.raises(ZeroDivisionError), admission.admit():
        raise ZeroDivisionError

    assert admission.live == 0


def test_nobody_is_let_in_once_it_is_closed() -> None:
    admission = Admission(live_max=1)
    admission.closed = True

    with pytest.raises(ServingError) as refused, admission.admit():
        pass

    assert refused.value.reason is Reason.WORKER_DRAINING


def test_more_than_can_ever_be_live_is_no_matter_of_waiting() -> None:
    admission = Admission(live_max=3)

    with pytest.raises(ServingError, match=r"^n: 4 completions") as refused, admission.admit(4):
        pass

    assert (refused.value.reason, refused.value.retry_after_s) == (Reason.INVALID_REQUEST, None)
    assert admission.refused.total() == 0, "nor of load"
    with admission.admit(3):
        pass
