"""How the waves' figures are counted, and that both coordinators get the same engines."""

import os
from pathlib import Path
from typing import Any  # vLLM's side is not started

import pytest

from bench import waves
from splitwave.engine.vllm.switches import FAULTS


class Engine:
    """Two ranks that make some steps each time they are looked at."""

    def __init__(self, looks: list[waves.Steps]) -> None:
        self.looks = looks
        self.ran: list[int] = []

    async def run(self, rank: int, tokens: int) -> None:
        self.ran.append(rank)


async def test_steps_behind_the_last_answer_are_waited_for_and_counted_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = [(10, 1), (10, 1), (74, 9), (78, 13), (82, 17), (82, 17)]
    engine = Engine([waves.Steps(*look) for look in seen])

    async def steps(client: Engine) -> waves.Steps:
        return client.looks.pop(0)

    monkeypatch.setattr(waves, "steps", steps)
    monkeypatch.setattr(waves, "SLEEP_S", 0.0)

    cost = await waves.loaded(engine, 3)  # type: ignore[arg-type]  # like a client

    assert cost == {"steps": 72, "dummy": 16, "dummy_behind": 8}
    assert engine.ran == [0, 1, 0]
    assert engine.looks == []


def test_shares_are_of_all_goes_together() -> None:
    rounds = [
        {"8": [{"steps": 100, "dummy": 10, "dummy_behind": 4}]},
        {"8": [{"steps": 300, "dummy": 90, "dummy_behind": 12}]},
    ]

    assert waves.dummy_shares(rounds) == {
        "dummy_share": {"8": 0.25},
        "dummy_share_range": {"8": [0.1, 0.3]},
        "dummy_behind_share": {"8": 0.04},
    }


async def test_both_coordinators_get_the_same_engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = []

    async def start_group(settings: Any) -> None:
        started.append((settings, os.environ[FAULTS]))
        raise ConnectionAbortedError

    monkeypatch.setattr(waves, "start_group", start_group)
    monkeypatch.setenv(FAULTS, "")
    for fault in ("stock_coordinator", ""):
        with pytest.raises(ConnectionAbortedError):
            await waves.measure(tmp_path, tmp_path, fault)

    (stock, fault), (ours, none) = started
    assert (fault, none) == ("stock_coordinator", "")
    assert stock == ours
