"""Executed steps by kind, and tokens that were computed as prefill, counted where they run.

The counter lives in each worker process. vLLM's worker brackets a step; the forward context
that is opened inside it says how the model runs.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any  # vLLM's objects are untyped here

from splitwave.core.mode import StepKind
from splitwave.engine.vllm import violations
from splitwave.engine.vllm.planted import planted

_MARK = "splitwave_installed"
OF_A_GRID = frozenset({StepKind.FULL, StepKind.UBATCHED_FULL, StepKind.COMPILED})
"""Kinds of step that have the size of a grid."""


class StepCounter:
    """What one worker has executed since it started serving; warm-up and capture do not count."""

    def __init__(self) -> None:
        self.steps_by_kind: dict[str, int] = {}
        self.steps_by_size: dict[int, int] = {}
        """Steps of a grid's sizes, captured or warmed up, by their rows."""
        self.dummy_steps = 0
        self.prefill_tokens_computed = 0
        self.tokens = 0
        """Tokens computed for requests."""
        self.padded_tokens = 0
        """The same with each step as wide as the widest rank's, dummy steps included."""
        self.sizes: Collection[int] | None = None
        """Compiled decode: tokens of a step that were warmed up; None: any."""
        self.warming = False
        """The worker warms up: vLLM runs prompts of its own through the worker then, on GPUs."""
        self._kind: str | None = None
        self._width_tokens = 0
        self._prompt_left: dict[str, int] = {}

    def begin(self) -> None:
        """A step begins: the next forward context is its own."""
        self._kind = None
        self._width_tokens = 0

    def saw_forward(self, kind: str, width_tokens: int = 0) -> None:
        """The model runs as `kind`, over so many rows on the widest rank.

        The first of a step counts: a drafter's follows the model's. Microbatches open contexts of
        their own before the one that says that there are several.
        """
        if self._kind is None or kind == f"{self._kind}_ubatched":
            self._kind = kind
            self._width_tokens = width_tokens

    def saw_replay(self, kind: str, width_tokens: int) -> None:
        """The step is a captured graph, whatever contexts were opened to prepare it."""
        self._kind = kind
        self._width_tokens = width_tokens

    @property
    def steps(self) -> int:
        """All of them."""
        return sum(self.steps_by_kind.values())

    def end(self, *, tokens: int) -> str:
        """The step has run; returns its kind. `unseen` is a forward that opened no context.

        `tokens`: those computed for requests; 0 in a dummy step.
        """
        kind = self._kind or "unseen"
        self.steps_by_kind[kind] = self.steps_by_kind.get(kind, 0) + 1
        if kind in OF_A_GRID:
            size = self._width_tokens
            self.steps_by_size[size] = self.steps_by_size.get(size, 0) + 1
        self.dummy_steps += tokens == 0
        self.tokens += tokens
        self.padded_tokens += max(tokens, self._width_tokens)
        return kind

    def count_decode(self, scheduler_output: Any) -> None:  # vLLM's SchedulerOutput
        """Add tokens beyond one a request, speculated ones not counted."""
        speculated = scheduler_output.scheduled_spec_decode_tokens
        self.prefill_tokens_computed += sum(
            count - 1 - len(speculated.get(request_id, ()))
            for request_id, count in scheduler_output.num_scheduled_tokens.items()
            if count > 1
        )

    def count_prompt(self, scheduler_output: Any) -> None:  # vLLM's SchedulerOutput
        """Add prompt tokens; those that a prefix cache or a pull brought are not computed."""
        for new in scheduler_output.scheduled_new_reqs:
            self._prompt_left[new.req_id] = len(new.prompt_token_ids) - new.num_computed_tokens
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            left = self._prompt_left.pop(request_id, 0)
            self.prefill_tokens_computed += min(left, count)
            if left > count:
                self._prompt_left[request_id] = left - count
        for request_id in scheduler_output.finished_req_ids:
            self._prompt_left.pop(request_id, None)

    def report(self) -> dict[str, Any]:  # a message of plain values
        """The counts, as EngineCore's utility answers them."""
        return {
            "steps_by_kind": dict(self.steps_by_kind),
            "steps_by_size": dict(self.steps_by_size),
            "dummy_steps": self.dummy_steps,
            "prefill_tokens_computed": self.prefill_tokens_computed,
            "tokens": self.tokens,
            "padded_tokens": self.padded_tokens,
        }


def step_kind(context: Any, *, is_compiled: bool) -> str:
    """Step kind (`splitwave.core.mode.StepKind`) of a forward context of vLLM.

    `is_compiled`: the model was built by torch.compile, graphs or not.
    """
    graph = context.cudagraph_runtime_mode.name
    if graph == "FULL":
        return "full" if context.ubatch_slices is None else "ubatched_full"
    if graph == "PIECEWISE":
        kind = "piecewise"
    else:
        kind = "compiled" if is_compiled and not context.skip_compiled else "eager"
    return kind if context.ubatch_slices is None else f"{kind}_ubatched"


def sized_kind(kind: str, context: Any, sizes: Collection[int] | None) -> str:
    """The kind of a step by its own size too: compiled code that was not warmed up is no mode's."""
    if kind != "compiled" or sizes is None:
        return kind
    batch = context.batch_descriptor
    return kind if batch is not None and batch.num_tokens in sizes else "compiled_unwarmed"


def is_without_batch(context: Any) -> bool:  # vLLM's ForwardContext
    """True if no model runs in this context: a connector opens one to load KV before a replay."""
    return (
        context.attn_metadata is None
        and context.dp_metadata is None
        and context.batch_descriptor is None
    )


def step_width_tokens(context: Any) -> int:  # vLLM's ForwardContext
    """Rows that the widest rank computes in this forward; 0 if only this rank's are known."""
    if context.dp_metadata is not None:
        return int(context.dp_metadata.num_tokens_across_dp_cpu.max())
    return 0 if context.batch_descriptor is None else int(context.batch_descriptor.num_tokens)


_counter = StepCounter()


def counter() -> StepCounter:
    """This process's worker's."""
    return _counter


def counted() -> dict[str, Any]:  # a message of plain values
    """What this process's worker has counted."""
    return _counter.report()


def allow_sizes(sizes: Collection[int]) -> None:
    """From now on a compiled step of this process has one of these numbers of tokens."""
    _counter.sizes = sizes


def install() -> None:
    """Count the steps of this process's worker. Idempotent."""
    from vllm import forward_context
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker

    if getattr(Worker, _MARK, False):
        return
    setattr(Worker, _MARK, True)
    forward_context.create_forward_context = _observed(forward_context.create_forward_context)
    Worker.execute_model = _counted(Worker.execute_model)
    Worker.execute_dummy_batch = _counted_dummy(Worker.execute_dummy_batch)
    Worker.compile_or_warm_up_model = _uncounted(Worker.compile_or_warm_up_model)
    Worker.splitwave_steps = lambda _worker: _counter.report()
    if not current_platform.is_cpu():
        from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

        # vLLM's second model runner replays whole-step graphs without a forward context.
        ModelCudaGraphManager.run_fullgraph = _replayed(ModelCudaGraphManager.run_fullgraph)


def _observed(create: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.config import CompilationMode

    @functools.wraps(create)
    def created(attn_metadata: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:  # vLLM's
        context = create(attn_metadata, vllm_config, *args, **kwargs)
        if is_without_batch(context):
            return context
        is_compiled = vllm_config.compilation_config.mode != CompilationMode.NONE
        odd = planted().act(context, is_compiled=is_compiled)
        kind = odd or sized_kind(
            step_kind(context, is_compiled=is_compiled), context, _counter.sizes
        )
        _counter.saw_forward(kind, step_width_tokens(context))
        return context

    return created


def _replayed(replay: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(replay)
    def replayed(self: Any, desc: Any) -> Any:  # vLLM's graph manager and batch
        kind = "ubatched_full" if desc.num_ubatches > 1 else "full"
        _counter.saw_replay(kind, int(desc.num_tokens))
        return replay(self, desc)

    return replayed


def _counted(execute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(execute)
    def executed(self: Any, scheduler_output: Any) -> Any:  # vLLM's Worker and what it returns
        if _counter.warming:
            return execute(self, scheduler_output)
        _counter.begin()
        tokens = scheduler_output.total_num_scheduled_tokens
        planted().begin(tokens)
        result = execute(self, scheduler_output)
        if tokens > 0:
            kind = _counter.end(tokens=tokens)
            violations.record().look(kind, _counter.steps, scheduler_output, self)
            transfer = self.vllm_config.kv_transfer_config
            if transfer is not None and transfer.kv_role == "kv_consumer":
                _counter.count_decode(scheduler_output)
            else:
                _counter.count_prompt(scheduler_output)
        return result

    return executed


def _uncounted(warm_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Before graphs are captured, prompts and decode steps of the warm-up run eagerly: no pool's
    work, so no violation of its mode either."""

    @functools.wraps(warm_up)
    def warmed(self: Any) -> Any:  # vLLM's Worker and what it returns
        _counter.warming = True
        try:
            return warm_up(self)
        finally:
            _counter.warming = False

    return warmed


def _counted_dummy(execute: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(execute)
    def executed(self: Any) -> None:  # vLLM's Worker
        _counter.begin()
        execute(self)
        violations.record().look(_counter.end(tokens=0), _counter.steps, None, self)

    return executed
