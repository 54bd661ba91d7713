"""Which code a rank's layers run, and the tuned configurations that this code may read."""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any  # vLLM's objects are untyped here

from splitwave.core.strict_json import Scalar

TUNED_FOLDER = "VLLM_TUNED_CONFIG_FOLDER"
TUNED_FILES_MAX = 10_000


def layers(static_forward_context: Mapping[str, Any]) -> dict[str, Scalar]:
    """Implementations of the layers by kind of layer: `kernel.KIND` -> `what xCOUNT, ...`."""
    found: dict[str, Counter[str]] = {}
    for layer in static_forward_context.values():
        kind = type(layer).__name__
        found.setdefault(kind, Counter())[" ".join(_parts(layer)) or "plain"] += 1
    return {
        f"kernel.{kind}": ", ".join(f"{what} x{count}" for what, count in sorted(counts.items()))
        for kind, counts in found.items()
    }


def _parts(layer: Any) -> Iterator[str]:
    """The classes that do a layer's work, as far as it has any of these."""
    backend = getattr(layer, "attn_backend", None)
    if backend is not None:
        yield str(backend.get_name())
    for owner in (layer, getattr(layer, "routed_experts", None)):
        for name in ("impl", "quant_method"):
            part = getattr(owner, name, None)
            if part is not None:
                yield type(part).__name__
                yield from _experts(part)


def _experts(method: Any) -> Iterator[str]:
    """What computes a mixture's experts, and what carries rows to them."""
    kernel = getattr(method, "moe_kernel", None)
    for holder in (kernel, getattr(kernel, "impl", None)):
        for name in ("prepare_finalize", "fused_experts"):
            part = getattr(holder, name, None)
            if part is not None:
                yield type(part).__name__


def tuned(package: Path, device_name: str, environ: Mapping[str, str]) -> dict[str, Scalar]:
    """Digests of the tuned configurations: all of the user's folder, vLLM's for this device.

    A file of the user's folder goes before vLLM's of the same name, so each counts by name.
    """
    device = device_name.replace(" ", "_")
    found = {
        f"kernel.tuned.{path.relative_to(package)}": _digest(path)
        for path in sorted(package.rglob("configs/**/*.json"))
        if device and device in str(path.relative_to(package))
    }
    if folder := environ.get(TUNED_FOLDER):
        files = sorted(Path(folder).rglob("*.json"))[:TUNED_FILES_MAX]
        found |= {f"kernel.tuned_here.{path.relative_to(folder)}": _digest(path) for path in files}
    return dict(found)


def autotuned(runner: Any) -> dict[str, Scalar]:  # vLLM's model runner
    """Digests of the kernels that FlashInfer has chosen by timing them, on this group's ranks.

    They stay from one start to the next. Each rank has a file of its own and tells all of them,
    so that ranks agree; none are there if nothing was timed.
    """
    if "flashinfer.autotuner" not in sys.modules:
        return {}
    from vllm.model_executor.warmup import flashinfer_autotune_cache as cache

    # vLLM's resolver knows the folder of this configuration; others share its parent.
    folder = cache.resolve_flashinfer_autotune_file(runner).parent
    return {
        f"kernel.autotuned.{path.name}": _digest(path) for path in sorted(folder.glob("*.json"))
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
