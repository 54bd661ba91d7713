"""The split comparison's plan: what is asked of whom, on which GPUs, and what is left to do."""

import dataclasses
import itertools
import json
import random
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any  # settings as they are written

import pytest

from bench.split import __main__ as command
from bench.split import devices, programs
from bench.split.balance import Balancer, Board
from bench.split.cells import Cell, Chosen, Store, wanted
from bench.split.programs import Place, launch
from bench.split.settings import FOLDER, Comparison, Load, SettingsError
from bench.split.trace import Trace
from services.decode.config import DecodeConfig
from services.prefill.config import PrefillConfig
from services.router.config import RouterConfig
from splitwave.core.worker import Role
from splitwave.engine.vllm.config import VllmGroupSettings
from splitwave.runtime import config
from splitwave.runtime.worker import WorkerConfig, make_group_settings

FILES = sorted(path.stem for path in FOLDER.glob("split*.toml"))
H200 = Comparison.read("split_h200")
SIM = Comparison.read("split_sim")


def trace(load: Load, **changes: Any) -> Trace:
    given: dict[str, Any] = {
        "seed": 7, "load": load, "prompt_tokens": 64, "completion_tokens": 8,
        "token_ids": (3, 99), "warm_s": 2.0, "until_s": 400.0,
    }  # fmt: skip
    return Trace(**given | changes)


def poisson(rate: float) -> Load:
    return Load(kind="poisson", value=rate)


@pytest.mark.parametrize("name", FILES)
def test_each_file_can_be_read_and_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([name, "--engine", "sim", "--check"]) == 0

    assert "all: about" in capsys.readouterr().out


def test_the_comparison_on_gpus_is_the_one_that_was_asked_for() -> None:
    shapes = [(shape.prompt_tokens, shape.completion_tokens) for shape in H200.shapes]
    ranks = {s.name: [len(group.devices) for group in s.groups] for s in H200.systems}

    assert shapes == [(512, 128), (1024, 128), (1024, 1024)]
    assert ranks == {"split": [2, 2], "aggregated": [4], "replicas": [2, 2]}
    assert {s.streams for s in H200.shapes} == {(64, 128, 256, 512, 1024)}
    assert all(len(shape.rates) >= 4 for shape in H200.shapes)
    assert {len(set(system.devices)) for system in H200.systems} == {4}


def test_every_system_has_the_same_seats_for_generating_requests() -> None:
    for comparison in (H200, SIM):
        seats = {
            system.name: sum(
                group.seats * len(group.devices)
                for group in system.groups
                if group.role != "prefill"
            )
            for system in comparison.systems
        }

        assert len(set(seats.values())) == 1, seats


def test_arrivals_are_the_seeds_alone() -> None:
    once, again = trace(poisson(5)), trace(poisson(5))

    assert once.arrivals_s() == again.arrivals_s()
    assert once.prompt(3) == again.prompt(3) != once.prompt(4)
    assert once.digest() == again.digest()
    others = [trace(poisson(5), seed=8), trace(poisson(6)), trace(poisson(5), prompt_tokens=65)]
    assert once.digest() not in [other.digest() for other in others]


def test_arrivals_are_poissons() -> None:
    due = trace(poisson(50)).arrivals_s()
    gaps = [later - earlier for earlier, later in itertools.pairwise(due)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)

    assert due == sorted(due)
    assert max(due) < 400.0
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert variance**0.5 / mean == pytest.approx(1.0, rel=0.05)  # Of exponential gaps it is 1.


def test_prompts_have_the_length_and_the_ids() -> None:
    prompt = trace(poisson(5)).prompt(0)

    assert len(prompt) == 64
    assert set(prompt) <= set(range(3, 100))


def test_streams_begin_within_half_the_warm_up_and_number_their_requests_apart() -> None:
    closed = trace(Load(kind="closed", value=16))
    numbers = {closed.number(stream, turn) for stream in range(16) for turn in range(10)}

    assert len(closed.starts_s()) == 16
    assert 0.0 <= min(closed.starts_s()) <= max(closed.starts_s()) < 1.0
    assert len(numbers) == 160


def test_the_less_loaded_of_two_addresses_is_taken_over_all_clients(tmp_path: Path) -> None:
    Board.make(tmp_path / "board", 2, 2)
    one, other = (
        Balancer(Board(tmp_path / "board", 2, 2), client, random.Random(client))
        for client in (0, 1)
    )
    taken = [one.take() for _ in range(10)]

    assert sorted(taken) == [0] * 5 + [1] * 5
    for place in taken:
        if place == 0:
            one.give(place)
    assert [other.take() for _ in range(5)] == [0] * 5, "it sees what the other client has there"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("systems", "split", "groups", 1, "devices"), [1, 2], "a GPU is in two groups"),
        (("systems", "split", "groups", 0, "role"), "decode", "one prefill and one decode"),
        (("systems", "aggregated", "kind"), "both", "kind: is one of split, aggregated"),
        (("systems", "split", "groups", 0, "mode"), "decode_graph_ht", "no mode of that role"),
        (("systems", "split", "groups", 0, "devices"), [], "name one GPU a rank"),
        (("shapes", 0, "rates"), [4, 2], "ascending"),
        (("shapes", 0, "prompt_tokens"), 4000, "raise length_max_tokens"),
        (("shapes", 0, "times"), {"hot_s": 1.0}, r"names what \[times\] does not have"),
        (("slo", "attained_share"), 1.5, "above 0"),
        (("slo", "p99_ms"), 1.5, "p99_ms"),
        (("clients",), 0, "at least 1"),
        (("device",), "tpu", "gpu or cpu"),
    ],
)
def test_what_cannot_be_run_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: tuple[str | int, ...],
    value: object,
    words: str,
) -> None:
    told: Any = tomllib.loads((FOLDER / "split_sim.toml").read_text())
    place = told
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "split_sim.toml").touch()
    monkeypatch.setattr("bench.split.settings.tomllib.loads", lambda text: told)

    with pytest.raises(SettingsError, match=words):
        Comparison.read("split_sim", tmp_path)


def test_too_few_gpus_are_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    devices.check(H200.systems, ["0", "1", "2", "3"])
    with pytest.raises(SettingsError, match="on GPUs 0, 1, 2, 3, which takes 4; 2 can be seen"):
        devices.check(H200.systems, ["0", "1"])

    if len(devices.present()) < 4:
        assert command.main(["split_h200", "--model", "m", "--out", "o/split-h200.json"]) == 2
        assert "test with --engine sim" in capsys.readouterr().err


def test_gpus_are_those_that_are_visible(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()

    assert devices.present({}, tmp_path) == ["0", "1"]
    assert devices.present({"CUDA_VISIBLE_DEVICES": "4,6"}, tmp_path) == ["4", "6"]
    assert devices.present({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert devices.visible((0, 1), ["4", "6"]) == "4,6"


@pytest.mark.parametrize("engine", ["sim", "vllm"])
def test_only_results_of_simulated_engines_say_sim(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = "o/split-h200.json" if engine == "sim" else "o/split-sim.json"

    assert command.main(["split_sim", "--engine", engine, "--out", out, "--model", "m"]) == 2
    assert "says `sim`" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--systems", "--shapes", "--loads"])
def test_a_part_that_is_not_there_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["split_sim", "--engine", "sim", "--out", "sim", flag, "other"]) == 2

    assert "no 'other'; there are " in capsys.readouterr().err


def place(tmp_path: Path, engine: str = "vllm") -> Place:
    return Place(
        engine=engine, model_path=tmp_path, model="m", run_dir=tmp_path, gpus=("4", "5", "6", "7")
    )


def test_each_group_sees_its_own_gpus(tmp_path: Path) -> None:
    seen = {
        system.name: {
            program.name: program.env.get("CUDA_VISIBLE_DEVICES")
            for program in launch(H200, system, place(tmp_path)).programs
        }
        for system in H200.systems
    }

    routers = {f"router-{index}": None for index in range(4)}
    assert seen["split"] == {"prefill": "4,5", "decode": "6,7", **routers}
    assert seen["aggregated"] == {"server-0": "4,5,6,7"}
    assert seen["replicas"] == {"server-0": "4,5", "server-1": "6,7"}


def test_programs_of_the_split_take_what_they_are_told(tmp_path: Path) -> None:
    """Read as the programs themselves read it."""
    launched = launch(H200, H200.system("split"), place(tmp_path))
    told = {p.name: p.command[p.command.index("-m", 3) + 2 :] for p in launched.programs}
    kinds: dict[str, tuple[type[WorkerConfig], Role]] = {
        "prefill": (PrefillConfig, Role.PREFILL),
        "decode": (DecodeConfig, Role.DECODE),
    }
    for name, (kind, role) in kinds.items():
        group = make_group_settings(
            config.load(kind, name, told[name], {})[0], role, VllmGroupSettings
        )
        assert isinstance(group, VllmGroupSettings)
        assert (group.ranks, group.expert_parallel, group.dtype) == (2, True, "bfloat16")
        assert group.model_len_max_tokens == H200.length_max_tokens
    router = config.load(RouterConfig, "router", told["router-3"], {})[0]
    assert (router.router_index, router.routers, router.reserve_tokens) == (3, 4, 1024)
    assert router.prefill == launched.workers["prefill"]
    assert len(set(launched.addresses)) == 4


def test_ports_are_given_once() -> None:
    ports = programs._Ports()  # noqa: SLF001  # what is under test
    firsts = [ports.take(3) for _ in range(20)]
    given = [first + place for first in firsts for place in range(3)]

    assert len(set(given)) == 60


@pytest.fixture
def store(tmp_path: Path) -> Callable[..., Store]:
    def make(comparison: Comparison = SIM, engine: str = "sim") -> Store:
        return Store(tmp_path / "split-sim.json", comparison, engine)

    return make


CELLS = wanted(SIM, SIM.system("split"), Chosen())


def done(good_share: float | None = 1.0) -> dict[str, Any]:
    return {"status": "done", "good_share": good_share}


def test_a_done_cell_is_not_wanted_again_and_a_failed_one_is(store: Callable[..., Store]) -> None:
    store().keep(CELLS[0], done(), {"rows": []})
    store().keep(CELLS[1], {"status": "failed", "reason": "why"})

    assert not store().is_pending(CELLS[0])
    assert store().is_pending(CELLS[0], again=True)
    assert store().is_pending(CELLS[1])
    assert store().is_pending(CELLS[2])


@pytest.mark.parametrize("change", ["pace", "slo", "seed", "engine", "seats", "shape"])
def test_a_cell_of_other_settings_does_not_count(store: Callable[..., Store], change: str) -> None:
    store().keep(CELLS[0], done())
    groups = (dataclasses.replace(SIM.systems[0].groups[0], seats=5), SIM.systems[0].groups[1])
    system = dataclasses.replace(SIM.systems[0], groups=groups)
    shape = dataclasses.replace(SIM.shapes[0], times={"measure_s": 99.0})
    changes: dict[str, dict[str, Any]] = {
        "pace": {"pace": dataclasses.replace(SIM.pace, step_fixed_s=0.5)},
        "slo": {"slo": dataclasses.replace(SIM.slo, ttft_ms=1.0)},
        "seed": {"seed": 1},
        "seats": {"systems": (system, *SIM.systems[1:])},
        "shape": {"shapes": (shape, *SIM.shapes[1:])},
        "engine": {},
    }
    changed = dataclasses.replace(SIM, **changes[change])
    engine = "vllm" if change == "engine" else "sim"

    assert store().is_done(CELLS[0])
    assert not store(changed, engine).is_done(CELLS[0])


def test_rates_above_one_that_was_too_much_are_left_out(store: Callable[..., Store]) -> None:
    store().keep(CELLS[1], done(good_share=0.49))
    pending = {cell.name for cell in CELLS if store().is_pending(cell)}

    assert [cell.load.name for cell in CELLS[:5]] == [
        "poisson-2", "poisson-4", "poisson-8", "poisson-16", "closed-64",
    ]  # fmt: skip
    left_out = {cell.name for cell in CELLS} - pending
    assert left_out == {CELLS[1].name, CELLS[2].name, CELLS[3].name}
    store().keep(CELLS[1], done(good_share=None))
    assert store().is_pending(CELLS[2]), "a rate at which nothing was due tells nothing"
    other = Cell("aggregated", CELLS[2].shape, CELLS[2].load)
    assert store().is_pending(other), "what one system cannot carry another may"


def test_the_result_has_every_kept_cell_and_says_what_was_left_out(
    store: Callable[..., Store],
) -> None:
    facts = {
        "command": "c", "git_sha": "s", "git_dirty": False, "python": "3", "cpu": "x",
        "cores": 2, "began": "now",
    }  # fmt: skip
    store().keep(CELLS[0], done(good_share=0.1))
    store().merge(facts)
    store().merge(facts)

    made = json.loads(store().out.read_text())
    assert [cell["cell"] for cell in made["cells"]] == [cell.name for cell in CELLS[:4]]
    assert [cell["status"] for cell in made["cells"]] == ["done"] + ["left out"] * 3
    assert made["cells"][1]["reason"] == "2 a second was more than it could carry"
    assert made["engine"] == "sim"
    assert len(made["runs"]) == 1


def test_processes_end_whole_also_those_that_do_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "STOP_S", 0.5)
    told = tmp_path / "pid"
    deaf = f"trap '' TERM; sleep 300 & echo $! > {told}.new; mv {told}.new {told}; wait; wait"
    running = programs.Processes(
        [programs.Program(name="deaf", command=("sh", "-c", deaf))], tmp_path
    )
    while not told.exists():
        subprocess.run(["sleep", "0.05"], check=True)

    assert running.lost() is None
    running.stop()

    assert running.started["deaf"].poll() is not None
    assert programs.family(int(told.read_text())) == []


def test_a_program_that_has_ended_is_named_with_its_last_words(tmp_path: Path) -> None:
    words = "print('the cause'); raise SystemExit(3)"
    running = programs.Processes(
        [programs.Program(name="brief", command=(sys.executable, "-c", words))], tmp_path
    )
    running.started["brief"].wait(10)

    assert running.lost() == "brief ended with 3:\nthe cause"
    running.stop()
