"""Hands a battery to the process that runs it: an order as JSON, and what it told."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any  # JSON

from services.cli.plan import ROLES, Plan
from services.decode.config import DecodeConfig
from services.prefill.config import PrefillConfig
from services.worker.start import check_engine_settings
from splitwave.core.mode import lookup
from splitwave.runtime.config import ConfigError, load
from splitwave.runtime.worker import WorkerConfig

LINE_BYTES_MAX = 16 * 2**20
"""Of what a battery says: vLLM writes whole configurations on one line."""

Report = Callable[[str, str], None]
_PROGRESS = re.compile(r"\[ *[0-9]+\.[0-9]s\] ")
"""How the battery's own lines begin; vLLM's and torch's begin otherwise."""
_WORKERS: Mapping[str, type[WorkerConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig}


@dataclass(frozen=True, slots=True, kw_only=True)
class Battery:
    """What is to be certified: the groups of a stack."""

    plan: Plan
    """As `as_workers_read_it` makes it."""
    level: str
    targets: Sequence[str]
    """Roles."""
    out: Path
    certificates: Path
    key: Path
    envelopes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By role, as JSON."""
    output_max_tokens: int | None = None
    """Longest output of envelopes that are left out; None: what the engines can run."""
    soak_s: float | None = None
    leave_out: Sequence[str] = ()
    gateway: Mapping[str, Any] | None = None
    """For the accuracy check: `splitwave.certify.accuracy.check.Gateway`, as JSON."""

    def to_json(self) -> dict[str, Any]:
        """The order that `splitwave.certify.battery` reads."""
        return {
            "level": self.level,
            "targets": list(self.targets),
            "groups": {role: self._group(role) for role in ROLES},
            "envelopes": {role: dict(value) for role, value in self.envelopes.items()},
            "output_max_tokens": self.output_max_tokens,
            "out": str(self.out),
            "certificates": str(self.certificates),
            "key": str(self.key),
            "soak_s": self.soak_s,
            "leave_out": list(self.leave_out),
            "gateway": self.gateway,
        }

    def _group(self, role: str) -> dict[str, Any]:
        return {
            "served_model": self.plan.served_model,
            "model_path": str(self.plan.model_path),
            "mode": self.plan.mode(role),
            "log_dir": str(self.out / "logs"),
            "engine_settings": self.plan.engine_settings(role),
        }


def as_workers_read_it(
    plan: Plan,
    environ: Mapping[str, str],
    envelopes: Mapping[str, Mapping[str, Any]] | None = None,
) -> Plan:
    """The plan with modes and engine settings as its workers will have them.

    Flags, variables and files of theirs say more than the plan, and what is certified must be
    what they run. Engines are sized for `envelopes`, by role as JSON. Raises ConfigError.
    """
    sizes = envelopes or {}
    plan = replace(
        plan,
        prefill_ranks=sizes["prefill"]["ranks"] if "prefill" in sizes else plan.prefill_ranks,
        decode_ranks=sizes["decode"]["ranks"] if "decode" in sizes else plan.decode_ranks,
    )
    modes, settings = {}, {}
    for role, kind in _WORKERS.items():
        config, _ = load(kind, role, plan.program_flags(role), environ)
        modes[role] = config.mode or plan.mode(role)
        sized = _settings_of(modes[role], sizes.get(role))
        settings[role] = {**config.engine_settings, **sized}
    return replace(
        plan, modes=modes, prefill_settings=settings["prefill"], decode_settings=settings["decode"]
    )


def check_groups(plan: Plan, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for settings of a group that cannot work, before vLLM is imported for it.

    The model must be there.
    """
    for role, kind in _WORKERS.items():
        said = {"engine_settings": f"flags --{role}-ranks, --{role}-setting"}
        config, sources = load(kind, role, plan.program_flags(role), environ, said)
        try:
            check_engine_settings(config, sources)
        except ConfigError as error:
            raise ConfigError(f"{role}.{error}") from None


def worker_configs(plan: Plan, environ: Mapping[str, str]) -> Iterator[WorkerConfig]:
    """The workers' settings as they will read them. Raises ConfigError."""
    for role, kind in _WORKERS.items():
        yield load(kind, role, plan.program_flags(role), environ)[0]


def _settings_of(mode: str, envelope: Mapping[str, Any] | None) -> dict[str, str]:
    """Settings with which a group's engines can run an envelope and no more."""
    if envelope is None:
        return {}
    settings = {
        "ranks": envelope["ranks"],
        "tensor_parallel": envelope["tensor_parallel"],
        "seats_max": envelope["seats_max"],
        "model_len_max_tokens": envelope["sequence_max_tokens"],
    }
    if grid := envelope["capture_grid"]:
        settings["capture_sizes"] = " ".join(map(str, grid))
    if not lookup(mode).has_grid:
        settings["batch_max_tokens"] = envelope["step_max_tokens"]
    return {name: str(value) for name, value in settings.items()}


async def run_battery(battery: Battery, report: Report) -> tuple[int, list[dict[str, Any]]]:
    """Run it in a process of its own; its exit code and what it told of each subject.

    Progress is passed on line by line. Cancelling it stops the battery; it goes on where it was
    the next time.
    """
    battery.out.mkdir(parents=True, exist_ok=True)
    order = battery.out / "order.json"
    await asyncio.to_thread(order.write_text, json.dumps(battery.to_json(), indent=1))
    process = await asyncio.create_subprocess_exec(
        # Tethered: a command that is killed cannot stop its battery and the engines of that.
        *(sys.executable, "-m", "services.cli.tether"),
        *(sys.executable, "-m", "splitwave.certify.battery", str(order)),
        env={**os.environ, **battery.plan.environment},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, start_new_session=True, limit=LINE_BYTES_MAX,
    )  # fmt: skip
    try:
        _, told = await asyncio.gather(_pass_on(process, battery, report), _read(process))
        return await process.wait(), told
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _pass_on(process: asyncio.subprocess.Process, battery: Battery, report: Report) -> None:
    """Progress to people, all else to a log: vLLM has much to say."""
    assert process.stderr is not None
    log = battery.out / "battery.log"
    with await asyncio.to_thread(log.open, "wb", 0) as sink:
        async for line in process.stderr:
            sink.write(line)
            words = line.decode(errors="replace").rstrip()
            if progress := _PROGRESS.match(words):
                report("certify", words[progress.end() :])


async def _read(process: asyncio.subprocess.Process) -> list[dict[str, Any]]:
    assert process.stdout is not None
    return [json.loads(line) async for line in process.stdout if line.startswith(b"{")]


def smoke(plan: Plan, out: Path, machine_key: Path, certificates: Path) -> Battery:
    """The battery that `splitwave up` runs once a machine. Raises ConfigError."""
    return Battery(
        plan=as_workers_read_it(plan, os.environ),
        level="smoke",
        targets=ROLES,
        out=out,
        certificates=certificates,
        key=machine_key,
    )


def gateway(plan: Plan, control_model: Path, lm_eval_python: Path, gsm8k: Path) -> dict[str, Any]:
    """The stacks of the accuracy check: the plan's, and one on a model whose experts differ."""
    control = replace(plan, model_path=control_model, served_model=control_model.name)
    return {
        "main": _command(plan),
        "control": _command(control),
        "lm_eval_python": str(lm_eval_python),
        "gsm8k": str(gsm8k),
    }


def _command(plan: Plan) -> dict[str, Any]:
    """A stack that serves uncertified: what it runs is about to be proved."""
    metrics = [f"127.0.0.1:{plan.metrics_port + place}" for place in range(len(ROLES))]
    files = {role: str(plan.run_dir / f"{role}.fingerprint.json") for role in ROLES}
    telling = [word for role in ROLES for word in (f"--{role}", f"fingerprint_file={files[role]}")]
    program = [sys.executable, "-m", "services.cli.main", "up", *plan.up_flags(), *telling]
    return {
        # A battery that is killed cannot stop its stack; tethered, the stack stops itself.
        "words": [sys.executable, "-m", "services.cli.tether", *program],
        "http": plan.router_http,
        "metrics": metrics,
        "fingerprints": files,
        "model": plan.served_model,
        "model_path": str(plan.model_path),
    }
