"""What a fingerprint leaves out: names that decide nothing about how steps run, each with why.

Reviewed by hand. What is not listed here counts, so an unknown setting or variable makes a
certificate not fit rather than pass unseen.
"""

from collections.abc import Mapping

ENV_PREFIXES = (
    "VLLM_", "NCCL_", "NVSHMEM_", "CUDA_", "CUBLAS", "CUDNN_", "TORCH", "PYTORCH_", "TRITON_",
    "DG_", "EP_", "DEEPEP_", "FLASHINFER_", "UCX_", "NIXL_", "GLOO_", "OMP_", "GOMP_", "KMP_",
    "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "SPLITWAVE_",
)  # fmt: skip
"""A set variable that begins with one of these counts, known or not, unless it is listed below."""

NEUTRAL: Mapping[str, str] = {
    "env.VLLM_HOST_IP": "an address",
}
"""By name, with the reason. `*` stands for any rest of a name."""


def is_neutral(name: str) -> bool:
    """True if `name` decides nothing about how steps run."""
    return name in NEUTRAL or name.startswith(_PREFIXES)


def counts(variable: str) -> bool:
    """True if an environment variable of this name is part of the fingerprint."""
    return variable.startswith(ENV_PREFIXES) and not is_neutral(f"env.{variable}")


_PREFIXES = tuple(name.removesuffix("*") for name in NEUTRAL if name.endswith("*"))
