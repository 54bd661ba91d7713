"""A split stack for checks: groups of two ranks each, both on the same devices, or on the CPU."""

import argparse
from pathlib import Path

from bench.decode_modes.tree import free_ports
from bench.shared_gpu import devices
from bench.split_gpu_model import build as build_gpu_model
from services.cli.plan import Plan, read_experts
from splitwave import demo_model
from splitwave.core.mode import MODES

RANKS = 2
STALL_S = 120
SHARES = 0.8
"""Of a GPU that all ranks are on."""
GPU_GROUP = {
    "dtype": "bfloat16",
    "devices": "0 1",
    "gpu_memory_share": "0.3",
    # Said, not found: two groups that start beside each other see each other's memory come and go.
    "kv_cache_bytes": str(4 * 2**30),
    "block_size_tokens": "32",
    "start_timeout_s": "400",
    "model_len_max_tokens": "4096",
    "lease_ttl_s": "600",
}
CPU_GROUP = {"lease_ttl_s": "600", "start_timeout_s": "280"}
OWN = {
    ("cuda", "prefill"): {"batch_max_tokens": "4096", "seats_max": "32"},
    ("cuda", "decode"): {"seats_max": "64", "batch_max_tokens": "64"},
    ("cpu", "prefill"): {},
    ("cpu", "decode"): {},
}
MODES_OF = {
    ("cuda", "prefill"): "prefill_eager_ht_dbo",
    ("cuda", "decode"): "decode_graph_ht",
    ("cpu", "prefill"): "prefill_cpu_eager",
    ("cpu", "decode"): "decode_cpu_eager",
}


def add_arguments(made: argparse.ArgumentParser) -> None:
    """What every check of a whole stack is asked."""
    add = made.add_argument
    add("--device", choices=("cpu", "cuda"), required=True)
    add("--engine", choices=("vllm", "sim"), default="vllm", help="sim: tests of the client alone")
    add("--out", type=Path, required=True, help="the verdict, as JSON")
    add("--work-dir", type=Path, required=True, help="logs, traces, the model; kept")
    add("--model", type=Path, help="a model's folder; empty: tiny on the CPU, a larger one on GPUs")
    add("--prefill-ranks", type=int, default=RANKS)
    add("--decode-ranks", type=int, default=RANKS)
    for role in ("prefill", "decode"):
        modes = [mode.name for mode in MODES.values() if mode.role == role]
        add(f"--{role}-mode", choices=modes, help="empty: what the device's default is")
        add(f"--{role}-setting", action="append", default=[], metavar="NAME=VALUE")
    add("--ready-s", type=float, default=500.0, help="the stack must be ready within this")


def model_of(asked: argparse.Namespace) -> Path:
    """The model's folder, built if need be."""
    if asked.model is not None:
        found: Path = asked.model.resolve()
        return found
    if asked.device == "cuda":
        return build_gpu_model(asked.work_dir / "model")
    options = demo_model.DemoModelOptions(variant=demo_model.Variant.TINY)
    path = demo_model.default_dir(options.variant)
    demo_model.build(path, options, progress=lambda _: None)
    return path


def mode_of(asked: argparse.Namespace, role: str) -> str:
    """The execution mode of a role's group."""
    return str(getattr(asked, f"{role}_mode") or MODES_OF[asked.device, role])


def gpu_group() -> dict[str, str]:
    """Settings of any group on GPUs; where ranks share one, so do both groups."""
    if not (shared := devices()):
        return GPU_GROUP
    at_once = 2 * max(map(shared.count, shared))  # ranks of both groups
    share = f"{SHARES / at_once:.3f}"
    return GPU_GROUP | {"devices": " ".join(map(str, shared)), "gpu_memory_share": share}


def settings_of(asked: argparse.Namespace, role: str) -> dict[str, str]:
    """Settings of a role's engines."""
    more = dict(text.split("=", 1) for text in getattr(asked, f"{role}_setting"))
    if asked.engine == "sim":
        return more
    common = gpu_group() if asked.device == "cuda" else CPU_GROUP
    return common | OWN[asked.device, role] | more


def plan_of(asked: argparse.Namespace, model: Path) -> Plan:
    """The stack: traced as a whole, uncertified."""
    port = free_ports()
    return Plan(
        model_path=model,
        served_model="split",
        run_dir=asked.work_dir / "logs",
        engine=asked.engine,
        trace_dir=asked.work_dir / "traces",
        prefill_ranks=asked.prefill_ranks,
        decode_ranks=asked.decode_ranks,
        experts=read_experts(model),
        grpc_port=port,
        http_port=port + 1,
        prefill_port=port + 2,
        decode_port=port + 3,
        side_channel_port=port + 4,
        modes={role: mode_of(asked, role) for role in ("prefill", "decode")},
        prefill_settings=settings_of(asked, "prefill"),
        decode_settings=settings_of(asked, "decode"),
        worker_flags={"router": ("--stall-max-s", str(STALL_S))},
    )
