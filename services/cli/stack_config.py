"""Settings of a local stack, and the whole of what its programs are given.

`splitwave up` and `splitwave demo` read them as every service reads its own: flags,
then SPLITWAVE_UP_<FIELD>, then a TOML file, then defaults. The tables `router`,
`prefill` and `decode` hold further settings of the programs.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from services.cli.plan import Plan
from services.decode.config import DecodeConfig
from services.prefill.config import PrefillConfig
from services.router.config import RouterConfig
from services.worker.start import check_engine_settings
from splitwave.core.mode import MODES
from splitwave.runtime.config import (
    ConfigError,
    ProcessConfig,
    check_complete,
    load,
    names_of,
    require,
    setting,
    to_toml,
    unknown,
)
from splitwave.runtime.worker import WorkerConfig

PROGRAMS: Mapping[str, type[ProcessConfig]] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}


RANKS_MAX = 4096
"""Of one group on one machine; each is a process with ports of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """One prefill worker, one decode worker and a router on this machine."""

    service: ClassVar[str] = "up"

    model: str = setting(
        "demo", "demo (the embedded default), tiny (random, starts fast), or a model directory"
    )
    served_model: str = setting("", "name that clients ask for; empty: from the model")
    engine: str = setting("vllm", "what computes", choices=("vllm", "sim"))
    prefill_ranks: int = setting(1, "data-parallel ranks of prefill")
    decode_ranks: int = setting(2, "data-parallel ranks of decode")
    prefill_mode: str = setting("", "execution mode of prefill; empty: prefill_cpu_eager")
    decode_mode: str = setting("", "execution mode of decode; empty: decode_cpu_eager")
    grpc_port: int = setting(8090, "of the router's gRPC APIs")
    http_port: int = setting(8080, "of the router's HTTP API and status page")
    prefill_port: int = setting(8091, "of the prefill worker")
    decode_port: int = setting(8092, "of the decode worker")
    side_channel_port: int = setting(8100, "first of one a rank, for engines among themselves")
    metrics_port: int = setting(
        0, "/metrics of the prefill worker, and of decode one above; 0: none (the router has its)"
    )
    certify: str = setting(
        "smoke",
        "smoke: serve with certificates, made once a machine where there are none that fit; "
        "off: serve uncertified, marked so",
        choices=("smoke", "off"),
    )
    run_dir: str = setting("", "logs go here; empty: a temporary directory")
    trace_dir: str = setting(
        "", "trace requests into files there, for `splitwave trace`; empty: no traces"
    )
    ready_timeout_s: float = setting(600.0, "give up if the stack is not ready by then")
    prefill_setting: Mapping[str, str] = setting({}, "settings of the prefill engines, by name")
    decode_setting: Mapping[str, str] = setting({}, "settings of the decode engines, by name")
    router: Mapping[str, str] = setting({}, "further settings of the router, such as live_max=64")
    prefill: Mapping[str, str] = setting({}, "further settings of the prefill worker")
    decode: Mapping[str, str] = setting({}, "further settings of the decode worker")

    def __post_init__(self) -> None:
        for name in ("prefill_ranks", "decode_ranks"):
            fits = 1 <= getattr(self, name) <= RANKS_MAX
            require(self, name, fits, f"set it to 1 or more, {RANKS_MAX} at most")
        for name in ("grpc_port", "http_port", "prefill_port", "decode_port", "side_channel_port"):
            require(self, name, 0 < getattr(self, name) < 65536, "set it to a port, 1 to 65535")
        require(self, "metrics_port", 0 <= self.metrics_port < 65535, "set it to a port, or to 0")
        for role in ("prefill", "decode"):
            known = [mode.name for mode in MODES.values() if mode.role == role]
            fits = getattr(self, f"{role}_mode") in ("", *known)
            require(self, f"{role}_mode", fits, f"name one of {', '.join(known)}")
            self._check_ranks(role)
        require(self, "ready_timeout_s", self.ready_timeout_s > 0, "set it above 0 seconds")

    def _check_ranks(self, role: str) -> None:
        """Ports and the spread of experts follow from the stack's own number, so it is said once.

        What `--print-config` writes says it again for the program, and is taken back.
        """
        ranks = str(getattr(self, f"{role}_ranks"))
        for name, key in ((f"{role}_setting", "ranks"), (role, "engine_settings.ranks")):
            said = getattr(self, name).get(key, ranks)
            if said.isdecimal():  # What is no number is told with the program's settings.
                fix = f"ranks is {said} here and {ranks} there; set {role}_ranks instead"
                require(self, name, said == ranks, fix)

    def program_flags(self) -> dict[str, tuple[str, ...]]:
        """The further settings as flags, by program."""
        return {name: tuple(_flags(getattr(self, name))) for name in PROGRAMS}


def _flags(settings: Mapping[str, str]) -> Iterator[str]:
    for name, value in settings.items():
        first, dot, rest = name.partition(".")
        yield (
            f"--{first.replace('_', '-')}={rest}={value}"
            if dot
            else (f"--{first.replace('_', '-')}={value}")
        )


@dataclass(frozen=True, slots=True)
class Program:
    """What one program of a stack is given, and where each setting came from."""

    config: ProcessConfig
    sources: Mapping[str, str]


def programs(config: StackConfig, sources: Mapping[str, str], plan: Plan) -> Mapping[str, Program]:
    """All programs as they will read what they are given.

    Raises ConfigError for a setting that one of them does not have, or that cannot work.
    """
    return {name: _program(name, config, sources, plan) for name in PROGRAMS}


def _program(name: str, config: StackConfig, sources: Mapping[str, str], plan: Plan) -> Program:
    kind = PROGRAMS[name]
    own = {key.partition(".")[0] for key in getattr(config, name)}
    said = {x: sources[name] if x in own else "splitwave up" for x in names_of(kind)}
    engines = (sources.get(f"{name}_setting"), sources.get(name))
    said["engine_settings"] = ", ".join(["splitwave up", *dict.fromkeys(filter(None, engines))])
    try:
        for key in sorted(own - names_of(kind)):
            raise unknown(key, sources[name], names_of(kind))
        loaded, origins = load(kind, name, plan.program_flags(name), os.environ, said)
        check_complete(loaded, origins)
        if isinstance(loaded, WorkerConfig):
            check_engine_settings(loaded, origins)
    except ConfigError as error:
        is_ranks = str(error).startswith("engine_settings: ranks:")
        fix = f"; --{name}-ranks sets them" if is_ranks else ""
        raise ConfigError(f"{name}.{error}{fix}") from None
    return Program(loaded, origins)


def whole_stack_toml(config: StackConfig, sources: Mapping[str, str], plan: Plan) -> str:
    """Every setting of the stack and of its programs, as a file that `splitwave up` takes.

    Raises ConfigError for a program's setting that cannot work.
    """
    parts = [to_toml(config, sources, leave_out=PROGRAMS.keys())]
    for name, program in programs(config, sources, plan).items():
        parts.append(to_toml(program.config, program.sources, table=name))
    return "\n".join(parts)
