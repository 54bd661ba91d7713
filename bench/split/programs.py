"""The processes of a system: their commands, their places, how they start and end."""

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from bench.split.devices import VISIBLE, visible
from bench.split.settings import Comparison, Group, SystemSettings
from services.cli.plan import DRAIN_FLAGS

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
STOP_S = 15.0
KILLED_S = 5.0
LOG_LINES = 25
STALL_S = "300"
"""A prefill queue may be long at a load that is too high; that is measured, not ended."""
LIVE_MAX = "16384"
SUBREAPER = 36
"""prctl(2): orphans below this process become its children."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a system runs and what it serves."""

    engine: str
    model_path: Path
    model: str
    run_dir: Path
    gpus: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES may name; empty without GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One process to start."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Beside the environment of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A system before its start."""

    programs: tuple[Program, ...]
    addresses: tuple[str, ...]
    """host:port of each OpenAI API; clients balance over these."""
    workers: Mapping[str, str] = field(default_factory=dict)
    """Splitwave's workers, by role: their counters are read."""


def launch(comparison: Comparison, system: SystemSettings, place: Place) -> Launch:
    """How a system is started. Ports are free at the time of the call."""
    ports = _Ports()
    if system.kind == "split":
        return _split(comparison, system, place, ports)
    groups = list(enumerate(system.groups))
    addresses = tuple(f"{HOST}:{ports.take()}" for _ in groups)
    make = _sim_server if place.engine == "sim" else _vllm_server
    programs = tuple(
        make(comparison, system, index, (place, addresses[index], ports)) for index, _ in groups
    )
    return Launch(programs=programs, addresses=addresses)


def _split(comparison: Comparison, system: SystemSettings, place: Place, ports: "_Ports") -> Launch:
    workers = {group.role: f"{HOST}:{ports.take()}" for group in system.groups}
    programs = [
        _worker(comparison, group, (place, workers[group.role], ports)) for group in system.groups
    ]
    addresses = []
    for index in range(system.front_ends):
        addresses.append(f"{HOST}:{ports.take()}")
        flags = {
            "listen": f"{HOST}:{ports.take()}",
            "http-listen": addresses[-1],
            "prefill": workers["prefill"],
            "decode": workers["decode"],
            "model-path": str(place.model_path),
            "model": place.model,
            "allow-uncertified": "true",
            "stall-max-s": STALL_S,
            "live-max": LIVE_MAX,
            "router-index": str(index),
            "routers": str(system.front_ends),
        }
        command = _tethered("-m", "services.router", *_flags(flags), *DRAIN_FLAGS)
        name = f"router-{index}"
        programs.append(Program(name=name, command=(*command, *system.router_arguments)))
    return Launch(programs=tuple(programs), addresses=tuple(addresses), workers=workers)


Spot = tuple[Place, str, "_Ports"]
"""Where a program runs, what it listens on, and more ports for it."""


def _worker(comparison: Comparison, group: Group, spot: Spot) -> Program:
    place, address, ports = spot
    flags = {
        "listen": address,
        "worker-id": f"{group.role}-0",
        "engine": place.engine,
        "model": place.model,
        "log-dir": str(place.run_dir),
        "restarts-max": "0",
        "allow-uncertified": "true",
    }
    if place.engine == "vllm":
        flags |= {"model-path": str(place.model_path)}
        if group.mode:
            flags |= {"mode": group.mode}
        settings = _vllm_settings(comparison, group, ports)
    else:
        settings = _sim_settings(comparison, group)
    told = [
        word
        for name, value in settings.items()
        for word in ("--engine-settings", f"{name}={value}")
    ]
    command = _tethered("-m", f"services.{group.role}", *_flags(flags), *told, *DRAIN_FLAGS)
    env = _env(comparison, group, place)
    return Program(name=group.role, command=(*command, *group.arguments), env=env)


def _vllm_settings(comparison: Comparison, group: Group, ports: "_Ports") -> dict[str, str]:
    ranks = len(group.devices)
    return {
        "ranks": str(ranks),
        "expert_parallel": str(ranks > 1).lower(),
        "seats_max": str(group.seats),
        "batch_max_tokens": str(group.batch_tokens),
        "model_len_max_tokens": str(comparison.length_max_tokens),
        "side_channel_port": str(ports.take(ranks)),
        "data_parallel_rpc_port": str(ports.take()),
        "start_timeout_s": str(comparison.times.ready_s),
        **group.settings,
    }


def _sim_settings(comparison: Comparison, group: Group) -> dict[str, str]:
    return {
        "ranks": str(len(group.devices)),
        "seats_per_rank": str(group.seats),
        "batch_max_tokens": str(group.batch_tokens),
        "model_len_max_tokens": str(comparison.length_max_tokens),
        **{name: f"{value}" for name, value in asdict(comparison.pace).items()},
    }


def _sim_server(comparison: Comparison, system: SystemSettings, index: int, spot: Spot) -> Program:
    place, address, _ = spot
    group, name = system.groups[index], f"server-{index}"
    told = _sim_settings(comparison, group) | {"model": place.model}
    settings = {key: _number(value) for key, value in told.items()}
    path = place.run_dir / f"{name}.json"
    path.write_text(json.dumps(settings | {"group_id": name}), encoding="utf-8")
    port = address.rpartition(":")[2]
    return Program(name=name, command=_tethered("-m", "bench.split.sim_server", port, str(path)))


def _vllm_server(comparison: Comparison, system: SystemSettings, index: int, spot: Spot) -> Program:
    """vLLM's own server, without anything of ours."""
    place, address, ports = spot
    group, ranks = system.groups[index], len(system.groups[index].devices)
    command = [
        *(*vllm_command(), "serve", str(place.model_path), "--served-model-name", place.model),
        *("--host", HOST, "--port", address.rpartition(":")[2]),
        *("--max-model-len", str(comparison.length_max_tokens), "--max-num-seqs", str(group.seats)),
        *("--max-num-batched-tokens", str(group.batch_tokens)),
        *("--api-server-count", str(system.front_ends)),
        *("--no-enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"),
    ]
    if ranks > 1:
        command += ["--data-parallel-size", str(ranks), "--enable-expert-parallel"]
        command += ["--data-parallel-rpc-port", str(ports.take())]
    env = {"VLLM_PLUGINS": "none", **_env(comparison, group, place)}
    return Program(name=f"server-{index}", command=_tethered(*command, *group.arguments), env=env)


def vllm_command() -> tuple[str, ...]:
    """Arguments of Python that are vLLM's own command line."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return (str(ROOT / "scripts/vllm_cli.py"),)  # The CPU build has another name.
    return ("-m", "vllm.entrypoints.cli.main")


def _env(comparison: Comparison, group: Group, place: Place) -> dict[str, str]:
    env = dict(group.env)
    if place.engine == "vllm" and comparison.device == "gpu":
        env[VISIBLE] = visible(group.devices, place.gpus)
    return env


def _tethered(*words: str) -> tuple[str, ...]:
    """A command of Python's whose process ends with the one that started it."""
    return (sys.executable, "-m", "services.cli.tether", sys.executable, *words)


def _flags(flags: Mapping[str, str]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


class _Ports:
    """Free ports of the loopback interface, none of them given twice."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def take(self, count: int = 1) -> int:
        """The first of so many neighbours."""
        while True:
            with socket.socket() as probe:
                probe.bind((HOST, 0))
                first = int(probe.getsockname()[1])
            wanted = set(range(first, first + count))
            if not wanted & self._given and all(map(_is_free, wanted)):
                self._given |= wanted
                return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


class Processes:
    """The running processes of one system, and whatever they have started."""

    def __init__(self, programs: Sequence[Program], run_dir: Path) -> None:
        self._run_dir = run_dir
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for program in programs:
                self.started[program.name] = self._start(program)
        except BaseException:
            self.stop()
            raise

    def _start(self, program: Program) -> "subprocess.Popen[bytes]":
        with self.log_path(program.name).open("wb") as log:
            return subprocess.Popen(
                program.command,
                cwd=ROOT,
                env={**os.environ, **program.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log_path(self, name: str) -> Path:
        """Log of one program."""
        return self._run_dir / f"{name}.log"

    def lost(self) -> str | None:
        """Which program has ended, how, and the end of its log; None while all run."""
        for name, process in self.started.items():
            if (code := process.poll()) is not None:
                return f"{name} ended with {code}:\n{tail(self.log_path(name))}"
        return None

    def cpu_s(self) -> dict[str, float]:
        """User and system seconds so far of each program and what it has started."""
        used = {}
        for name, process in self.started.items():
            used[name] = sum(_cpu_s(each) for each in family(process.pid))
        return used

    def stop(self) -> None:
        """End all: politely, then for certain."""
        everyone = [each for process in self.started.values() for each in family(process.pid)]
        for process in reversed(self.started.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(everyone, timeout=STOP_S)
        kill(alive)
        for process in self.started.values():
            process.wait(KILLED_S)


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it; empty if it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    return []


def kill(processes: Sequence[psutil.Process]) -> None:
    """End processes at once."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=KILLED_S)


def tail(path: Path) -> str:
    """The end of a log."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return "\n".join(line[:400] for line in lines[-LOG_LINES:])


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0
