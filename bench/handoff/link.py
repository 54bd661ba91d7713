"""What the link can do: plain copies of the same sizes, in a process of its own.

On GPUs from the memory of the first visible device into that of the second, as the driver does it
between peers; on the CPU from one array into another.
"""

import json
import sys
import time
from typing import Any  # torch's tensors

REPEATS = 7


def rates(device: str, sizes: list[int]) -> dict[str, Any]:
    """GB/s of the best and the median copy, by size, and whether the devices are peers."""
    import torch

    there, here = ("cuda:0", "cuda:1") if device == "cuda" else ("cpu", "cpu")
    if device == "cuda" and torch.cuda.device_count() < 2:
        here = "cuda:0"
    found = []
    for size in sizes:
        source = torch.ones(size, dtype=torch.uint8, device=there)
        target = torch.zeros(size, dtype=torch.uint8, device=here)
        seconds = sorted(_timed(target, source) for _ in range(REPEATS + 2))[:REPEATS]
        assert bool((target == 1).all())
        found.append(
            {
                "bytes": size,
                "gb_per_s": size / seconds[0] / 1e9,
                "gb_per_s_median": size / seconds[len(seconds) // 2] / 1e9,
            }
        )
        del source, target
    peers = device == "cuda" and here != there and torch.cuda.can_device_access_peer(1, 0)
    return {"copies": found, "peers": peers, "torch": torch.__version__}


def _timed(target: Any, source: Any) -> float:
    import torch

    if source.is_cuda:
        for device in {source.device, target.device}:
            torch.cuda.synchronize(device)
    began_s = time.perf_counter()
    target.copy_(source, non_blocking=True)
    if source.is_cuda:
        for device in {source.device, target.device}:
            torch.cuda.synchronize(device)
    return time.perf_counter() - began_s


if __name__ == "__main__":
    print(json.dumps(rates(sys.argv[1], [int(size) for size in sys.argv[2].split(",")])))
