"""Random weights that make tokens worth comparing, and what a worker is asked beside its steps.

vLLM's own dummy weights are too small to tell anything: after the norms a layer adds less to its
residual stream than bfloat16 can hold, so tokens depend on the embedding alone, and experts have
equal weights on every rank, so a row sent to the wrong rank comes back right. Here a layer adds
about as much as it finds, and each expert is drawn by its number in the model, whichever rank has
it; the same weights come out in every process and mode.
"""

import math
import os
import zlib
from typing import Any  # vLLM's and torch's objects are untyped here

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from bench.decode_modes.spec import BRANCH_GAIN

LOAD_FORMAT = "splitwave_random"
FP8_SPREAD = 64.0
"""Standard deviation of an FP8 weight before its scale; the format ends at 448."""
GATE_GAIN = 2.0
"""Spread of the router's logits: a near tie at the last place then has little weight."""
BRANCH_ENDS = ("o_proj.weight", "down_proj.weight", "w2_weight")
"""What a layer adds to its residual stream comes through these."""
SCALES_OF_CACHE = ("k_scale", "v_scale", "q_scale", "prob_scale")


def spread(name: str, shape: tuple[int, ...]) -> float:
    """Standard deviation of a weight: a row of it keeps the size of what it multiplies."""
    if "embed_tokens" in name:
        return 1.0
    gain = GATE_GAIN if name.endswith("gate.weight") else 1.0
    if name.removesuffix("_scale_inv").endswith(BRANCH_ENDS):
        gain = float(os.environ.get(BRANCH_GAIN, "1"))
    return gain / math.sqrt(shape[-1])


def seed_of(name: str, expert: int | None = None) -> int:
    """The seed of one weight, or of one expert's part of it."""
    return zlib.crc32(f"{name}/{expert}".encode())


def first_expert(local: int, experts: int) -> int:
    """Number in the model of this rank's first expert."""
    from vllm.distributed import get_ep_group

    return 0 if local == experts else int(get_ep_group().rank_in_group) * local


@register_model_loader(LOAD_FORMAT)
class RandomLoader(BaseModelLoader):  # type: ignore[misc]  # untyped to us
    """Draws weights in place of reading them."""

    def download_model(self, model_config: Any) -> None:
        """Nothing is downloaded."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Draw every parameter by its name; buffers stay as they were made."""
        text = model_config.hf_text_config
        experts = getattr(text, "num_experts", None) or text.n_routed_experts
        for path, module in model.named_modules():
            parameters = dict(module.named_parameters(recurse=False))
            for name, parameter in parameters.items():
                _draw(f"{path}.{name}", parameter.data, parameters, experts)


def _draw(name: str, tensor: Any, siblings: dict[str, Any], experts: int) -> None:
    last = name.rpartition(".")[2]
    if last in SCALES_OF_CACHE:
        return
    if last.endswith("_scale_inv"):
        weight = siblings[last.removesuffix("_scale_inv")]
        tensor.fill_(spread(name, tuple(weight.shape)) / FP8_SPREAD)
    elif "bias" in last:
        tensor.zero_()
    elif tensor.dim() == 1:
        tensor.fill_(1.0)
    elif tensor.dim() == 3:
        first = first_expert(len(tensor), experts)
        for place, expert in enumerate(tensor):
            _normal(expert, seed_of(name, first + place), spread(name, tuple(expert.shape)))
    else:
        _normal(tensor, seed_of(name), spread(name, tuple(tensor.shape)))


def _normal(tensor: Any, seed: int, deviation: float) -> None:
    generator = torch.Generator(device=tensor.device).manual_seed(seed)
    if torch.finfo(tensor.dtype).bits < 16:  # normal_ knows no FP8
        wide = torch.empty_like(tensor, dtype=torch.float16)
        tensor.copy_(wide.normal_(0.0, FP8_SPREAD, generator=generator))
    else:
        tensor.normal_(0.0, deviation, generator=generator)


class BenchWorker:
    """Mixed into vLLM's worker; `collective_rpc` calls these by name."""

    def bench_steps(self) -> dict[str, Any]:
        """What the worker's own record says of its steps so far."""
        from splitwave.engine.vllm import steps

        steps.install()  # Where the plugin is off, from now on.
        return steps.counted()

    def bench_memory(self: Any) -> dict[str, float]:
        """Memory in GB: of weights, at the peak, and taken from the device."""
        weights = sum(p.nbytes for p in self.model_runner.model.parameters())
        if not torch.cuda.is_available():
            return {"weights": weights / 1e9}
        free, total = torch.cuda.mem_get_info()
        return {
            "weights": weights / 1e9,
            "allocated_peak": torch.cuda.max_memory_allocated() / 1e9,
            "reserved": torch.cuda.memory_reserved() / 1e9,
            "device": (total - free) / 1e9,
        }

    def bench_profile_start(self: Any) -> None:
        """Record what runs on the device from now on."""
        from torch.profiler import ProfilerActivity, profile

        self.bench_profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self.bench_profiler.start()

    def bench_profile_stop(self: Any) -> list[dict[str, Any]]:
        """Kernels since then, or operators where there is no device: name, count, microseconds."""
        from torch.autograd import DeviceType

        on_device = torch.cuda.is_available()
        if on_device:
            torch.cuda.synchronize()
        self.bench_profiler.stop()
        rows = []
        where = DeviceType.CUDA if on_device else DeviceType.CPU
        for event in self.bench_profiler.key_averages():
            us = event.self_device_time_total if on_device else event.self_cpu_time_total
            # An operator outside the graphs counts its kernel's time as its own once more.
            if us > 0 and event.device_type == where:
                rows.append({"name": event.key[:200], "count": event.count, "us": round(us, 1)})
        return sorted(rows, key=lambda row: -float(row["us"]))
