"""The modes that are compared: what an engine is given, and what in its environment.

These are engine arguments by vLLM's names. All modes share the rest (`engine_arguments`).
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitwave.core.mode import MODES as SERVED

CAPTURE_SIZES = "cudagraph_capture_sizes"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeMode:
    """One way to run the same steps."""

    name: str
    words: str
    kinds: frozenset[str]
    """Kinds of step that it may run after warm-up, as `splitwave.engine.vllm.steps` names them."""
    arguments: Mapping[str, object]
    env: Mapping[str, str] = field(default_factory=dict)
    device: str = "gpu"
    alignment: int = 8
    """Distance of captured sizes below a batch."""

    @property
    def captures(self) -> bool:
        """True if steps are captured graphs."""
        return isinstance(self.arguments.get("compilation_config"), Mapping)


def _eager(name: str, backend: str, words: str, **env: str) -> DecodeMode:
    return DecodeMode(
        name=name, words=words, kinds=frozenset({"eager"}), env=env,
        arguments={"all2all_backend": backend, "enforce_eager": True},
    )  # fmt: skip


def _graph(
    name: str, backend: str, words: str, env: Mapping[str, str] = {}, *, compiled: bool = False
) -> DecodeMode:
    return DecodeMode(
        name=name, words=words, kinds=frozenset({"full"}), env=dict(env),
        arguments={
            "all2all_backend": backend,
            "enforce_eager": False,
            "compilation_config": {
                "mode": 3 if compiled else 0, "cudagraph_mode": "FULL_DECODE_ONLY"
            },
        },
    )  # fmt: skip


def _cpu(name: str, served: str, kind: str, words: str) -> DecodeMode:
    mode = SERVED[served]
    return DecodeMode(
        name=name, words=words, kinds=frozenset({kind}), device="cpu", env=dict(mode.env),
        arguments=dict(mode.vllm_args),
    )  # fmt: skip


def _interleaved(name: str, backend: str, words: str) -> DecodeMode:
    mode = _graph(name, backend, words, V2 | {"VLLM_USE_V2_MODEL_RUNNER": "1"})
    return dataclasses.replace(
        mode, kinds=frozenset({"full", "ubatched_full"}), alignment=32,
        arguments=dict(mode.arguments) | {"enable_dbo": True, "dbo_decode_token_threshold": 32},
    )  # fmt: skip


STOCK = {"VLLM_PLUGINS": ""}
V2 = {"SPLITWAVE_WORST_TOKEN": "v2"}
LEGACY = {"SPLITWAVE_WORST_TOKEN": "legacy"}

_TABLE = (
    _eager("eager_ht", "deepep_high_throughput", "eager, DeepEP high-throughput"),
    _eager("eager_ag", "allgather_reducescatter", "eager, all-gather and reduce-scatter"),
    _graph("graph_v2", "deepep_v2", "one graph a step, worst-token dispatch over DeepEP V2", V2),
    _graph(
        "graph_legacy", "deepep_high_throughput",
        "one graph a step, worst-token dispatch over DeepEP's legacy kernels", LEGACY,
    ),
    _graph(
        "graph_v2_compiled", "deepep_v2", "graph_v2 with the model through torch.compile", V2,
        compiled=True,
    ),
    _graph("stock_v2", "deepep_v2", "vLLM's own deepep_v2, without Splitwave's plugin", STOCK),
    _graph("graph_ag", "allgather_reducescatter", "one graph a step, all-gather"),
    _graph("graph_ll", "deepep_low_latency", "one graph a step, DeepEP low-latency"),
    _interleaved(
        "graph_tbo_v2", "deepep_high_throughput",
        "graph_v2 with two microbatches interleaved in the graph",
    ),
    _cpu("cpu_eager", "decode_cpu_eager", "eager", "eager on the CPU"),
    _cpu("cpu_compiled", "decode_cpu_compiled", "compiled", "compiled on the CPU"),
)  # fmt: skip

MODES: Mapping[str, DecodeMode] = {mode.name: mode for mode in _TABLE}
"""Every mode, by name."""


def capture_sizes(batches: Sequence[int], alignment: int) -> list[int]:
    """Sizes to capture: every batch, and steps of powers of two below the largest.

    All are multiples of `alignment`, so a walk over ragged batches meets several of them.
    """
    largest = max(batches)
    sizes = {-(-batch // alignment) * alignment for batch in batches}
    size = alignment
    while size < largest:
        sizes.add(size)
        size *= 2
    return sorted(sizes)


def engine_arguments(
    mode: DecodeMode, batches: Sequence[int], sizes: Sequence[int] = ()
) -> dict[str, object]:
    """Arguments that depend on the mode; `sizes` replaces the captured sizes."""
    arguments = dict(mode.arguments)
    compilation = arguments.get("compilation_config")
    if isinstance(compilation, Mapping):
        chosen = list(sizes) or capture_sizes(batches, mode.alignment)
        arguments["compilation_config"] = dict(compilation) | {CAPTURE_SIZES: chosen}
    return arguments


def overridden(modes: Mapping[str, DecodeMode], texts: Sequence[str]) -> dict[str, DecodeMode]:
    """Modes changed by `MODE:ARGUMENT=JSON` or `MODE:env:NAME=VALUE`; ValueError if unknown."""
    changed = dict(modes)
    for text in texts:
        name, _, rest = text.partition(":")
        key, _, value = rest.partition("=")
        if name not in changed or not key:
            raise ValueError(f"{text!r} is not MODE:ARGUMENT=JSON of a known mode")
        mode = changed[name]
        if key.startswith("env:"):
            env = dict(mode.env) | {key.removeprefix("env:"): value}
            changed[name] = dataclasses.replace(mode, env=env)
        else:
            arguments = dict(mode.arguments) | {key: json.loads(value)}
            changed[name] = dataclasses.replace(mode, arguments=arguments)
    return changed
