"""The two collectives of expert parallelism that vLLM's CPU communicator lacks, over gloo.

vLLM dispatches tokens to experts by `all_gatherv` and combines by `reduce_scatterv`
(its AgRsAll2AllManager). Rows per rank differ, gloo's collectives want them equal.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class CpuEpCommunicator(CpuCommunicator):
    """CpuCommunicator that gathers and scatters uneven numbers of rows."""

    def all_gatherv(
        self,
        input_: torch.Tensor | Sequence[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenate the rows of all ranks, in rank order; `sizes` are rows per rank.

        Several tensors of equal row count travel as one: their rows are packed as bytes.
        """
        assert dim == 0
        parts = [input_] if isinstance(input_, torch.Tensor) else list(input_)
        row_count = parts[0].shape[0]
        sizes = sizes or [row_count] * self.world_size
        assert len(sizes) == self.world_size
        assert sizes[self.rank_in_group] == row_count
        packed = torch.cat([_rows_as_bytes(part) for part in parts], dim=1)
        gathered = self._gather_padded(packed, sizes)
        widths = [_row_bytes(part) for part in parts]
        starts = accumulate(widths[:-1], initial=0)
        whole = [
            gathered[:, start : start + width]
            .contiguous()
            .view(part.dtype)
            .view((sum(sizes), *part.shape[1:]))
            for part, start, width in zip(parts, starts, widths, strict=True)
        ]
        return whole[0] if isinstance(input_, torch.Tensor) else whole

    def _gather_padded(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Gather byte rows of unequal count by padding each rank's to the largest."""
        most = max(sizes)
        sent = rows.new_zeros((most, rows.shape[1]))
        sent[: rows.shape[0]] = rows
        received = rows.new_empty((self.world_size * most, rows.shape[1]))
        dist.all_gather_single(received, sent, group=self.device_group)
        by_rank = received.view(self.world_size, most, -1)
        return torch.cat([by_rank[rank, :size] for rank, size in enumerate(sizes)])

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Sum over ranks and keep this rank's rows; `sizes` are rows per rank.

        Ranks exchange partial sums and add them in rank order in float32: the result does not
        depend on who arrives first, and half as much travels as in an all-reduce.
        """
        rows = input_.movedim(dim, 0).contiguous()
        sizes = sizes or [rows.shape[0] // self.world_size] * self.world_size
        assert rows.shape[0] == sum(sizes)
        own = sizes[self.rank_in_group]
        received = rows.new_empty((self.world_size * own, *rows.shape[1:]))
        dist.all_to_all_single(
            received, rows, [own] * self.world_size, list(sizes), group=self.device_group
        )
        by_rank = received.view((self.world_size, own, *rows.shape[1:]))
        return by_rank.float().sum(0).to(rows.dtype).movedim(0, dim).contiguous()


def _row_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _rows_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Shape [rows, bytes a row]; also of no rows at all."""
    return tensor.contiguous().view(torch.uint8).view(tensor.shape[0], _row_bytes(tensor))
