"""One rank's walk in this process: when it waits, sends host-synchronised, stops and why."""

import sys
from pathlib import Path
from typing import Any  # collectives that are not there

import pytest
import torch
import torch.distributed as dist

from bench.hammer import rank
from bench.hammer.beat import Beat
from bench.hammer.device import Cpu
from bench.hammer.rank import Walker, WrongCount
from bench.hammer.settings import parse
from bench.hammer.transports import BareLegacy
from splitwave.certify.hammer.verdict import Verdict
from tests.unit.deep_ep_stand_in import Buffer, module

ARGUMENTS = [
    "--transport", "legacy_unfixed", "--sizes", "8,16", "--hidden", "16", "--experts", "8",
    "--topk", "2", "--ranks", "1", "--replays", "60", "--skew-ms", "1", "--skew-budget-s", "0.01",
]  # fmt: skip


class Watched(Cpu):
    """Counts what a rank asks of its device."""

    def __init__(self) -> None:
        self.drained = self.spun = self.tickets = 0

    def drain(self) -> None:
        self.drained += 1

    def spin(self, ms: float) -> None:
        self.spun += 1

    def ticket(self) -> Any:
        self.tickets += 1
        return super().ticket()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", module())
    monkeypatch.setattr(rank, "connect", lambda settings, group: BareLegacy(settings, group))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda flags: None)


def walker(tmp_path: Path, *more: str) -> tuple[Walker, Watched]:
    device = Watched()
    made = Walker(parse([*ARGUMENTS, *more]), 0, Beat(tmp_path, 0), device)
    made.prepare()
    device.drained = 0
    return made, device


def test_a_right_transport_walks_to_the_end(tmp_path: Path) -> None:
    made, device = walker(tmp_path)

    assert made.walk() is Verdict.PASSED
    assert (made.replays, made.wrong) == (60, "")
    assert device.tickets == 60
    assert device.drained == 0
    assert device.spun > 3


@pytest.mark.parametrize("drain", ["stream", "barrier"])
def test_draining_waits_after_each_replay_and_before_a_synchronised_dispatch(
    tmp_path: Path, drain: str
) -> None:
    made, device = walker(tmp_path, "--drain", drain)
    made.walk()

    assert device.drained > 60


def test_a_count_that_is_another_dispatchs_ends_the_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = {"rows": 0}
    right = Buffer.dispatch

    def racy(self: Buffer, **given: Any) -> tuple[object, ...]:
        """Return the number of rows of the replay before, as a host that polled too early does."""
        if given["num_worst_tokens"]:
            last["rows"] = int((given["topk_idx"] >= 0).any(dim=1).sum())
            return right(self, **given)
        return right(self, **(given | {"num_worst_tokens": last["rows"]}))

    monkeypatch.setattr(Buffer, "dispatch", racy)
    made, _ = walker(tmp_path)

    with pytest.raises(WrongCount, match=r"replay \d+: \d+ rows received, \d+ were sent"):
        made.walk()
    assert made.replays < 59


def test_a_wrong_row_stops_the_walk_with_the_step_it_came_from(tmp_path: Path) -> None:
    made, _ = walker(tmp_path, "--plant", "wrong_row@20:0")

    assert made.walk() is Verdict.WRONG_ROWS
    assert made.wrong.startswith("1 wrong rows in 1 replays")
    assert "first in replay 20, row 0: Step(size=" in made.wrong


def test_a_walk_out_of_time_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "CHECK_EVERY", 10)
    made, _ = walker(tmp_path, "--seconds", "0")

    assert made.walk() is Verdict.SHORT
    assert made.replays == 10


def test_a_device_that_answers_nothing_leaves_the_last_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, device = walker(tmp_path)
    made.walk()
    assert made.look() == (60, ("layer 1 combined",))

    def broken(marks: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(device, "peek", broken)
    assert made.look() is None
