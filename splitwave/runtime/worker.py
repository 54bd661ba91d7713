"""Settings that both kinds of worker share: who they are and which engines they start."""

import dataclasses
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from splitwave.core.mode import MODES
from splitwave.core.worker import Role
from splitwave.runtime.again import restarts
from splitwave.runtime.config import ProcessConfig, build, require, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ProcessConfig):
    """One worker and the group of engines behind it."""

    worker_id: str = setting("", "name in the deployment; empty: made of host and process id")
    group_id: str = setting("", "name of the engine group; empty: as the worker")
    epoch: int = setting(0, "this start of the group, above all earlier ones; 0: from the clock")
    engine: str = setting("vllm", "what computes", choices=("vllm", "sim"))
    model: str = setting("default", "served model name")
    model_path: str = setting("", "vllm: directory of the model, as transformers saves it")
    mode: str = setting("", "execution mode of the group; empty: the role's eager CPU mode")
    log_dir: str = setting(
        "", "vllm: directory for the ranks' logs; empty: splitwave/WORKER where temporary files go"
    )
    engine_settings: Mapping[str, str] = setting(
        {}, "more settings of the engine group by name, such as ranks=2; may be repeated"
    )
    certificates: str = setting(
        "",
        "the group's certificate, or a directory of them; without one that fits the worker exits "
        "with 3",
    )
    trust: str = setting("", "directory of the public keys whose certificates count")
    fingerprint_file: str = setting(
        "", "the group's fingerprint is written there at start, as JSON; empty: nowhere"
    )
    allow_uncertified: bool = setting(
        False, "serve without a certificate that fits, marked; routers must be told to take it"
    )
    decertified_patience_s: float = setting(
        5.0,
        "how long a group that ran a step outside its mode waits for a router's judgement; "
        "then it drains",
    )
    restarts_max: int = setting(
        3, "times that the process starts over when its engine group has died, before it exits "
        "with 75 for a supervisor to start it; 0: at once",
    )  # fmt: skip
    health_stall_s: float = setting(
        30.0, "seconds without a step while there is work, after which the worker is NOT_SERVING"
    )

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        require(self, "epoch", self.epoch >= 0, "set it to 0 or more")
        require(self, "restarts_max", self.restarts_max >= 0, "set it to 0 or more")
        require(self, "health_stall_s", self.health_stall_s > 0, "set it above 0 seconds")
        patient = self.decertified_patience_s >= 0
        require(self, "decertified_patience_s", patient, "set it to 0 or more seconds")
        trusting = self.trust != "" or self.certificates == ""
        require(self, "trust", trusting, "name the directory of the public keys that you trust")
        known = [mode.name for mode in MODES.values() if mode.role == self.service]
        require(self, "mode", self.mode in ("", *known), f"name one of {', '.join(known)}")

    def check_complete(self) -> None:
        """Raise BadSetting if an engine that needs a model has none."""
        if self.engine == "vllm":
            fix = "set it to the directory of a saved model"
            require(self, "model_path", self.model_path != "", fix)


def make_group_settings(
    config: WorkerConfig, role: Role, kind: type[object], source: str = "engine_settings"
) -> object:
    """The engine's own settings dataclass, filled from what the config says of the group.

    Raises ConfigError for a setting that is unknown or has a flag of its own; it names `source`.
    """
    name = config.worker_id or default_worker_id(role)
    said: dict[str, object] = {
        "role": role,
        "group_id": config.group_id or name,
        "epoch": config.epoch + restarts() if config.epoch else time.time_ns() // 1_000_000,
        "model": config.model,
        "served_model": config.model,
        "model_path": Path(config.model_path),
        "mode": config.mode or f"{role}_cpu_eager",
        "log_dir": Path(config.log_dir or f"{tempfile.gettempdir()}/splitwave/{name}"),
    }
    assert dataclasses.is_dataclass(kind)
    fixed = {f.name: said[f.name] for f in dataclasses.fields(kind) if f.name in said}
    return build(kind, config.engine_settings, source, fixed)


def default_worker_id(role: str) -> str:
    """A name that no other live process of the deployment has."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}"
