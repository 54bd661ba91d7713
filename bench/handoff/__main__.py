"""Measure handoffs of one or several kinds of KV cache, and keep each as it is done."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any  # results are JSON

from bench.decode_modes.rows import Results
from bench.decode_modes.tree import free_ports
from bench.handoff import fence
from bench.handoff.parent import ROOT, Place, SideFailed, Told, sides
from bench.handoff.shapes import CACHES, Cache, sizes
from bench.handoff.side import chosen
from bench.provenance import provenance
from splitwave.core.mode import lookup
from splitwave.engine.vllm.config import NIXL_READS_BY_IPC

PATTERNS = ("row", "scattered")
WARM = 1
SPARE_BLOCKS = 64
"""Blocks of a cache beyond the largest handoff, so that scattered ones have room to be so."""
HOST_ONLY = {"UCX_TLS": "^cuda_ipc"}
"""The control on GPUs: without this way between their memories, copies go through the host."""
WAYS = re.compile(r"\b(cuda_ipc|cuda_copy|gdr_copy|cma|xpmem|knem|sysv|posix|self|tcp|rc_\w+)\b")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="bench.handoff", description=__doc__)
    add = made.add_argument
    add("--device", choices=("cpu", "cuda"), required=True)
    add("--out", type=Path, help="results file, gone on with; empty: printed")
    add("--caches", default=",".join(CACHES), help=f"of {', '.join(CACHES)}")
    add("--blocks-max", type=int, default=4096)
    add("--gib-max", type=float, default=16.0, help="largest KV cache of one side")
    add("--repeats", type=int, default=9, help="handoffs of each size")
    add("--prefill-device", type=int, default=0)
    add("--decode-device", type=int, default=1)
    add("--limit-s", type=float, default=240.0, help="of one cache, its start included")
    add("--confirmations", type=int, default=2000)
    add("--again", action="store_true", help="measure what is done, too")
    add("--work-dir", type=Path, help="logs; kept")
    return made


def places(asked: argparse.Namespace, more: Mapping[str, str]) -> dict[str, Place]:
    """Where the two sides run."""
    port, found = free_ports(), {}
    pair = {"prefill": asked.prefill_device, "decode": asked.decode_device}
    for number, (role, own) in enumerate(pair.items()):
        others = [str(x) for x in dict.fromkeys(pair.values()) if x != own]
        env = dict(lookup(f"{role}_cpu_eager").env if asked.device == "cpu" else NIXL_READS_BY_IPC)
        found[role] = Place(
            role=role,
            device=asked.device,
            order=",".join([str(own), *others]),
            port=port + number,
            environment=env | dict(more),
        )
    return found


def blocks_of(cache: Cache, asked: argparse.Namespace) -> int:
    """Blocks of the largest handoff that fits."""
    fits = int(asked.gib_max * 2**30) // cache.block_bytes(asked.device) - SPARE_BLOCKS
    return max(1, min(int(asked.blocks_max), fits))


def measure(
    name: str, asked: argparse.Namespace, folder: Path, more: Mapping[str, str]
) -> dict[str, Any]:
    """Handoffs of one cache, by number of blocks and pattern."""
    cache, until_s = CACHES[name], time.monotonic() + asked.limit_s
    most = blocks_of(cache, asked)
    there = places(asked, more)
    with sides(cache, name, there, most + SPARE_BLOCKS, folder) as both:
        facts = {role: side.hear(until_s) for role, side in both.items()}
        remote = {"engine_id": facts["prefill"]["engine_id"], "port": there["prefill"].port}
        pair = Pair(both["prefill"], both["decode"], remote, facts["decode"]["blocks"], until_s)
        pair.fill()
        handshake_s = pair.row(1, "row", WARM)["seconds"][0]
        rows: list[dict[str, Any]] = [
            {"blocks": blocks, "pattern": pattern} | pair.row(blocks, pattern, asked.repeats)
            for blocks in sizes(most)
            for pattern in PATTERNS
        ]
    block_bytes = cache.block_bytes(asked.device)
    for row in rows:
        if set(row["moved"]) != {row["blocks"] * block_bytes}:
            raise SideFailed(f"{row['moved']} bytes were moved, of {row['blocks']} blocks")
        row |= rates(row.pop("seconds"), row["blocks"] * block_bytes)
        row["bytes"] = row.pop("moved")[0]
    return {
        "words": cache.words,
        "block_bytes": block_bytes,
        "block_tokens": cache.block_tokens[asked.device],
        "dtype": cache.dtype[asked.device],
        "handshake_s": handshake_s,
        "sides": facts,
        "rows": rows,
        "ways": ways(folder),
    }


class Pair:
    """Both sides and what of their caches was used."""

    def __init__(
        self, prefill: Told, decode: Told, remote: Mapping[str, Any], blocks: int, until_s: float
    ) -> None:
        self._prefill, self._decode, self._remote = prefill, decode, remote
        self._blocks, self._until_s = blocks, until_s
        self._number = 0

    def fill(self) -> None:
        """Other bytes on either side."""
        for seed, side in enumerate((self._prefill, self._decode)):
            side.ask(self._until_s, do="fill", seed=1 + 7919 * seed)

    def row(self, blocks: int, pattern: str, repeats: int) -> dict[str, Any]:
        """Handoffs of one size; what came is what was sent, or this fails."""
        self._number += 1
        names = [f"{self._number}-{n}" for n in range(repeats)]
        lists = [chosen(blocks, self._blocks, pattern, seed) for seed in range(repeats)]
        looked = lists[-1][-64:]
        self._decode.ask(self._until_s, do="fill", seed=1 + self._number)
        before = self._sums(looked)
        self._prefill.ask(self._until_s, do="lend", names=names)
        self._prefill.say(do="returned", names=names, within_s=self._until_s - time.monotonic())
        pulled = self._decode.ask(
            self._until_s, do="pull", remote=self._remote, names=names, blocks=lists
        )
        missing = self._prefill.hear(self._until_s)["missing"]
        after = self._sums(looked)
        if missing:
            raise SideFailed(f"prefill was not told of the end of {missing}")
        if any(ours == theirs for ours, theirs in zip(*before, strict=True)):
            raise SideFailed("blocks were equal before they were pulled: nothing can be seen")
        if after[0] != after[1]:
            raise SideFailed(f"of {blocks} blocks ({pattern}) some are not what prefill holds")
        return {"seconds": pulled["seconds"], "moved": pulled["bytes"]}

    def _sums(self, blocks: list[int]) -> tuple[list[int], list[int]]:
        found = [
            side.ask(self._until_s, do="sums", blocks=blocks)["sums"]
            for side in (self._prefill, self._decode)
        ]
        return found[0], found[1]


def rates(seconds: Sequence[float], size: int) -> dict[str, float]:
    """Of handoffs of one size."""
    return {
        "ms_p50": median(seconds) * 1e3,
        "ms_best": min(seconds) * 1e3,
        "gb_per_s_p50": size / median(seconds) / 1e9,
        "gb_per_s_best": size / min(seconds) / 1e9,
    }


def ways(folder: Path) -> dict[str, list[str]]:
    """How each side's UCX reads remote memory, from the tables in its log.

    A table's heading names the operation; others than reads are of messages, not of KV.
    """
    found = {}
    for role in ("prefill", "decode"):
        reading, seen = False, set[str]()
        for line in (folder / f"{role}.log").read_text(errors="replace").splitlines():
            if "ucp_" in line:
                reading = "ucp_get" in line
            elif reading and "|" in line:
                seen |= set(WAYS.findall(line))
        found[role] = sorted(seen)
    return found


def through_host(result: Mapping[str, Any], device: str) -> str:
    """Whether any copy went through the host, and by what that is known."""
    if device == "cpu":
        return "all memory here is the host's"
    sides_ = result["sides"].values()
    if any(side["host_buffer"] or side["memory"] != "VRAM" for side in sides_):
        return "yes: the connector staged in host memory"
    best = max(row["gb_per_s_best"] for row in result["rows"])
    control = result.get("control")
    if control is None:
        return "not known: the control did not run"
    staged = max(row["gb_per_s_best"] for row in control["rows"])
    seen = f"{best:.1f} GB/s, {staged:.1f} with cuda_ipc forbidden"
    return f"no: {seen}" if best > 2 * staged else f"perhaps: {seen}"


def link(device: str, asked: argparse.Namespace, most_bytes: int) -> dict[str, Any]:
    """Plain copies between the same two places."""
    wanted = [size for size in (1 << 20, 1 << 24, 1 << 28, 1 << 30) if size <= most_bytes]
    command = [sys.executable, "-m", "bench.handoff.link", device, ",".join(map(str, wanted))]
    env = dict(os.environ)
    if device == "cuda":
        numbers = dict.fromkeys((asked.prefill_device, asked.decode_device))
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure; 0 if all that was asked for is there now."""
    asked = parser().parse_args(arguments)
    names = [name for name in asked.caches.split(",") if name]
    if unknown := set(names) - CACHES.keys():
        print(f"unknown: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    work_dir = (asked.work_dir or Path(tempfile.mkdtemp(prefix="handoff_"))).resolve()
    results = Results(asked.out or work_dir / "results.json")
    command = "python -m bench.handoff " + " ".join(arguments)
    results.data |= provenance(
        command, paths=["bench/handoff", "splitwave"], packages=["torch", "nixl"]
    )
    results.data["device"] = asked.device
    for name in names:
        if results.rows.get(name, {}).get("status") == "done" and not asked.again:
            continue
        for row in stages(name, asked, work_dir / name):
            results.rows[name] = row
            results.save()
        print(f"{name}: {results.rows[name].get('why', 'done')}", file=sys.stderr, flush=True)
    if asked.confirmations and ("fence" not in results.data or asked.again):
        results.data["fence"] = fence.cost(asked.confirmations, (1, 16), work_dir)
        results.save()
    most = max(CACHES[name].block_bytes(asked.device) * asked.blocks_max for name in names)
    results.data["link"] = link(asked.device, asked, min(most, int(asked.gib_max * 2**29)))
    results.data["load_average"] = os.getloadavg()[0]
    results.data["ended"] = time.strftime("%F %T UTC", time.gmtime())
    results.save()
    if asked.out is None:
        print(json.dumps(results.data))
    return 0 if all(results.rows[name]["status"] == "done" for name in names) else 1


def stages(name: str, asked: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """One cache's result, or why there is none; on GPUs as it is before and after its control."""
    try:
        found = measure(name, asked, folder, {})
    except SideFailed as failed:
        yield {"status": "failed", "why": str(failed)}
        return
    if asked.device == "cuda":
        yield found | {"status": "without control"}  # Its engines start anew: time may run out.
        try:
            found["control"] = measure(name, asked, folder / "control", HOST_ONLY)
        except SideFailed as failed:
            found["control_failed"] = str(failed)
    found["through_host"] = through_host(found, asked.device)
    yield found | {"status": "done"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
