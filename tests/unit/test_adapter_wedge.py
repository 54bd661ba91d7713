"""What a group says when one of its ranks has given up waiting: processes are real, engines not."""

import asyncio
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any  # stands for what vLLM's launch returns

import pytest

from splitwave.engine.port import EngineDied, Role
from splitwave.engine.vllm import launch
from splitwave.engine.vllm.config import VllmGroupSettings
from splitwave.engine.vllm.launch import Processes
from splitwave.engine.vllm.worst_token import wedge
from splitwave.engine.vllm.worst_token.collectives import CollectiveLog

FORK = multiprocessing.get_context("fork")


def settings(log_dir: Path, *, group_id: str = "g", epoch: int = 1) -> VllmGroupSettings:
    return VllmGroupSettings(
        role=Role.DECODE,
        mode="decode_cpu_eager",
        model_path=Path(),
        served_model="m",
        group_id=group_id,
        epoch=epoch,
        log_dir=log_dir,
        ranks=2,
        side_channel_port=8100,
    )


def engine(code: int, after: Any) -> None:
    """Stand for a rank: end with this code when told to."""
    after.wait(20.0)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


@dataclass
class Group:
    """A group of two ranks whose ends the test decides."""

    processes: Processes
    tell: list[Any] = field(default_factory=list)
    ranks: list[BaseProcess] = field(default_factory=list)

    def start(self, *codes: int) -> None:
        for code in codes:
            self.tell.append(FORK.Event())
            process = FORK.Process(target=engine, args=(code, self.tell[-1]), daemon=True)
            process.start()
            self.ranks.append(process)
        engines = SimpleNamespace(processes=self.ranks, shutdown=lambda timeout: None)
        self.processes._launch = SimpleNamespace(engine_manager=engines, coordinator=None)  # noqa: SLF001  # vLLM's part of `fork`
        self.processes._watch()  # noqa: SLF001  # the rest of it

    def end(self, rank: int) -> None:
        self.tell[rank].set()

    async def died(self) -> EngineDied:
        return await asyncio.wait_for(asyncio.shield(self.processes.died), 10.0)

    async def closed(self) -> None:
        for told in self.tell:
            told.set()
        await self.processes.close()


def group(log_dir: Path) -> Group:
    return Group(Processes(settings(log_dir), None))


def report(kind: str = "dispatch") -> dict[str, Any]:
    """Report of a rank whose first such collective does not end."""
    log = CollectiveLog()
    log.launched(kind)
    return log.report({}, 0.0)


async def test_a_rank_that_gave_up_is_told_with_what_all_ranks_say(tmp_path: Path) -> None:
    wedged = group(tmp_path)
    wedged.start(wedge.EXIT_CODE, 0)
    for rank in (0, 1):
        wedge.write_report(wedged.processes.logs.wedge_dir, rank, report())
    start_s = time.monotonic()
    wedged.end(0)

    died = await wedged.died()

    assert time.monotonic() - start_s < launch.REPORTS_WAIT_S
    assert died.rank == 0
    assert "has given up waiting for its peers (exit code 71)" in str(died)
    said = "all reporting ranks are in the same place: rank 0: dispatch 1; rank 1: dispatch 1"
    assert said in str(died)
    assert str(wedged.processes.logs.path(0)) in str(died)
    await wedged.closed()


async def test_a_report_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    wedged = group(tmp_path)
    wedged.start(wedge.EXIT_CODE, 0)
    directory = wedged.processes.logs.wedge_dir
    wedge.write_report(directory, 0, report())
    wedged.end(0)
    asyncio.get_running_loop().call_later(0.5, wedge.write_report, directory, 1, report("combine"))

    died = str(await wedged.died())

    assert "ranks are in different collectives: rank 0: dispatch 1; rank 1: combine 1" in died
    await wedged.closed()


async def test_a_rank_that_says_nothing_is_named_after_a_bounded_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "REPORTS_WAIT_S", 0.3)
    wedged = group(tmp_path)
    wedged.start(wedge.EXIT_CODE, 0)
    wedge.write_report(wedged.processes.logs.wedge_dir, 0, report())
    wedged.end(0)

    assert "rank 0: dispatch 1; no report from rank 1" in str(await wedged.died())
    await wedged.closed()


def test_the_wait_for_reports_is_three_seconds_at_most() -> None:
    assert launch.REPORTS_WAIT_S <= 3.0
    assert launch.DEATH_WAIT_S > launch.REPORTS_WAIT_S


async def test_the_end_of_another_rank_meanwhile_hides_nothing(tmp_path: Path) -> None:
    wedged = group(tmp_path)
    wedged.start(wedge.EXIT_CODE, 1)
    directory = wedged.processes.logs.wedge_dir
    wedge.write_report(directory, 0, report())
    wedged.end(0)
    wedged.ranks[0].join(10.0)
    await asyncio.sleep(0.2)
    wedged.end(1)
    wedged.ranks[1].join(10.0)
    await asyncio.sleep(0.2)
    assert not wedged.processes.died.done()
    wedge.write_report(directory, 1, report())

    assert "all reporting ranks are in the same place" in str(await wedged.died())
    await wedged.closed()


@pytest.mark.parametrize(
    ("code", "words"),
    [(1, "exited with status 1;"), (-signal.SIGKILL, "was killed by SIGKILL;")],
)
async def test_other_ends_are_told_at_once_and_as_they_are(
    tmp_path: Path, code: int, words: str
) -> None:
    dead = group(tmp_path)
    dead.start(0, code)
    dead.end(1)

    died = await dead.died()

    assert words in str(died)
    assert "exit code 71" not in str(died)
    assert died.rank == 1
    await dead.closed()


async def test_a_group_that_is_closed_while_it_asks_asks_no_more(tmp_path: Path) -> None:
    wedged = group(tmp_path)
    wedged.start(wedge.EXIT_CODE, 0)
    wedged.end(0)
    wedged.ranks[0].join(10.0)
    await asyncio.sleep(0.2)

    await wedged.closed()
    await asyncio.sleep(0)

    assert str(await wedged.died()) == "the group was closed"
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "wedge reports"]


async def test_reports_of_an_earlier_start_are_removed_and_groups_and_epochs_kept_apart(
    tmp_path: Path,
) -> None:
    first = Processes(settings(tmp_path), None).logs.wedge_dir
    wedge.write_report(first, 1, report())

    again = Processes(settings(tmp_path), None).logs.wedge_dir
    others = [
        Processes(one, None).logs.wedge_dir
        for one in (settings(tmp_path, epoch=2), settings(tmp_path, group_id="h"))
    ]

    assert again == first
    assert wedge.read_reports(again) == {}
    assert again.is_absolute()
    assert len({again, *others}) == 3
