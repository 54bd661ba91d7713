"""The whole split comparison on simulated engines: every process is real, only steps are not."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any  # results are JSON

import psutil
import pytest

from bench.split import page

ROOT = Path(__file__).parents[2]
HEAD = """
words = "a test"
seed = 5
clients = 1
token_ids = [0, 255]
length_max_tokens = 512
[slo]
ttft_ms = 5000.0
itl_p99_ms = 2000.0
tpot_ms = 1000.0
attained_share = 0.9
give_up_share = 0.01
[sim]
step_fixed_s = 0.004
step_per_prefill_token_s = 0.00001
blocks_per_rank = 512
[times]
warm_s = 0.3
measure_s = {measure_s}
cool_s = 0.2
drain_s = 8.0
system_s = {system_s}
ready_s = 40.0
boot_s = 1.0
[[shapes]]
prompt_tokens = 64
completion_tokens = 8
rates = {rates}
streams = {streams}
"""
SPLIT = """
[systems.split]
kind = "split"
words = "apart"
front_ends = 2
router_arguments = {router}
groups = [
  {{ role = "prefill", devices = [0, 1], seats = 16, batch_tokens = 512 }},
  {{ role = "decode", devices = [2, 3], seats = 32, batch_tokens = 32 }},
]
"""
AGGREGATED = """
[systems.aggregated]
kind = "aggregated"
words = "together"
groups = [{ role = "both", devices = [0, 1, 2, 3], seats = 16, batch_tokens = 512 }]
"""
REPLICAS = """
[systems.replicas]
kind = "aggregated"
words = "twice together"
groups = [
  { role = "both", devices = [0, 1], seats = 16, batch_tokens = 512 },
  { role = "both", devices = [2, 3], seats = 16, batch_tokens = 512 },
]
"""
pytestmark = pytest.mark.timeout(150)


class Bench:
    """The command, with a workload of its own, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "split-sim.json"

    def write(self, *systems: str, **settings: object) -> None:
        """The workload's file."""
        given = {"measure_s": 1.0, "system_s": 100.0, "rates": [20], "streams": [4]} | settings
        systems_text = "".join(systems).replace("{router}", str(given.pop("router", [])))
        text = HEAD.format(**given) + systems_text.replace("{{", "{").replace("}}", "}")
        (self.folder / "split_test.toml").write_text(text)

    def command(self, *more: str) -> list[str]:
        """As one types it."""
        return [
            *(sys.executable, "-m", "bench.split", "split_test", "--engine", "sim"),
            *("--workloads", str(self.folder), "--out", str(self.out)),
            *("--run-dir", str(self.folder / "run"), *more),
        ]

    def run(self, *more: str) -> tuple[int, str]:
        """Exit code and what was said. No process may be left."""
        done = subprocess.run(
            self.command(*more), cwd=ROOT, capture_output=True, text=True, check=False, timeout=140
        )
        assert self.left() == []
        return done.returncode, done.stdout + done.stderr

    def left(self) -> list[int]:
        """Processes that work in the folder."""
        lines = {p.pid: p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])}
        return [pid for pid, line in lines.items() if str(self.folder) in " ".join(line)]

    def cells(self) -> dict[str, Any]:
        """Of the merged result, by name."""
        return {cell["cell"]: cell for cell in json.loads(self.out.read_text())["cells"]}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_every_system_serves_the_same_requests_and_a_done_cell_is_not_repeated(
    bench: Bench,
) -> None:
    bench.write(SPLIT, AGGREGATED, REPLICAS)
    code, said = bench.run()
    assert code == 0, said

    cells = bench.cells()
    assert list(cells) == [
        f"{system}.64x8.{load}"
        for system in ("split", "aggregated", "replicas")
        for load in ("poisson-20", "closed-4")
    ]
    assert {cell["status"] for cell in cells.values()} == {"done"}
    assert {(c["failed"], c["unfinished"]) for c in cells.values()} == {(0, 0)}
    rates = [cell for cell in cells.values() if cell["load"] == "poisson"]
    assert len({(cell["trace"], cell["requests"]) for cell in rates}) == 1
    assert min(cell["requests"] for cell in rates) > 5
    assert min(cell["requests"] for cell in cells.values()) > 0, "a busy machine answers few"
    assert all(cell["tokens_per_event"] >= 1.0 for cell in cells.values())
    assert all(0 < cell["ttft_ms"]["p50"] < cell["total_ms"]["p50"] for cell in cells.values())
    split = cells["split.64x8.poisson-20"]
    assert {role: each["out_of_mode"] for role, each in split["steps"].items()} == {
        "prefill": 0,
        "decode": 0,
    }
    assert split["steps"]["decode"]["prefill_tokens"] == 0
    assert split["steps"]["prefill"]["prefill_tokens"] >= 63 * split["requests"]
    assert split["steps"]["decode"]["bytes_pulled"] > 0
    assert set(split["cores_used"]) == {"prefill", "decode", "router-0", "router-1"}
    assert (bench.out.with_suffix(".cells") / "split.64x8.closed-4.rows.json.gz").exists()
    assert "sim: " in page.text({"split-sim": json.loads(bench.out.read_text())})

    began_s = time.monotonic()
    code, said = bench.run()

    assert (code, "starts" in said) == (0, False)
    assert time.monotonic() - began_s < 20.0
    assert bench.cells() == cells


def test_a_system_that_does_not_start_is_a_row_with_the_reason(bench: Bench) -> None:
    bench.write(SPLIT, AGGREGATED, router=["--no-such-flag"], rates=[])
    code, said = bench.run()
    assert code == 1, said

    cells = bench.cells()
    assert cells["split.64x8.closed-4"]["status"] == "failed"
    assert re.search(r"router-[01] ended with 2", cells["split.64x8.closed-4"]["reason"])
    assert "--no-such-flag" in cells["split.64x8.closed-4"]["reason"]
    assert cells["aggregated.64x8.closed-4"]["status"] == "done"


def test_a_system_that_is_lost_fails_its_cell_and_starts_again_for_the_rest(bench: Bench) -> None:
    bench.write(AGGREGATED, measure_s=2.0)
    with subprocess.Popen(
        bench.command(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "begun aggregated.64x8.poisson-20" in line:
                for pid in bench.left():
                    words = psutil.Process(pid).cmdline()
                    if "bench.split.sim_server" in words:
                        os.kill(pid, signal.SIGKILL)
    assert process.returncode == 1, "".join(said)

    lost, other = bench.cells().values()
    assert lost["status"] == "failed"
    assert "server-0 ended with -9" in lost["reason"]
    assert other["status"] == "done"
    assert "".join(said).count("aggregated: starts") == 2
    assert bench.left() == []


def test_nothing_is_begun_that_does_not_fit_into_the_budget(bench: Bench) -> None:
    bench.write(AGGREGATED, rates=[], system_s=9.0)
    code, said = bench.run("--budget-s", "5")
    assert (code, bench.cells()) == (1, {})
    assert "aggregated: needs 14 s, 5 s are left" in said

    code, said = bench.run()

    assert (code, bench.cells()) == (1, {})
    assert "stopped no time is left cell aggregated.64x8.closed-4" in said, "nor into the limit"


def test_an_interrupt_leaves_no_process(bench: Bench) -> None:
    bench.write(SPLIT, measure_s=60.0)
    with subprocess.Popen(
        bench.command(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "begun split.64x8.poisson-20" in line:
                assert len(bench.left()) > 4
                process.send_signal(signal.SIGINT)
    assert process.returncode != 0

    for _ in range(100):
        if not bench.left():
            break
        time.sleep(0.1)
    assert bench.left() == []
