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


def _served(name: str, served: str, words: str) -> DecodeMode:
    """A mode that pools run, as the table of modes has it."""
    mode = SERVED[served]
    return DecodeMode(
        name=name, words=words, kinds=frozenset(kind.value for kind in mode.step_kinds),
        arguments=dict(mode.vllm_args), env=dict(mode.env), device=mode.device.value,
        alignment=mode.capture_alignment_tokens,
    )  # fmt: skip


def _compiled(name: str, graph: DecodeMode, words: str) -> DecodeMode:
    """A graph mode with the model through torch.compile."""
    compilation = graph.arguments["compilation_config"]
    assert isinstance(compilation, Mapping)
    arguments = dict(graph.arguments) | {"compilation_config": dict(compilation) | {"mode": 3}}
    return dataclasses.replace(graph, name=name, words=words, arguments=arguments)


_V2 = _served(
    "graph_v2", "decode_graph_ht", "one graph a step, worst-token dispatch over DeepEP V2"
)
_TABLE = (
    _eager("eager_ht", "deepep_high_throughput", "eager, DeepEP high-throughput"),
    _eager("eager_ag", "allgather_reducescatter", "eager, all-gather and reduce-scatter"),
    _V2,
    _served(
        "graph_legacy", "decode_graph_ht_legacy",
        "one graph a step, worst-token dispatch over DeepEP's legacy kernels",
    ),
    _compiled("graph_v2_compiled", _V2, "graph_v2 with the model through torch.compile"),
    dataclasses.replace(
        _V2, name="stock_v2", words="vLLM's own deepep_v2, without Splitwave's plugin",
        env={"VLLM_PLUGINS": ""},
    ),
    _served("graph_ag", "decode_graph_ag", "one graph a step, all-gather"),
    _served("graph_ll", "decode_graph_ll", "one graph a step, DeepEP low-latency"),
    _served(
        "graph_tbo_v2", "decode_graph_ht_tbo",
        "graph_v2 with two microbatches interleaved in the graph",
    ),
    _served("cpu_eager", "decode_cpu_eager", "eager on the CPU"),
    _served("cpu_compiled", "decode_cpu_compiled", "compiled on the CPU"),
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
