"""Execution modes: how a pool's engines run, and which kinds of step they may execute.

The table is the only source of an engine's execution arguments. A step of a kind that the group's
mode does not name is a violation.
"""

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


class StepKind(enum.StrEnum):
    """How one step of one rank was executed."""

    EAGER = "eager"
    """Operator by operator; any batch shape."""
    EAGER_UBATCHED = "eager_ubatched"
    """Eager, as two microbatches whose communication overlaps."""
    COMPILED = "compiled"
    """Code that torch.compile made, without a captured graph."""
    FULL = "full"
    """One replayed CUDA graph for the whole step."""
    UBATCHED_FULL = "ubatched_full"
    """One replayed CUDA graph that holds the two-microbatch interleave."""


class Device(enum.StrEnum):
    """What a mode's engines compute on."""

    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a machine or a build must have for a mode."""

    name: str
    words: str
    """The need as an error message says it."""


CPU_BUILD = Need("cpu_build", "vLLM's CPU build (the extra `cpu`)")
GPU_BUILD = Need("gpu_build", "vLLM's CUDA build (the extra `gpu`)")
GPU_PER_RANK = Need("gpu_per_rank", "one NVIDIA GPU of compute capability 9.0 for each rank")
NVLINK = Need("nvlink", "NVLink between all GPUs of the group")
DEEP_EP = Need("deep_ep", "the deep_ep package (sgl-deep-ep)")
NVSHMEM = Need("nvshmem", "NVSHMEM with an RDMA or NVLink transport")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One row of the table."""

    name: str
    role: str
    """`prefill` or `decode`."""
    device: Device
    summary: str
    step_kinds: frozenset[StepKind]
    vllm_args: Mapping[str, object] = field(default_factory=dict)
    """Engine arguments by vLLM's names; nothing else sets these."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the engine processes, and of the process that starts them."""
    needs: tuple[Need, ...] = ()
    excludes: tuple[str, ...] = ()
    """Features that must be off, by name."""
    expert_parallel: bool = False
    """True if the mode exists only with expert parallelism over at least two ranks."""
    capture_step_tokens: int | None = None
    """Graph modes: distance of neighbouring capture sizes, tokens a rank."""
    capture_alignment_tokens: int = 1
    """A size of the grid is a multiple of this; with microbatches each half stays aligned."""
    step_min_tokens: int = 0
    """Floor of a rank's step below which the mode is not at its best; for placement."""

    @property
    def captures_graphs(self) -> bool:
        """True if steps replay captured CUDA graphs, so a batch must fit a captured size."""
        return self.capture_step_tokens is not None

    @property
    def has_grid(self) -> bool:
        """True if only batch sizes of a grid may run: captured ones, or warmed-up ones."""
        return self.captures_graphs or StepKind.COMPILED in self.step_kinds

    def dense_grid(self, seats_max: int) -> tuple[int, ...]:
        """The batch sizes to capture or warm up so that a batch of every seat fits and padding
        is least; empty in an eager mode."""
        if not self.has_grid:
            return ()
        step = self.capture_step_tokens or 1
        return tuple(range(step, step * math.ceil(seats_max / step) + 1, step))


_CPU_ENV = {
    "SPLITWAVE_FORK": "1",
    "SPLITWAVE_NIXL_PROGRESS_THREAD": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Engines are forked from a process that has imported vLLM already, without a worker process of
their own; NIXL's progress thread would take a core for itself; ranks share the cores."""

_CPU_ARGS = {
    "all2all_backend": "allgather_reducescatter",
    "distributed_executor_backend": "uni",
    "async_scheduling": False,
    "dp_sync_interval": 4,
}
"""Ranks vote on a pause every 4 steps and not every 16: a step that finds no work costs the CPU as
much as one that does."""
_NEVER = ("speculative_decoding", "eplb", "lora", "pipeline_parallel")
_GRAPH_NEEDS = (GPU_BUILD, GPU_PER_RANK)
_GRAPH_EXCLUDES = (*_NEVER, "prefix_caching", "breakable_graphs")
_WHOLE_STEPS = MappingProxyType({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})
"""Without torch.compile: it saved 3% of a step on an H200 and changed the tokens."""


def _worst_token(transport: str) -> Mapping[str, str]:
    """Return the environment that puts a worst-token transport into an engine's workers."""
    # With microbatches vLLM would fall back to its first model runner.
    return MappingProxyType({"SPLITWAVE_WORST_TOKEN": transport, "VLLM_USE_V2_MODEL_RUNNER": "1"})


def _cpu(name: str, kind: StepKind, summary: str) -> Mode:
    """Describe a mode of the embedded default."""
    role = name.partition("_")[0]
    return Mode(
        name=name,
        role=role,
        device=Device.CPU,
        summary=summary,
        step_kinds=frozenset({kind}),
        vllm_args=MappingProxyType(_CPU_ARGS | {"enforce_eager": kind is StepKind.EAGER}),
        env=MappingProxyType(_CPU_ENV),
        needs=(CPU_BUILD,),
        excludes=_NEVER if role == "prefill" else (*_NEVER, "prefix_caching"),
    )


def _graph(
    name: str,
    backend: str,
    summary: str,
    needs: tuple[Need, ...] = (),
    env: Mapping[str, str] = MappingProxyType({}),
) -> Mode:
    """Describe a decode mode whose every step is one replayed graph."""
    return Mode(
        name=name,
        role="decode",
        device=Device.GPU,
        summary=summary,
        step_kinds=frozenset({StepKind.FULL}),
        vllm_args=MappingProxyType(
            {
                "all2all_backend": backend,
                "async_scheduling": True,
                "enforce_eager": False,
                "compilation_config": _WHOLE_STEPS,
            }
        ),
        env=env,
        needs=(*_GRAPH_NEEDS, *needs),
        excludes=_GRAPH_EXCLUDES,
        expert_parallel=True,
        capture_step_tokens=8,
        capture_alignment_tokens=8,
    )


def _prefill(
    name: str,
    summary: str,
    kinds: frozenset[StepKind],
    arguments: Mapping[str, object] = MappingProxyType({}),
    env: Mapping[str, str] = MappingProxyType({}),
) -> Mode:
    """Describe an eager prefill mode over DeepEP's high-throughput kernels."""
    return Mode(
        name=name,
        role="prefill",
        device=Device.GPU,
        summary=summary,
        step_kinds=kinds,
        vllm_args=MappingProxyType(
            {
                "all2all_backend": "deepep_high_throughput",
                "async_scheduling": True,
                "enforce_eager": True,
                **arguments,
            }
        ),
        # With microbatches vLLM would fall back to its first model runner; one for both.
        env=MappingProxyType({"VLLM_USE_V2_MODEL_RUNNER": "1", **env}),
        needs=(GPU_BUILD, GPU_PER_RANK, NVLINK, DEEP_EP),
        excludes=_NEVER,
        expert_parallel=True,
    )


_TABLE = (
    _prefill(
        "prefill_eager_ht",
        "eager steps, DeepEP high-throughput all-to-all",
        frozenset({StepKind.EAGER}),
    ),
    _prefill(
        "prefill_eager_ht_dbo",
        "prefill_eager_ht with large steps as two microbatches, a request split over both",
        frozenset({StepKind.EAGER_UBATCHED, StepKind.EAGER}),
        {
            "enable_dbo": True,
            # Of the rank with the fewest tokens: below it every rank runs its step whole.
            "dbo_prefill_token_threshold": 512,
        },
        {
            "SPLITWAVE_HANDOVERS": "1",
            # Multiprocessors for dispatch and combine; vLLM takes 20 at most.
            "VLLM_DBO_COMM_SMS": "20",
        },
    ),
    _graph(
        "decode_graph_ht",
        "deepep_v2",
        "attention, worst-token dispatch over DeepEP V2, experts and combine in one graph a shape",
        (NVLINK, DEEP_EP),
        _worst_token("v2"),
    ),
    _graph(
        "decode_graph_ht_legacy",
        "deepep_high_throughput",
        "decode_graph_ht over DeepEP's legacy kernels, a buffer a shape, within one host",
        (NVLINK, DEEP_EP),
        _worst_token("legacy"),
    ),
    Mode(
        name="decode_graph_ht_tbo",
        role="decode",
        device=Device.GPU,
        summary="decode_graph_ht with the two-microbatch interleave inside the graph",
        step_kinds=frozenset({StepKind.UBATCHED_FULL, StepKind.FULL}),
        vllm_args=MappingProxyType(
            {
                "all2all_backend": "deepep_high_throughput",
                "async_scheduling": True,
                "enforce_eager": False,
                "enable_dbo": True,
                "compilation_config": _WHOLE_STEPS,
            }
        ),
        # vLLM interleaves over the legacy backend alone; its rows are carried by DeepEP V2.
        env=_worst_token("v2"),
        needs=(*_GRAPH_NEEDS, NVLINK, DEEP_EP),
        excludes=_GRAPH_EXCLUDES,
        expert_parallel=True,
        capture_step_tokens=32,
        capture_alignment_tokens=32,
        # vLLM's own threshold for two microbatches in decode (dbo_decode_token_threshold).
        step_min_tokens=32,
    ),
    _graph(
        "decode_graph_ag",
        "allgather_reducescatter",
        "one graph a shape over all-gather and reduce-scatter",
    ),
    _graph(
        "decode_graph_ll",
        "deepep_low_latency",
        "one graph a shape over DeepEP low-latency all-to-all",
        (DEEP_EP, NVSHMEM),
    ),
    _cpu("prefill_cpu_eager", StepKind.EAGER, "the embedded default's prefill, eager on the CPU"),
    _cpu("decode_cpu_eager", StepKind.EAGER, "the embedded default's decode, eager on the CPU"),
    _cpu(
        "decode_cpu_compiled",
        StepKind.COMPILED,
        "decode on the CPU through torch.compile: slow to start, a faster step",
    ),
)

MODES: Mapping[str, Mode] = MappingProxyType({mode.name: mode for mode in _TABLE})
"""Every execution mode, by name."""


class UnknownModeError(ValueError):
    """No mode of that name is in the table."""


def lookup(name: str) -> Mode:
    """Return the mode called `name`; UnknownModeError lists those that exist."""
    try:
        return MODES[name]
    except KeyError:
        known = ", ".join(sorted(MODES))
        raise UnknownModeError(f"mode: unknown mode {name!r}; known modes are {known}") from None


def missing_needs(mode: Mode, facts: Collection[str]) -> list[str]:
    """Say in words what `mode` needs and `facts`, the names of needs that are met, lack."""
    return [need.words for need in mode.needs if need.name not in facts]
