"""What data-parallel ranks tell each other before a step, over the group's own connections.

vLLM sums one small tensor over the ranks, each rank's numbers in a column of its own: that is a
gathering of columns. Over gloo it was the dearest single call of a small decode step.
"""

from typing import Any  # vLLM's objects are untyped here

import torch

_MARK = "splitwave_installed"


def install() -> None:
    """Apply in this process. Idempotent."""
    from vllm.v1.worker import dp_utils

    if getattr(dp_utils, _MARK, False):
        return
    setattr(dp_utils, _MARK, True)
    dp_utils._run_ar = gathered  # noqa: SLF001  # vLLM has no public seam here


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
