"""What may not go together: named rules that a group's arguments must keep in its mode.

Asked twice with the same rules: of the settings, before anything starts, and of what vLLM made of
them, since platforms, models and variables change arguments as well.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from splitwave.core.mode import Mode, StepKind

UBATCHED = frozenset({StepKind.EAGER_UBATCHED, StepKind.UBATCHED_FULL})
NO_GRAPHS = "NONE"

FEATURES: Mapping[str, tuple[str, str]] = {
    "prefix_caching": (
        "a step would skip rows that the certificate saw computed",
        "switch prefix_caching off",
    ),
    "breakable_graphs": (
        "a graph that breaks runs parts eagerly, and worst-token dispatch cannot leave one",
        "unset VLLM_USE_BREAKABLE_CUDAGRAPH, or set it to 0",
    ),
    "speculative_decoding": (
        "a step would compute several tokens a request",
        "take the speculative configuration out",
    ),
    "eplb": ("experts would move between ranks while graphs hold their places", "switch eplb off"),
    "lora": ("adapters change what a step runs", "switch lora off"),
    "pipeline_parallel": (
        "a step would be spread over engines that do not step together",
        "set pipeline parallelism to 1",
    ),
}
"""What a mode can exclude: why, and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """A group's arguments as far as rules speak of them. Sizes are of one rank."""

    role: str
    ranks: int
    expert_parallel: bool
    seats_max: int
    step_max_tokens: int
    """Tokens of one step."""
    capture_grid: tuple[int, ...] = ()
    """Batch sizes that are captured or warmed up, ascending."""
    cudagraph_mode: str = NO_GRAPHS
    microbatches: bool = False
    """True if steps may be split into two that overlap (vLLM: DBO)."""
    features: frozenset[str] = frozenset()
    """Names of FEATURES that are on."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """vLLM's arguments by name, those of the mode's table among them."""


@dataclass(frozen=True, slots=True)
class Breach:
    """A rule that a combination breaks."""

    rule: str
    setting: str
    """The setting to look at."""
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem} (rule {self.rule}); {self.fix}"


def breaches(mode: Mode, combination: Combination) -> list[Breach]:
    """Every rule that `combination` breaks in `mode`, in the order of RULES; empty if none."""
    found: list[Breach] = []
    for name, rule in RULES.items():
        found += [
            Breach(f"no_{setting}" if rule is _features else name, setting, problem, fix)
            for setting, problem, fix in rule(mode, combination)
        ]
    return found


Says = Iterator[tuple[str, str, str]]
"""(setting, problem, fix)"""


def _role(mode: Mode, asked: Combination) -> Says:
    """The group has the role of its mode."""
    if asked.role != mode.role:
        fix = f"choose a mode that begins with {asked.role}_"
        yield "mode", f"{mode.name} is a {mode.role} mode; this group's role is {asked.role}", fix


def _features(mode: Mode, asked: Combination) -> Says:
    """Nothing is on that the mode excludes."""
    assert asked.features <= FEATURES.keys()
    for name in mode.excludes:
        if name in asked.features:
            why, fix = FEATURES[name]
            yield name, f"must be off in mode {mode.name}: {why}", fix


def _expert_parallel(mode: Mode, asked: Combination) -> Says:
    """Expert parallelism is on in a mode that exists only with it."""
    if mode.expert_parallel and not asked.expert_parallel:
        yield "expert_parallel", f"must be on in mode {mode.name}", "switch expert_parallel on"


def _ranks(_: Mode, asked: Combination) -> Says:
    """Experts are spread over two ranks or more."""
    if asked.expert_parallel and asked.ranks < 2:
        fix = "expert parallelism needs at least 2 ranks; or switch it off"
        yield "ranks", f"is {asked.ranks}", fix


def _eager_has_no_graphs(mode: Mode, asked: Combination) -> Says:
    """A mode that captures nothing has no cudagraph mode and no capture sizes."""
    if mode.captures_graphs:
        return
    if asked.cudagraph_mode != NO_GRAPHS:
        yield (
            "cudagraph_mode",
            f"is {asked.cudagraph_mode}; mode {mode.name} replays no graph",
            f"leave it {NO_GRAPHS}, or choose a decode_graph mode for a decode group",
        )
    if asked.capture_grid and not mode.has_grid:
        yield (
            "capture_sizes",
            f"are {_words(asked.capture_grid)}; mode {mode.name} captures nothing",
            "leave them out",
        )


def _graphs_hold_whole_steps(mode: Mode, asked: Combination) -> Says:
    """Every decode step of a graph mode is one graph."""
    wanted = "FULL_DECODE_ONLY"
    if mode.captures_graphs and asked.cudagraph_mode != wanted:
        yield (
            "cudagraph_mode",
            f"is {asked.cudagraph_mode}; every step of mode {mode.name} is one graph",
            f"it must be {wanted}: look for what in the configuration or the platform changed it",
        )


def _microbatches_are_named(mode: Mode, asked: Combination) -> Says:
    """Steps are split into two microbatches where the mode names them, and only there."""
    if asked.microbatches and not mode.step_kinds & UBATCHED:
        fix = "switch enable_dbo off, or choose a mode with microbatches"
        yield "enable_dbo", f"is on; mode {mode.name} names no step of two microbatches", fix
    if not asked.microbatches and mode.step_kinds & UBATCHED:
        yield "enable_dbo", f"is off; mode {mode.name} runs two microbatches", "switch it on"


def _grid_is_there(mode: Mode, asked: Combination) -> Says:
    """A mode that runs sizes of a grid has one."""
    if mode.has_grid and not asked.capture_grid:
        yield "capture_sizes", f"are none; mode {mode.name} runs captured sizes only", "name some"


def _grid_ascends(_: Mode, asked: Combination) -> Says:
    """Each size of the grid stands there once, in order."""
    grid = asked.capture_grid
    if list(grid) != sorted(set(grid)) or min(grid, default=1) < 1:
        yield "capture_sizes", f"are {_words(grid)}", "write each once, ascending, from 1"


def _grid_is_aligned(mode: Mode, asked: Combination) -> Says:
    """Sizes are multiples of the mode's alignment."""
    step = mode.capture_alignment_tokens
    strays = [size for size in asked.capture_grid if size % step]
    if strays:
        below = strays[0] // step * step
        yield (
            "capture_sizes",
            f"hold {strays[0]}, no multiple of mode {mode.name}'s alignment, {step} tokens",
            f"use {below} or {below + step}" if below else f"use {step}",
        )


def _grid_is_dense(mode: Mode, asked: Combination) -> Says:
    """Padding leaves rows for each second microbatch; a compiled grid has every size."""
    if StepKind.COMPILED in mode.step_kinds:
        missing = sorted(set(range(1, asked.seats_max + 1)) - set(asked.capture_grid))
        if missing and asked.capture_grid:
            problem = (
                f"lack {missing[0]}; a compiled step is not padded, so each size must be there"
            )
            yield "capture_sizes", problem, "leave them empty: every size is warmed up"
        return
    step = mode.capture_step_tokens
    if step is None or StepKind.UBATCHED_FULL not in mode.step_kinds:
        return
    before = 0
    for size in sorted(asked.capture_grid):
        if size - before > step:
            yield (
                "capture_sizes",
                f"leap from {before} to {size}; padding over more than {step} tokens could leave "
                "the second microbatch empty",
                f"add {before + step}",
            )
            return
        before = size


def _seats_fit_the_grid(mode: Mode, asked: Combination) -> Says:
    """A batch of every seat fits the largest size: a larger one cannot come up."""
    if mode.has_grid and asked.capture_grid and asked.seats_max > max(asked.capture_grid):
        largest = max(asked.capture_grid)
        yield (
            "seats_max",
            f"is {asked.seats_max}; a batch of more than {largest} rows fits no size of the grid",
            f"set seats_max to {largest} or less, or add sizes up to {asked.seats_max}",
        )


def _seats_are_captured(mode: Mode, asked: Combination) -> Says:
    """The number of seats is a captured size: vLLM captures none that is larger."""
    above = [size for size in asked.capture_grid if size > asked.seats_max]
    if mode.captures_graphs and above and asked.seats_max not in asked.capture_grid:
        below = max((size for size in asked.capture_grid if size < asked.seats_max), default=0)
        yield (
            "seats_max",
            f"is {asked.seats_max}; vLLM captures no size above that, so a batch of more than "
            f"{below} rows would have no graph",
            f"set seats_max to {min(above)}" + (f" or {below}" if below else ""),
        )


def _compiled_steps_fit_the_grid(mode: Mode, asked: Combination) -> Says:
    """A compiled step has no more rows than were warmed up."""
    if StepKind.COMPILED not in mode.step_kinds or not asked.capture_grid:
        return
    largest = max(asked.capture_grid)
    if asked.step_max_tokens > largest:
        yield (
            "batch_max_tokens",
            f"is {asked.step_max_tokens}; a step of more than {largest} rows was not warmed up",
            f"set it to {largest}",
        )


def _arguments_are_the_modes(mode: Mode, asked: Combination) -> Says:
    """vLLM's arguments that the mode sets are as it sets them."""
    for name, wanted in mode.vllm_args.items():
        for what, found, kept in _leaves(name, asked.arguments.get(name, wanted), wanted):
            if found != kept:
                fix = "nothing but the mode sets it: look for what changed it"
                yield what, f"is {found!r}; mode {mode.name} has {kept!r}", fix


def _leaves(name: str, found: object, wanted: object) -> Iterator[tuple[str, object, object]]:
    """(name, found, wanted) of an argument, or of each part of one that has parts."""
    if not isinstance(wanted, Mapping):
        yield name, found, wanted
        return
    assert isinstance(found, Mapping)
    for part, value in wanted.items():
        yield from _leaves(f"{name}.{part}", found.get(part, value), value)


RULES: Mapping[str, Callable[[Mode, Combination], Says]] = {
    "role_matches": _role,
    "no_excluded_feature": _features,
    "experts_are_parallel": _expert_parallel,
    "experts_need_ranks": _ranks,
    "eager_has_no_graphs": _eager_has_no_graphs,
    "graphs_hold_whole_steps": _graphs_hold_whole_steps,
    "microbatches_are_named": _microbatches_are_named,
    "grid_is_there": _grid_is_there,
    "grid_ascends": _grid_ascends,
    "grid_is_aligned": _grid_is_aligned,
    "grid_is_dense": _grid_is_dense,
    "seats_fit_the_grid": _seats_fit_the_grid,
    "seats_are_captured": _seats_are_captured,
    "compiled_steps_fit_the_grid": _compiled_steps_fit_the_grid,
    "arguments_are_the_modes": _arguments_are_the_modes,
}
"""By name. A breach of `no_excluded_feature` is named for its feature: `no_breakable_graphs`."""


def _words(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes)) or "none"
