"""What data-parallel ranks tell each other around a step, over the group's own connections.

Before it vLLM sums one small tensor over the ranks, each rank's numbers in a column of its own:
that is a gathering of columns. Behind it, now and then, they vote whether any has work. Over gloo
these were the dearest calls of a small decode step.
"""

import struct
from collections.abc import Callable
from typing import Any  # vLLM's objects are untyped here

import torch

from splitwave.engine.vllm.cpu.exchange import Exchange

_MARK = "splitwave_installed"
_VOTE = struct.Struct("<??")


def install() -> None:
    """Apply in this process. Idempotent."""
    from vllm.config import ParallelConfig
    from vllm.v1.worker import dp_utils

    if getattr(dp_utils, _MARK, False):
        return
    setattr(dp_utils, _MARK, True)
    dp_utils._run_ar = gathered  # noqa: SLF001  # vLLM has no public seam here
    ParallelConfig.sync_dp_state = staticmethod(voted(ParallelConfig.sync_dp_state))


def gathered(
    should_ubatch: bool,  # vLLM's signature
    orig_num_tokens_per_ubatch: int,
    padded_num_tokens_per_ubatch: int,
    cudagraph_mode: int,
    parallel_config: Any,  # vLLM's ParallelConfig
) -> torch.Tensor:
    """By row the tokens, the padded tokens, 1 for micro-batches and the graph mode, int32
    [4, ranks]; by column the ranks."""
    from vllm.distributed.parallel_state import get_dp_group

    told = torch.tensor(
        [
            [
                orig_num_tokens_per_ubatch,
                padded_num_tokens_per_ubatch,
                int(should_ubatch),
                cudagraph_mode,
            ]
        ],
        dtype=torch.int32,
    )
    columns: torch.Tensor = get_dp_group().all_gatherv(told)
    return columns.T.contiguous()


def voted(ask: Callable[..., tuple[bool, bool]]) -> Callable[..., tuple[bool, bool]]:
    """vLLM's vote where the engine's process is also its worker's, and its own where it is not.

    True of any rank's work or of a pause that only some want; true of a pause that all want.
    """

    def asked(dp_group: Any, *, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:
        exchange = _votes()
        if exchange is None:
            return ask(dp_group, has_unfinished=has_unfinished, pending_pause=pending_pause)
        own = bytearray(_VOTE.pack(has_unfinished, pending_pause))
        ballots = [own if rank == exchange.rank else bytearray(2) for rank in range(exchange.ranks)]
        views = [[memoryview(ballot)] for ballot in ballots]
        exchange.all_to_all([[memoryview(own)]] * exchange.ranks, views)
        works, pauses = zip(*map(_VOTE.unpack, ballots), strict=True)
        return any(works) or any(pauses) != all(pauses), all(pauses)

    return asked


def _votes() -> Exchange | None:
    from vllm.distributed import parallel_state

    group = parallel_state._DP  # noqa: SLF001  # its public question fails where there is none
    found: Exchange | None = getattr(group and group.device_communicator, "votes", None)
    return found
