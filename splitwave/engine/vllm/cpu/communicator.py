"""The two collectives of expert parallelism that vLLM's CPU communicator lacks.

vLLM dispatches tokens to experts by `all_gatherv` and combines by `reduce_scatterv`
(its AgRsAll2AllManager). Rows per rank differ. All ranks of a group run on one machine.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any  # vLLM's arguments

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from splitwave.engine.vllm.cpu.exchange import Exchange


class CpuEpCommunicator(CpuCommunicator):
    """CpuCommunicator that gathers and scatters uneven numbers of rows."""

    exchange: Exchange | None = None
    """Of groups whose ranks are of data parallelism."""
    votes: Exchange | None = None
    """Of what they vote on between steps: apart, since a vote is no part of a step."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.world_size > 1 and self.unique_name.startswith(("dp", "ep")):
            self.exchange = Exchange(self.rank_in_group, self._share)
        if self.world_size > 1 and self.unique_name.startswith("dp"):
            self.votes = Exchange(self.rank_in_group, self._share)

    def _share(self, word: str) -> list[str]:
        words = [""] * self.world_size
        dist.all_gather_object(words, word, group=self.cpu_group)
        return words

    def destroy(self) -> None:
        """Give up the connections too."""
        super().destroy()
        for exchange in (self.exchange, self.votes):
            if exchange is not None:
                exchange.close()

    def all_gatherv(
        self,
        input_: torch.Tensor | Sequence[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenate the rows of all ranks, in rank order; `sizes` are rows per rank.

        Several tensors of equal row count travel as one message.
        """
        assert dim == 0
        parts = [input_] if isinstance(input_, torch.Tensor) else list(input_)
        row_count = parts[0].shape[0]
        sizes = sizes or [row_count] * self.world_size
        assert len(sizes) == self.world_size
        assert sizes[self.rank_in_group] == row_count
        places = list(pairwise(accumulate(sizes, initial=0)))
        begin, end = places[self.rank_in_group]
        whole = []
        by_rank: list[list[memoryview]] = [[] for _ in places]
        for part in parts:
            all_rows = part.new_empty((sum(sizes), *part.shape[1:]))
            all_rows[begin:end] = part
            for rank, rows in enumerate(_bytes_by_place(all_rows, places)):
                by_rank[rank].append(rows)
            whole.append(all_rows)
        self._exchange([by_rank[self.rank_in_group]] * self.world_size, by_rank)
        return whole[0] if isinstance(input_, torch.Tensor) else whole

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
        places = list(pairwise(accumulate(sizes, initial=0)))
        begin, end = places[self.rank_in_group]
        by_rank = rows.new_empty((self.world_size, end - begin, *rows.shape[1:]))
        by_rank[self.rank_in_group] = rows[begin:end]
        each = list(pairwise(range(self.world_size + 1)))
        self._exchange(
            [[part] for part in _bytes_by_place(rows, places)],
            [[part] for part in _bytes_by_place(by_rank, each)],
        )
        return by_rank.sum(0, dtype=torch.float32).to(rows.dtype).movedim(0, dim).contiguous()

    def _exchange(
        self, sent: Sequence[Sequence[memoryview]], received: Sequence[Sequence[memoryview]]
    ) -> None:
        assert self.exchange is not None, f"{self.unique_name} has no ranks of data parallelism"
        self.exchange.all_to_all(sent, received)


def _bytes_by_place(tensor: torch.Tensor, places: Sequence[tuple[int, int]]) -> list[memoryview]:
    """The memory of each of these ranges of a contiguous tensor's first dimension."""
    if not tensor.numel():
        return [memoryview(b"")] * len(places)
    memory = tensor.view(torch.uint8).numpy().data.cast("B")
    row_bytes = memory.nbytes // tensor.shape[0]
    return [memory[begin * row_bytes : end * row_bytes] for begin, end in places]
