"""What may be tried again, for every reason there is."""

import pytest

from splitwave.core.errors import Reason, ServingError

AGAIN = {
    "INVALID_REQUEST": "never",
    "UNSUPPORTED_FEATURE": "never",
    "MODEL_NOT_FOUND": "never",
    "DEADLINE_REQUIRED": "never",
    "OVERLOADED": "elsewhere",
    "KV_CAPACITY_EXHAUSTED": "elsewhere",
    "GRANT_UNKNOWN": "elsewhere",
    "POOL_UNAVAILABLE": "never",
    "WORKER_DRAINING": "elsewhere",
    "WORKER_LOST": "elsewhere",
    "EPOCH_MISMATCH": "elsewhere",
    "HANDOFF_EXPIRED": "resumed",
    "HANDOFF_FAILED": "resumed",
    "KV_LAYOUT_MISMATCH": "resumed",
    "PREEMPTED": "resumed",
    "DEADLINE_EXCEEDED": "never",
    "STALLED": "never",
    "CANCELLED": "never",
    "REQUEST_QUARANTINED": "never",
    "RESUME_BUDGET_EXHAUSTED": "never",
    "INTERNAL": "never",
    "OUTSIDE_ENVELOPE": "never",
    "GROUP_DECERTIFIED": "elsewhere",
}
"""`elsewhere`: the same call on another worker, or a resume. `resumed`: a new prefill only."""


def test_a_new_reason_must_be_decided() -> None:
    assert set(AGAIN) == set(Reason.__members__)


@pytest.mark.parametrize("reason", Reason)
def test_what_is_tried_again(reason: Reason) -> None:
    assert reason.worker_elsewhere is (AGAIN[reason.name] == "elsewhere")
    assert reason.resumable is (AGAIN[reason.name] != "never")


def test_an_error_shows_its_reason_and_message() -> None:
    error = ServingError(Reason.STALLED, "no token for 5 s", retry_after_s=None)

    assert repr(error) == "ServingError(STALLED, 'no token for 5 s')"
    assert str(error) == "no token for 5 s"
