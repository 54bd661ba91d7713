"""The scheduler's side: steps of a chosen size, and what can be broken between steps."""

import time
from collections.abc import Callable, Sequence
from typing import Any  # vLLM's core and scheduler are untyped here

from vllm.v1.engine import EngineCoreRequestType

from splitwave.engine.vllm.probe.breaks import Break

LIMITS = ("max_num_active_reqs", "max_num_scheduled_tokens")
"""What keeps vLLM's scheduler from steps that are wider than the group was started for."""


class Walk:
    """Limits the tokens of each of the next steps, by a plan, once enough requests run.

    A decode step has one token a request, so the token budget is the batch size. Requests take
    turns: the running list is rotated, so that small steps are not always the same requests'.
    """

    def __init__(self, scheduler: Any, plan: Sequence[int], needed: int) -> None:
        self.done: list[int] = []
        """Sizes that were scheduled."""
        self._plan = list(plan)
        self._needed = needed
        self._scheduler = scheduler
        self._schedule = scheduler.schedule
        scheduler.schedule = self._limited

    @property
    def left(self) -> int:
        """Steps that are still to come."""
        return len(self._plan) - len(self.done)

    def stop(self) -> None:
        """Let the scheduler be."""
        self._scheduler.__dict__.pop("schedule", None)

    def _limited(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = self._scheduler
        if not self.left or not self._may_walk():
            return self._schedule(*args, **kwargs)
        usual = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = self._plan[len(self.done)]
        scheduler.running.append(scheduler.running.pop(0))
        try:
            output = self._schedule(*args, **kwargs)
        finally:
            scheduler.max_num_scheduled_tokens = usual
        self.done.append(output.total_num_scheduled_tokens)
        return output

    def _may_walk(self) -> bool:
        """True once as many requests run as the widest step needs; then until they are fewer."""
        return len(self._scheduler.running) >= self._needed


class CoreProbe:
    """What is on one engine core."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._walk: Walk | None = None
        self._undo: dict[Break, Callable[[], None]] = {}

    def start_walk(self, plan: Sequence[int], needed: int) -> None:
        """Begin a walk; an older one ends."""
        self.stop_walk()
        self._walk = Walk(self._core.scheduler, plan, needed)

    def walked(self) -> tuple[list[int], int]:
        """Sizes that were scheduled, and how many steps are left."""
        return (self._walk.done, self._walk.left) if self._walk else ([], 0)

    def stop_walk(self) -> None:
        """Let steps be as wide as they are."""
        if self._walk is not None:
            self._walk.stop()
            self._walk = None

    def start_break(self, what: Break, argument: float) -> None:
        """Break something from now on."""
        self.end_break(what)
        if what is Break.LEAK_BLOCKS:
            self._leak_blocks()
        elif what is Break.LATE_WAKE:
            self._late_wake(argument)
        elif what is Break.LOSE_REQUEST:
            self._lose_request()
        elif what is Break.NARROW:
            self._narrow(int(argument))

    def end_break(self, what: Break) -> None:
        """Take a break back; no effect if there is none."""
        if undo := self._undo.pop(what, None):
            undo()

    def _leak_blocks(self) -> None:
        scheduler = self._core.scheduler
        free = scheduler._free_blocks  # noqa: SLF001  # all frees of a request pass it
        kept: list[Any] = []

        blocks_of = scheduler.kv_cache_manager.get_block_ids

        def leaking(request: Any) -> None:
            # One that was given up before its first step has none, and would show nothing.
            if kept or not any(blocks_of(request.request_id)):
                free(request)
            else:
                kept.append(request)

        def undo() -> None:
            scheduler.__dict__.pop("_free_blocks", None)
            for request in kept:
                free(request)

        scheduler._free_blocks = leaking  # noqa: SLF001  # likewise
        self._undo[Break.LEAK_BLOCKS] = undo

    def _late_wake(self, seconds: float) -> None:
        core, until_s = self._core, time.monotonic() + seconds
        handle = core._handle_client_request  # noqa: SLF001  # each message to this rank passes it

        def late(request_type: Any, request: Any) -> None:
            is_start = request_type == EngineCoreRequestType.START_DP_WAVE
            if not (is_start and time.monotonic() < until_s):
                handle(request_type, request)

        core._handle_client_request = late  # noqa: SLF001  # likewise
        self._undo[Break.LATE_WAKE] = lambda: core.__dict__.pop("_handle_client_request", None)

    def _lose_request(self) -> None:
        scheduler = self._core.scheduler
        add = scheduler.add_request

        def losing(_: Any) -> None:
            scheduler.add_request = add  # One is enough.

        scheduler.add_request = losing
        self._undo[Break.LOSE_REQUEST] = lambda: scheduler.__dict__.pop("add_request", None)

    def _narrow(self, tokens: int) -> None:
        scheduler = self._core.scheduler
        usual = {name: getattr(scheduler, name) for name in LIMITS}
        vars(scheduler).update({name: min(limit, tokens) for name, limit in usual.items()})
        self._undo[Break.NARROW] = lambda: vars(scheduler).update(usual)
