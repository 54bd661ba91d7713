"""Floats, truthful retry times and draining, by example."""

from dataclasses import replace

import pytest

from splitwave.core.errors import Reason
from splitwave.core.grant import Ask, DeskSettings, Grant, GrantDesk, GrantTable

SETTINGS = DeskSettings(float_max=2, float_share=0.7, grant_blocks=2)


def floated(table: GrantTable, desk: GrantDesk, *session_ids: str) -> list[str]:
    """Who gets pushed grants, in their order, when these sessions open."""
    for session_id in session_ids:
        desk.open(session_id)
    told = [out for out in desk.settle(0.0) if isinstance(out, Grant)]
    assert sum(grant.blocks for grant in told) == sum(table.blocks_used)
    return [grant.session_id for grant in told]


def test_floats_are_filled_at_once_and_turn_by_turn() -> None:
    table = GrantTable(ranks=1, seats_per_rank=40, blocks_per_rank=400)
    desk = GrantDesk(table, SETTINGS)

    assert floated(table, desk, "s0", "s1") == ["s0", "s1", "s0", "s1"]


def test_floats_leave_most_blocks_for_those_who_ask() -> None:
    """By seats alone the floats would be 4 grants of 16 blocks, which is all there is."""
    table = GrantTable(ranks=1, seats_per_rank=32, blocks_per_rank=64)
    desk = GrantDesk(table, replace(SETTINGS, float_max=4, float_share=0.25, grant_blocks=16))

    assert floated(table, desk, "s0") == ["s0"]


def test_a_full_group_says_truthfully_when_to_come_again() -> None:
    """Ten ends a second and nine asks before this one: in about a second."""
    table = GrantTable(ranks=1, seats_per_rank=30, blocks_per_rank=30)
    desk = GrantDesk(table, DeskSettings(grant_blocks=1, float_max=0))
    desk.open("s0")
    for i in range(30):
        grant = table.grant("s0", 1, 1e9)
        assert grant is not None
        table.spend("s0", grant.grant_id, f"a{i}")
    for i in range(20):
        desk.freed(f"a{i}", i * 0.1)
    for i in range(9):
        desk.ask(Ask("s0", f"q{i}", 25, 99.0), 2.0)

    assert desk.retry_after_s(2.0) == pytest.approx(1.0)


def test_a_worker_that_has_ended_nothing_yet_asks_for_a_second() -> None:
    table = GrantTable(ranks=1, seats_per_rank=1, blocks_per_rank=1)

    assert GrantDesk(table, DeskSettings()).retry_after_s(5.0) == 1.0


def test_a_draining_desk_refuses_who_waits() -> None:
    table = GrantTable(ranks=1, seats_per_rank=1, blocks_per_rank=4)
    desk = GrantDesk(table, DeskSettings(float_max=0))
    desk.open("s0")
    desk.ask(Ask("s0", "q1", 4, 99.0), 0.0)

    refused = desk.refuse_all(Reason.WORKER_DRAINING, "draining")

    assert [(r.ask_id, r.reason) for r in refused] == [("q1", Reason.WORKER_DRAINING)]
    assert list(desk.settle(0.0)) == []
    desk.check(settled=True)
