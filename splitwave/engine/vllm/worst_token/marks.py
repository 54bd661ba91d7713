"""Counters on the device that a collective's end moves on, readable while a kernel spins."""

from typing import Any  # torch's tensors and streams, which light environments lack

from splitwave.engine.vllm.worst_token.collectives import KINDS, MICROBATCHES_MAX


class DeviceMarks:
    """One counter a kind and microbatch. A mark is one tiny kernel, captured with the rest."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        size = len(KINDS) * MICROBATCHES_MAX
        # vLLM may measure its graphs' memory in inference mode, whose tensors no other thread
        # may write: reading would fail, and a rank whose counts stand still ends as wedged.
        with torch.inference_mode(False):
            self._counts = torch.zeros(size, dtype=torch.int64, device=device)
            self._cells = [self._counts[i : i + 1] for i in range(size)]
            self._host = torch.zeros(size, dtype=torch.int64, pin_memory=True)
        # A stream of its own: a copy queued behind a stuck kernel would never run.
        self._side = torch.cuda.Stream(device=device)
        self._device = device

    def mark(self, kind: str, microbatch: int = 0) -> None:
        """Enqueue, behind the collective, that it has ended."""
        self._cells[microbatch * len(KINDS) + KINDS.index(kind)].add_(1)

    def read(self) -> list[int]:
        """Copy the counts to the host, from any thread; does not wait for the compute stream."""
        with self._torch.cuda.device(self._device), self._torch.cuda.stream(self._side):
            self._host.copy_(self._counts, non_blocking=True)
            self._side.synchronize()
        return [int(value) for value in self._host.tolist()]


class NoMarks:
    """Where marks are switched off: nothing is counted on the device."""

    def mark(self, kind: str, microbatch: int = 0) -> None:
        """Do nothing."""

    def read(self) -> list[int]:
        """Return zeros."""
        return [0] * (len(KINDS) * MICROBATCHES_MAX)
