"""Configurations in which a decode step could leave its graphs are refused, by rule."""

from collections.abc import Sequence
from dataclasses import dataclass

BACKENDS = {
    ("v2", False): "deepep_v2",
    # Only the legacy prepare and finalize hand over between microbatches (`bridge`).
    ("v2", True): "deepep_high_throughput",
    ("legacy", False): "deepep_high_throughput",
    ("legacy", True): "deepep_high_throughput",
}
"""vLLM's all2all_backend, by transport and whether there are microbatches."""


class WorstTokenRefused(ValueError):
    """A rule forbids this configuration. The message names the rule and the fix."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(f"worst-token dispatch, rule {rule}: {fix}")
        self.rule = rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What of vLLM's resolved configuration decides how steps run."""

    cudagraph_mode: str
    """CUDAGraphMode's name."""
    capture_sizes: Sequence[int]
    sequences_max: int
    """max_num_seqs."""
    batch_max_tokens: int
    """max_num_batched_tokens."""
    ranks: int
    expert_parallel: bool
    breakable_graphs: bool
    microbatched: bool
    backend: str
    """all2all_backend."""
    data_parallel_runner_v2: bool
    """vLLM's second model runner replays whole-step graphs that all ranks agree on."""


def check(resolved: Resolved, transport: str) -> None:
    """Raise WorstTokenRefused for the first rule that is broken."""
    if resolved.cudagraph_mode != "FULL_DECODE_ONLY":
        raise WorstTokenRefused(
            "whole_step",
            f"cudagraph_mode is {resolved.cudagraph_mode}; set FULL_DECODE_ONLY",
        )
    if resolved.breakable_graphs:
        raise WorstTokenRefused("not_breakable", "unset VLLM_USE_BREAKABLE_CUDAGRAPH")
    if not resolved.data_parallel_runner_v2:
        raise WorstTokenRefused("runner_v2", "set VLLM_USE_V2_MODEL_RUNNER=1")
    if not resolved.expert_parallel or resolved.ranks < 2:
        raise WorstTokenRefused("expert_parallel", "use two or more ranks with expert parallelism")
    _check_grid(resolved)
    backend = BACKENDS[transport, resolved.microbatched]
    if resolved.backend != backend:
        raise WorstTokenRefused(
            "backend",
            f"all2all_backend is {resolved.backend}; with transport {transport} "
            f"{'and' if resolved.microbatched else 'without'} microbatches use {backend}",
        )


def _check_grid(resolved: Resolved) -> None:
    if not resolved.capture_sizes:
        raise WorstTokenRefused("grid", "cudagraph_capture_sizes is empty; list the batch sizes")
    largest = max(resolved.capture_sizes)
    if resolved.sequences_max > largest:
        raise WorstTokenRefused(
            "grid_covers_seats",
            f"max_num_seqs is {resolved.sequences_max}, the largest captured size {largest}: "
            "capture more, or seat fewer",
        )
    if resolved.batch_max_tokens > 2 * largest:
        raise WorstTokenRefused(
            "decode_batch",
            f"max_num_batched_tokens is {resolved.batch_max_tokens}: a decode engine needs no "
            f"more than its largest captured size, {largest}; its buffers are sized by it",
        )


def check_hosts(hosts: int) -> None:
    """Raise WorstTokenRefused unless the legacy buffer, once made, found all ranks on one host."""
    if hosts > 1:
        raise WorstTokenRefused(
            "one_host", f"num_worst_tokens is for one host, not {hosts}; use transport v2"
        )
