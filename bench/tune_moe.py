"""Tuned tile sizes of vLLM's Triton expert kernel for one rank's shape, in vLLM's own file format.

    python -m bench.tune_moe --experts 128 --ranks 2 --hidden 2048 --intermediate 768 --topk 8 \
        --rows 128,256,512 --out tuned --report report.json

Engines find the file through VLLM_TUNED_CONFIG_FOLDER; it is part of a group's fingerprint. Rows
are those of a worst-token dispatch (tokens a rank times ranks), of which each token's experts are
drawn at random from all ranks', so a rank computes about top-k / ranks of them a row.

Kernels are compiled by many processes first, since compiling takes most of the time; then each GPU
measures its share. What is timed is what depends on the tile: aligning rows to experts and both
matrix products, as one captured graph.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any  # torch's tensors and vLLM's configurations

Config = dict[str, int]

BLOCK_M, BLOCK_N, BLOCK_K = (16, 32, 64), (32, 64, 128, 256), (64, 128, 256)
WARPS, STAGES = (4, 8), (2, 3, 4, 5)
SHARED_BYTES_MAX = 227 * 1024
REPEATS, INNER = 7, 8


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One rank's expert layer, bf16."""

    experts: int
    ranks: int
    hidden: int
    intermediate: int
    topk: int

    @property
    def local(self) -> int:
        """Experts of one rank."""
        return self.experts // self.ranks


def candidates() -> list[Config]:
    """List the tiles worth compiling: whose pipeline fits into shared memory, with work a warp."""
    found = []
    for m, n, k, warps, stages in itertools.product(BLOCK_M, BLOCK_N, BLOCK_K, WARPS, STAGES):
        shared = stages * 2 * k * (m + n)
        if shared > SHARED_BYTES_MAX or m * n < 256 * warps or (m == 64 and k == 256):
            continue
        found.append(
            {
                "BLOCK_SIZE_M": m,
                "BLOCK_SIZE_N": n,
                "BLOCK_SIZE_K": k,
                "GROUP_SIZE_M": 1,
                "num_warps": warps,
                "num_stages": stages,
            }
        )
    return found


def _bf16() -> dict[str, Any]:
    """Return the kernel's arguments that say how numbers are kept: bf16 throughout."""
    from vllm.triton_utils import tl

    flags = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
    off = dict.fromkeys((*flags, "per_channel_quant"), False)
    return off | {"compute_type": tl.bfloat16, "block_shape": None}


class Layer:
    """Weights and buffers of one expert layer on one GPU."""

    def __init__(self, shape: Shape, rows_max: int, device: int) -> None:
        import torch

        torch.cuda.set_device(device)
        torch.manual_seed(7)
        self.shape = shape
        make = {"dtype": torch.bfloat16, "device": f"cuda:{device}"}
        self.w1 = torch.randn(shape.local, 2 * shape.intermediate, shape.hidden, **make) / 32
        self.w2 = torch.randn(shape.local, shape.hidden, shape.intermediate, **make) / 32
        self.x = torch.randn(rows_max, shape.hidden, **make)
        slots = rows_max * shape.topk
        self.one = torch.empty(slots, 2 * shape.intermediate, **make)
        self.two = torch.randn(slots, shape.intermediate, **make)
        self.three = torch.empty(slots, shape.hidden, **make)
        logits = torch.rand(rows_max, shape.experts, device=f"cuda:{device}")
        self.ids = logits.topk(shape.topk, dim=1).indices.to(torch.int32)
        self.weights = torch.rand(rows_max, shape.topk, device=f"cuda:{device}")
        self.map = torch.full((shape.experts,), -1, dtype=torch.int32, device=f"cuda:{device}")
        self.map[: shape.local] = torch.arange(shape.local, dtype=torch.int32)

    def run(self, rows: int, config: Config) -> None:
        """Enqueue what depends on the tile, for the first `rows`."""
        from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

        shape, ids, weights = self.shape, self.ids[:rows], self.weights[:rows]
        order, experts, count = moe_align_block_size(
            ids, config["BLOCK_SIZE_M"], shape.experts, self.map, ignore_invalid_experts=True
        )
        slots = rows * shape.topk
        one = self.one[:slots].view(rows, shape.topk, -1)
        three = self.three[:slots].view(rows, shape.topk, -1)
        for a, b, out, scales, topk in (
            (self.x[:rows], self.w1, one, None, shape.topk),
            (self.two[:slots], self.w2, three, weights, 1),
        ):
            by_expert = (order, experts, count, scales is not None, topk, config)
            invoke_fused_moe_triton_kernel(a, b, out, None, None, scales, *by_expert, **_bf16())

    def microseconds(self, rows: int, config: Config) -> float:
        """Time one pass: the median of replays of a graph that holds several."""
        import torch

        self.run(rows, config)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(INNER):
                self.run(rows, config)
        graph.replay()
        times = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / INNER)
        return float(statistics.median(times))


def compile_share(shape: Shape, rows: int, share: Sequence[Config], device: int) -> int:
    """Compile a share of the tiles into the cache on disk; return how many would not."""
    layer = Layer(shape, rows, device)
    failed = 0
    for config in share:
        try:
            layer.run(rows, config)
        except Exception:  # noqa: BLE001  # what does not fit is not measured
            failed += 1
    return failed


def measure_share(
    shape: Shape, rows: Sequence[int], share: Sequence[Config], device: int
) -> list[tuple[int, Config, float]]:
    """Time a share of the tiles at each number of rows; tiles that cannot run are left out."""
    layer = Layer(shape, max(rows), device)
    found = []
    for config in share:
        for count in rows:
            try:
                found.append((count, config, layer.microseconds(count, config)))
            except Exception:  # noqa: BLE001  # nor is it here
                break
    return found


def best(found: Sequence[tuple[int, Config, float]]) -> dict[int, tuple[Config, float]]:
    """Return the fastest tile for each number of rows."""
    chosen: dict[int, tuple[Config, float]] = {}
    for rows, config, took_us in found:
        if rows not in chosen or took_us < chosen[rows][1]:
            chosen[rows] = (config, took_us)
    return chosen


def file_name(shape: Shape) -> str:
    """Return the name under which vLLM looks for this shape on this device."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_config_file_name

    return str(get_config_file_name(shape.local, shape.intermediate, None))


def defaults(shape: Shape, rows: Sequence[int]) -> dict[int, Config]:
    """Return what vLLM uses without a tuned file."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_default_config

    return {
        count: get_default_config(
            count, shape.local, shape.intermediate, shape.hidden, shape.topk, None
        )
        for count in rows
    }


def shares(configs: Sequence[Config], count: int) -> list[list[Config]]:
    """Deal the tiles out to so many processes, neighbours (which take equally long) to others."""
    return [list(configs[i::count]) for i in range(count)]


def tune(shape: Shape, rows: Sequence[int], *, jobs: int, gpus: int) -> dict[str, Any]:
    """Compile, measure, choose."""
    configs = candidates()
    start_s = time.monotonic()

    def said(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - start_s:6.1f} s  {text}\n")

    said(f"{len(configs)} tiles, {jobs} compiling processes, {gpus} GPUs")
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        tasks = [
            pool.submit(compile_share, shape, min(rows), share, i % gpus)
            for i, share in enumerate(shares(configs, jobs))
        ]
        failed = sum(task.result() for task in tasks)
        said(f"compiled; {failed} tiles do not fit")
        normal = defaults(shape, rows)
        measured = [
            pool.submit(measure_share, shape, rows, share, i)
            for i, share in enumerate(shares(configs, gpus))
        ]
        found = [one for task in measured for one in task.result()]
        said(f"measured {len(found)}")
        usual = [
            pool.submit(measure_share, shape, [count], [{"GROUP_SIZE_M": 1} | normal[count]], 0)
            for count in rows
        ]
        before = best([one for task in usual for one in task.result()])
    return {
        "shape": dataclasses.asdict(shape),
        "rows": summary(best(found), normal, before),
        "tiles": len(configs),
        "seconds": round(time.monotonic() - start_s, 1),
    }


def summary(
    chosen: Mapping[int, tuple[Config, float]],
    normal: Mapping[int, Config],
    before: Mapping[int, tuple[Config, float]],
) -> dict[str, dict[str, Any]]:
    """Set the chosen tiles beside vLLM's usual ones, by rows; None where the usual does not run."""
    return {
        str(count): {
            "default": normal[count],
            "default_us": round(before[count][1], 1) if count in before else None,
            "tuned": config,
            "tuned_us": round(took_us, 1),
        }
        for count, (config, took_us) in sorted(chosen.items())
    }


def main() -> None:
    """Tune one shape and write the file and the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("experts", "ranks", "hidden", "intermediate", "topk"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--rows", required=True, help="comma between")
    parser.add_argument("--out", type=Path, required=True, help="folder of the configuration")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 4))
    parser.add_argument("--gpus", type=int, default=1)
    given = parser.parse_args()
    shape = Shape(given.experts, given.ranks, given.hidden, given.intermediate, given.topk)
    rows = [int(word) for word in given.rows.split(",")]
    report = tune(shape, rows, jobs=given.jobs, gpus=given.gpus)
    given.out.mkdir(parents=True, exist_ok=True)
    tuned = {count: entry["tuned"] for count, entry in report["rows"].items()}
    (given.out / file_name(shape)).write_text(json.dumps(tuned, indent=1) + "\n")
    given.report.write_text(json.dumps(report, indent=1) + "\n")
    for count, entry in report["rows"].items():
        print(f"{count:>5} rows: {entry['default_us']} us -> {entry['tuned_us']} us")


if __name__ == "__main__":
    main()
