"""A handoff has one owner at a time, and only the router's own are released."""

import pytest

from services.router.held import Held, Owner


def held_and_released() -> tuple[Held, list[str]]:
    released: list[str] = []
    return Held("h", lambda held: released.append(held.handoff_id)), released


def test_a_handoff_that_nobody_was_asked_for_is_not_released() -> None:
    held, released = held_and_released()

    with held:
        pass

    assert released == []


def test_it_is_released_once_a_worker_may_hold_it() -> None:
    held, released = held_and_released()

    with held:
        held.asked("p0")

    assert (released, held.owner) == (["h"], Owner.NOBODY)


def test_it_is_not_released_where_the_worker_holds_nothing() -> None:
    held, released = held_and_released()

    with held:
        held.asked("p0")
        held.nothing_held()

    assert released == []


def test_decode_owns_it_once_it_has_accepted() -> None:
    held, released = held_and_released()

    with held:
        held.asked("p0")
        held.offered()
        held.moved()

    assert (released, held.owner) == ([], Owner.DECODE)


@pytest.mark.parametrize("left_first", [True, False])
def test_a_refused_one_is_ours_again_whether_or_not_someone_still_waits(left_first: bool) -> None:
    held, released = held_and_released()

    with held:
        held.asked("p0")
        held.offered()
        if not left_first:
            held.returned()
    if left_first:
        assert released == []
        held.returned()

    assert released == ["h"]


def test_an_offer_that_a_lost_session_left_unanswered_is_left_to_its_lease() -> None:
    held, released = held_and_released()

    with held:
        held.asked("p0")
        held.offered()
    held.lost()

    assert (released, held.owner) == ([], Owner.LEASE)


@pytest.mark.parametrize("step", ["offered", "moved", "returned", "lost", "nothing_held"])
def test_no_step_is_taken_by_anyone_but_the_owner(step: str) -> None:
    held, _ = held_and_released()

    with pytest.raises(AssertionError):
        getattr(held, step)()
