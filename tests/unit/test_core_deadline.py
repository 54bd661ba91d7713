"""Time: deadlines that are spent, and keys that fall due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwave.core.deadline import Deadline
from splitwave.core.due import Due


def test_a_deadline_is_spent_and_never_negative() -> None:
    deadline = Deadline(10.0)

    assert (deadline.remaining_s(4.0), deadline.passed(4.0)) == (6.0, False)
    assert (deadline.remaining_s(10.0), deadline.passed(10.0)) == (0.0, True)
    assert deadline.remaining_s(99.0) == 0.0


def test_a_hop_gets_a_share_of_what_is_left() -> None:
    assert Deadline(10.0).share_s(4.0, 0.5) == 3.0
    assert Deadline(10.0).share_s(12.0, 0.5) == 0.0


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5])
def test_a_share_is_a_fraction(fraction: float) -> None:
    with pytest.raises(AssertionError):
        Deadline(10.0).share_s(0.0, fraction)


steps = st.lists(
    st.tuples(st.sampled_from(["set", "drop", "pop"]), st.sampled_from("abcd"), st.integers(0, 9)),
    max_size=300,
)


@given(steps)
def test_keys_fall_due_at_the_time_that_was_said_last(steps: list[tuple[str, str, int]]) -> None:
    due: Due[str] = Due()
    model: dict[str, int] = {}
    for what, key, at_s in steps:
        match what:
            case "set":
                due.set(key, at_s)
                model[key] = at_s
            case "drop":
                due.drop(key)
                model.pop(key, None)
            case _:
                expected = sorted((t, k) for k, t in model.items() if t <= at_s)
                assert due.pop(at_s) == [k for _, k in expected]
                model = {k: t for k, t in model.items() if t > at_s}
        assert len(due) == len(model)


def test_what_was_moved_does_not_pile_up() -> None:
    due: Due[str] = Due()

    for at_s in range(10_000):
        due.set("a", at_s)

    assert due.entries <= 2 + 64
    assert due.pop(10_000) == ["a"]
