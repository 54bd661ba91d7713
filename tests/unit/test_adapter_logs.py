"""Log files of engine processes."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from splitwave.engine.vllm.logs import COORDINATOR, TAIL_LINES_MAX, ProcessLogs

ROOT = Path(__file__).parents[2]


def say(text: str) -> None:
    """Write to both streams, below Python's own buffers, as native code does."""
    os.write(1, f"{text} out\n".encode())
    os.write(2, f"{text} err {os.getpgid(0) == os.getpid()}\n".encode())


def pause(write: Connection) -> None:
    """Say that this process is up, and wait for a signal."""
    write.send("up")
    signal.pause()


def run(logs: ProcessLogs, name: str, *, capturing: bool = True) -> None:
    process = multiprocessing.get_context("fork").Process(target=say, args=(name,), name=name)
    if capturing:
        with logs.capturing():
            process.start()
    else:
        process.start()
    process.join(10)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("ranks", "name", "who"),
    [
        (1, "EngineCore", 0),
        (2, "EngineCore_DP0", 0),
        (2, "EngineCore_DP1", 1),
        (2, "VLLM_DP_Coordinator", COORDINATOR),
    ],
)
def test_a_process_writes_to_its_own_file_and_leads_its_own_group(
    tmp_path: Path, ranks: int, name: str, who: int | str
) -> None:
    logs = ProcessLogs(tmp_path, "g", 3, ranks)

    run(logs, name)

    assert logs.tail(who).splitlines() == [f"{name} out", f"{name} err True"]
    assert [path.name for path in tmp_path.iterdir()] == [logs.path(who).name]


async def test_a_signal_to_an_engine_is_its_own_and_not_the_workers(tmp_path: Path) -> None:
    heard: list[str] = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, heard.append, "worker")
    logs = ProcessLogs(tmp_path, "g", 3, 1)
    read, write = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=pause, args=(write,), name="EngineCore", daemon=True
    )
    with logs.capturing():
        process.start()
    assert read.recv() == "up"

    process.terminate()
    process.join(10)
    for _ in range(5):
        await asyncio.sleep(0)  # the loop looks at its wakeup descriptor

    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    assert process.exitcode == -signal.SIGTERM
    assert heard == []


def test_a_process_of_another_name_keeps_its_streams(tmp_path: Path) -> None:
    logs = ProcessLogs(tmp_path, "g", 3, 1)

    run(logs, "SomethingElse")

    assert list(tmp_path.iterdir()) == []


def test_after_the_block_nothing_is_captured(tmp_path: Path) -> None:
    logs = ProcessLogs(tmp_path, "g", 3, 1)
    with logs.capturing():
        pass

    run(logs, "EngineCore", capturing=False)

    assert list(tmp_path.iterdir()) == []


PARENT = """
import multiprocessing, os, signal, sys
from pathlib import Path
from splitwave.engine.vllm.logs import ProcessLogs

def engine(write):
    signal.alarm(20)  # if the kernel does not end it, this does
    os.write(write, b"up")
    signal.pause()

logs = ProcessLogs(Path(sys.argv[1]), "g", 3, 1)
context = multiprocessing.get_context("fork")
with logs.capturing():
    context.Process(target=engine, args=(int(sys.argv[2]),), name="EngineCore").start()
os.close(int(sys.argv[2]))
signal.pause()
"""


def test_a_killed_parent_takes_its_engine_along(tmp_path: Path) -> None:
    read, write = os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), str(write)], pass_fds=[write], cwd=ROOT
    )
    os.close(write)
    with parent, os.fdopen(read, "rb", buffering=0) as pipe:
        assert pipe.read(2) == b"up"
        parent.kill()
        assert pipe.read(1) == b"", "the engine's end is closed: it is gone"


def test_the_tail_is_bounded(tmp_path: Path) -> None:
    logs = ProcessLogs(tmp_path, "g", 3, 1)
    logs.path(0).write_text("".join(f"line {n}\n" for n in range(1000)))

    lines = logs.tail(0).splitlines()

    assert len(lines) == TAIL_LINES_MAX
    assert lines[-1] == "line 999"


def test_a_process_that_wrote_nothing_has_an_empty_tail(tmp_path: Path) -> None:
    assert ProcessLogs(tmp_path, "g", 3, 1).tail(0) == ""


def test_a_start_is_as_far_as_its_last_sign(tmp_path: Path) -> None:
    logs = ProcessLogs(tmp_path, "g", 3, 1)
    said = [logs.milestone(0)]
    for line in ("Initializing a V1 LLM engine (v0)", "Loading weights took 3 s", "noise"):
        with logs.path(0).open("a") as file:
            file.write(f"(EngineCore pid=1) {line}\n")
        said.append(logs.milestone(0))

    assert said == ["", "process is up", "weights loaded", "weights loaded"]
