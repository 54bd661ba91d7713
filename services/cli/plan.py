"""What a local stack consists of: settings in, commands and needs out. Starts nothing."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.cli.zygote import ForkedWorker

BASE_BYTES = 600 * 2**20
"""Memory of one engine process beside weights and KV cache (torch and vLLM, mostly)."""
KV_BYTES = {"vllm": 256 * 2**20, "sim": 0}

ROLES = ("prefill", "decode")
"""The workers, in the order of their start."""

DRAIN_FLAGS = ("--drain-unready-s", "0", "--drain-grace-s", "5")
"""The supervisor stops the router first, so nobody has to notice that a worker stops."""

PRELOAD_VLLM = ("splitwave.engine.vllm.start:preload",)
LOCAL_ENVIRONMENT = {
    # One thread a rank: a local stack has more processes than cores.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of a local stack. Ports are on the loopback interface."""

    model_path: Path
    served_model: str
    run_dir: Path
    """Logs go here."""
    engine: str = "vllm"
    prefill_ranks: int = 1
    decode_ranks: int = 2
    experts: int = 0
    """The model's experts; with more than one decode rank they are spread over the ranks."""
    grpc_port: int = 8090
    http_port: int = 8080
    prefill_port: int = 8091
    decode_port: int = 8092
    side_channel_port: int = 8100
    """First of the ports on which engine ranks describe their memory to one another."""
    prefill_settings: Mapping[str, str] = field(default_factory=dict)
    """More settings of the prefill group's engines, by name."""
    decode_settings: Mapping[str, str] = field(default_factory=dict)
    metrics_port: int = 0
    """/metrics of the prefill worker, and of decode one above; 0: none."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """Execution mode by role; the role's eager CPU mode if it is not there."""
    certificates: Path | None = None
    """The groups' certificates, and beside them `trust`; None: the stack serves uncertified."""
    trust: Path | None = None
    """Public keys whose certificates count."""
    worker_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """More flags of a program, by its name: prefill, decode, router."""
    environment_more: Mapping[str, str] = field(default_factory=dict)
    trace_dir: Path | None = None
    """Each process writes its spans into a file there; None: no traces."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of all workers."""
        return {**LOCAL_ENVIRONMENT, **self.environment_more}

    @property
    def preload(self) -> tuple[str, ...]:
        """What the zygote calls before it forks."""
        return PRELOAD_VLLM if self.engine == "vllm" else ()

    @property
    def router_grpc(self) -> str:
        """Where GenerateService listens."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def router_http(self) -> str:
        """Where the HTTP API listens."""
        return f"127.0.0.1:{self.http_port}"

    @property
    def worker_addresses(self) -> dict[str, str]:
        """Where each worker listens."""
        return {
            "prefill": f"127.0.0.1:{self.prefill_port}",
            "decode": f"127.0.0.1:{self.decode_port}",
        }

    def listening(self) -> dict[str, str]:
        """Every address that must be free, by the flag that changes it."""
        addresses = {
            "--grpc-port": self.router_grpc,
            "--http-port": self.router_http,
            "--prefill-port": f"127.0.0.1:{self.prefill_port}",
            "--decode-port": f"127.0.0.1:{self.decode_port}",
        }
        if self.metrics_port:
            for index, role in enumerate(ROLES):
                flag = f"--metrics-port ({role})"
                addresses[flag] = f"127.0.0.1:{self.metrics_port + index}"
        if self.engine == "vllm":
            for rank in range(self.prefill_ranks + self.decode_ranks):
                flag = "--side-channel-port" if rank == 0 else f"--side-channel-port (+{rank})"
                addresses[flag] = f"127.0.0.1:{self.side_channel_port + rank}"
        return addresses

    def log_path(self, name: str) -> Path:
        """Log of one process."""
        return self.run_dir / f"{name}.log"

    @property
    def trace_flags(self) -> tuple[str, ...]:
        """Flags of every program that say where its traces go."""
        if self.trace_dir is None:
            return ()
        return ("--trace-exporter", "file", "--trace-dir", str(self.trace_dir))

    def router_command(self) -> list[str]:
        """How the router is started."""
        return [
            *(sys.executable, "-m", "services.cli.tether"),
            *(sys.executable, "-m", "services.router"),
            *self.program_flags("router"),
        ]

    def program_flags(self, name: str) -> tuple[str, ...]:
        """The flags of one program: router, prefill or decode."""
        own = self._router_flags() if name == "router" else self._worker_flags(name)
        return (*own, *self.certification_flags(name), *self.worker_flags.get(name, ()))

    def certification_flags(self, name: str) -> tuple[str, ...]:
        """What a program is told of certificates. On one's own machine smoke is enough."""
        if self.certificates is None:
            return ("--allow-uncertified", "true")
        if name == "router":
            return ("--certificate-level", "smoke")
        return ("--certificates", str(self.certificates), "--trust", str(self.trust))

    def mode(self, role: str) -> str:
        """Execution mode of a role's engines."""
        return self.modes.get(role) or f"{role}_cpu_eager"

    def up_flags(self) -> list[str]:
        """Flags with which `splitwave up` starts this stack, uncertified."""
        settings = {"prefill": self.prefill_settings, "decode": self.decode_settings}
        return [
            *("--certify", "off"),
            *("--model", str(self.model_path)),
            *("--served-model", self.served_model),
            *("--run-dir", str(self.run_dir)),
            *("--prefill-ranks", str(self.prefill_ranks)),
            *("--decode-ranks", str(self.decode_ranks)),
            *(word for role in ROLES for word in (f"--{role}-mode", self.mode(role))),
            *("--grpc-port", str(self.grpc_port), "--http-port", str(self.http_port)),
            *("--prefill-port", str(self.prefill_port), "--decode-port", str(self.decode_port)),
            *("--side-channel-port", str(self.side_channel_port)),
            *("--metrics-port", str(self.metrics_port)),
            *(
                word
                for role in ROLES
                for name, value in settings[role].items()
                for word in (f"--{role}-setting", f"{name}={value}")
            ),
        ]

    def _router_flags(self) -> list[str]:
        addresses = self.worker_addresses
        return [
            *("--listen", self.router_grpc),
            *("--http-listen", self.router_http),
            *("--prefill", addresses["prefill"]),
            *("--decode", addresses["decode"]),
            *("--model-path", str(self.model_path)),
            *("--model", self.served_model),
            *DRAIN_FLAGS,
            *self.trace_flags,
        ]

    def forked_workers(self) -> tuple[ForkedWorker, ...]:
        """The workers, in the order of their start."""
        return tuple(self._worker(role) for role in ROLES)

    def _worker(self, role: str) -> ForkedWorker:
        return ForkedWorker(
            name=role,
            module=f"services.{role}.main",
            arguments=self.program_flags(role),
            log_path=str(self.log_path(role)),
        )

    def _worker_flags(self, role: str) -> list[str]:
        flags = [
            *("--listen", self.worker_addresses[role]),
            *("--worker-id", f"{role}-0"),
            *("--engine", self.engine),
            *("--model", self.served_model),
            *("--log-dir", str(self.run_dir)),
            *("--restarts-max", "0"),  # The zygote starts it over, its imports done.
            *DRAIN_FLAGS,
            *self.trace_flags,
        ]
        if self.engine == "vllm":
            flags += ["--model-path", str(self.model_path)]
        if mode := self.modes.get(role):
            flags += ["--mode", mode]
        if self.metrics_port:
            port = self.metrics_port + ROLES.index(role)
            flags += ["--metrics-listen", f"127.0.0.1:{port}"]
        for name, value in self.engine_settings(role).items():
            flags += ["--engine-settings", f"{name}={value}"]
        return flags

    def engine_settings(self, role: str) -> dict[str, str]:
        """Settings of a role's engine group, by name."""
        ranks = self.prefill_ranks if role == "prefill" else self.decode_ranks
        more = self.prefill_settings if role == "prefill" else self.decode_settings
        settings = {"ranks": str(ranks)}
        if self.engine == "vllm":
            first = self.side_channel_port + (0 if role == "prefill" else self.prefill_ranks)
            settings["side_channel_port"] = str(first)
            settings["expert_parallel"] = str(ranks > 1 and self.experts > 1).lower()
        return {**settings, **more}

    def memory_bytes(self) -> int:
        """Memory that the stack will take, roughly and not below the truth."""
        if self.engine != "vllm":
            return 2 * 100 * 2**20
        ranks = sum(int(self.engine_settings(role)["ranks"]) for role in ROLES)
        weights = sum(f.stat().st_size for f in self.model_path.glob("*.safetensors"))
        return ranks * (BASE_BYTES + weights + KV_BYTES[self.engine])


def read_experts(model_path: Path) -> int:
    """How many routed experts a model has; 0 for a dense one or one that says nothing."""
    try:
        config = json.loads((model_path / "config.json").read_text())
    except (OSError, ValueError):
        return 0
    if not isinstance(config, dict):  # What is wrong with it is the engines' to say.
        return 0
    found = [config.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
    return next((count for count in found if isinstance(count, int) and count), 0)
