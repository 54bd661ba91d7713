"""Microbatches hand over within a bound: vLLM's own contexts and threads, without a GPU."""

import threading
import time
from types import SimpleNamespace
from typing import Any  # vLLM's contexts and descriptors are untyped here

import pytest
import torch
import torch.distributed
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker import ubatching
from vllm.v1.worker.gpu import dp_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from splitwave.engine.vllm.worst_token import handover
from splitwave.engine.vllm.worst_token.handover import HandoverTimeout, MicrobatchFailed

ENDS_WITHIN_S = 5.0


class Event:
    """A device's event: nothing is on a device here."""

    def record(self, stream: object) -> None:
        """Record nothing."""


class Stream:
    """A stream that waits for nothing."""

    def wait_event(self, event: Event) -> None:
        """Wait for nothing."""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run vLLM's contexts with streams a thread, and wrapped as they are in a worker."""
    current = threading.local()
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(current, "it", stream))
    monkeypatch.setattr(ubatching, "current_stream", lambda: getattr(current, "it", None))
    monkeypatch.setattr(ubatching, "_THREAD_ID_TO_CONTEXT", {})
    monkeypatch.setattr(ubatching, "_CURRENT_CONTEXTS", [])
    context = ubatching.UBatchContext
    monkeypatch.setattr(context, "__exit__", handover.told(context.__exit__))


class Step:
    """One step in two microbatches, each in a thread as vLLM's runner starts it."""

    def __init__(self, *forwards: Any, timeout_s: float = 60.0) -> None:
        self.errors: dict[int, BaseException] = {}
        self.barrier = threading.Barrier(len(forwards) + 1)
        self.contexts = handover.bounded(ubatching.make_ubatch_contexts, timeout_s)(
            num_micro_batches=len(forwards),
            compute_stream=Stream(),
            comm_stream=Stream(),
            forward_contexts=[object() for _ in forwards],
            ready_barrier=self.barrier,
        )
        self.threads = [
            threading.Thread(target=self._run, args=pair, daemon=True)
            for pair in zip(self.contexts, forwards, strict=True)
        ]

    def _run(self, context: Any, forward: Any) -> None:
        try:
            with context:
                forward()
        except BaseException as error:  # noqa: BLE001  # kept for the join, as vLLM's runner does
            self.errors[context.id] = error

    def run(self, *, begun: bool = True) -> float:
        """Run it to its end and return how long that took; fail if a thread does not end."""
        for thread in self.threads:
            thread.start()
        self.barrier.wait(ENDS_WITHIN_S)
        start_s = time.monotonic()
        if begun:
            self.contexts[0].cpu_wait_event.set()
        for thread in self.threads:
            thread.join(ENDS_WITHIN_S)
            assert not thread.is_alive(), "a microbatch hangs"
        return time.monotonic() - start_s


def swap() -> None:
    """Give the other microbatch its turn, as before a collective and after it."""
    ubatching.dbo_yield_and_switch_from_compute_to_comm()
    ubatching.dbo_switch_to_compute_sync()


def test_microbatches_take_turns_and_both_end() -> None:
    said: list[str] = []

    def forward(name: str) -> Any:
        def run() -> None:
            for turn in range(3):
                said.append(f"{name}{turn}")
                swap()

        return run

    step = Step(forward("a"), forward("b"))
    step.run()

    assert step.errors == {}
    assert said == ["a0", "b0", "a1", "b1", "a2", "b2"]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_an_error_in_one_microbatch_ends_both_with_its_cause(failing: int, turns: int) -> None:
    cause = ValueError("no such expert")

    def fails() -> None:
        for _ in range(turns):
            swap()
        raise cause

    def goes_on() -> None:
        for _ in range(10):
            swap()

    forwards = [goes_on, goes_on]
    forwards[failing] = fails
    step = Step(*forwards)
    assert step.run() < ENDS_WITHIN_S

    assert step.errors[failing] is cause
    other = step.errors[1 - failing]
    assert isinstance(other, MicrobatchFailed)
    assert other.__cause__ is cause


def test_an_error_while_leaving_ends_both_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = RuntimeError("a hook failed")
    hooked = ubatching.UBatchContext.maybe_run_recv_hook

    def hook(self: Any) -> None:
        if self.id == 0:
            raise cause
        hooked(self)

    monkeypatch.setattr(ubatching.UBatchContext, "maybe_run_recv_hook", hook)
    step = Step(lambda: None, swap)
    step.run()

    assert step.errors[0] is cause
    assert step.errors[1].__cause__ is cause


def test_a_microbatch_that_never_hands_over_ends_the_other_after_the_bound() -> None:
    over = threading.Event()

    def waits() -> None:
        over.wait(ENDS_WITHIN_S)

    def watches() -> None:
        raise AssertionError("it is never this one's turn")

    step = Step(waits, watches, timeout_s=0.2)
    for thread in step.threads:
        thread.start()
    step.barrier.wait(ENDS_WITHIN_S)
    step.contexts[0].cpu_wait_event.set()
    step.threads[1].join(ENDS_WITHIN_S)
    assert not step.threads[1].is_alive(), "the parked microbatch hangs"
    assert step.threads[0].is_alive()

    over.set()
    step.threads[0].join(ENDS_WITHIN_S)
    assert isinstance(step.errors[1], HandoverTimeout)
    assert "within 0.2 s" in str(step.errors[1])


def test_a_step_that_is_never_begun_ends_both() -> None:
    step = Step(swap, swap, timeout_s=0.2)
    step.run(begun=False)

    assert {type(error) for error in step.errors.values()} == {HandoverTimeout}


def test_a_failure_belongs_to_its_own_step_alone() -> None:
    def fails() -> None:
        raise ValueError

    Step(fails, swap).run()
    after = Step(swap, swap)
    after.run()

    assert after.errors == {}


def test_a_microbatch_that_does_not_come_breaks_the_start_within_the_bound() -> None:
    class Runner:
        def __init__(self, parties: int) -> None:
            self.ready_barrier = threading.Barrier(parties)

    Runner.__init__ = handover.met(Runner.__init__, 0.2)  # type: ignore[method-assign]  # installed so
    runner = Runner(3)
    assert runner.ready_barrier.parties == 3

    with pytest.raises(threading.BrokenBarrierError):
        runner.ready_barrier.wait()


class Ranks:
    """Two ranks that agree on a step's shape through vLLM's own code and one faked all-reduce."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, tokens: tuple[int, int]) -> None:
        self.tokens = tokens
        self.sent: list[torch.Tensor | None] = [None, None]
        self.rank = threading.local()
        self.meet = threading.Barrier(2, timeout=ENDS_WITHIN_S)
        self.reduced = [0, 0]
        monkeypatch.setattr(torch.distributed, "all_reduce", self._all_reduce)
        monkeypatch.setattr(dp_utils, "get_dp_group", lambda: SimpleNamespace(cpu_group=None))
        monkeypatch.setattr(dp_utils, "should_skip_dp_coordination", lambda: False)
        monkeypatch.setattr(dp_utils, "check_ubatch_thresholds", lambda *_, **__: True)
        monkeypatch.setattr(dp_utils, "get_num_ubatches", lambda _config: 2)
        agree = dp_utils.sync_cudagraph_and_dp_padding
        agree = handover.plain_when_one_is_empty(agree)
        monkeypatch.setattr(dp_utils, "sync_cudagraph_and_dp_padding", agree)

    def _all_reduce(self, tensor: torch.Tensor, group: object) -> None:
        rank = self.rank.it
        self.reduced[rank] += 1
        self.sent[rank] = tensor.clone()
        self.meet.wait()
        found = [one for one in self.sent if one is not None]
        tensor.copy_(torch.stack(found).sum(0))
        self.meet.wait()

    def agreed(self) -> list[Any]:
        """Return what each rank is told to run."""
        found: list[Any] = [None, None]

        def run(rank: int) -> None:
            self.rank.it = rank
            found[rank] = dp_utils.dispatch_cg_and_sync_dp(
                Manager(), self.tokens[rank], self.tokens[rank], 1, 2, rank,
                parallel_config=object(), allow_ubatching=True, uniform_decode=True,
            )  # fmt: skip

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * ENDS_WITHIN_S)
        assert all(found), "ranks do not agree: one asks again and the other does not"
        return found


class Manager:
    """vLLM's graphs of sizes 32, 64, 96 and 128, whole and in two microbatches."""

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_ubatches: int = 1,
        **_more: Any,
    ) -> BatchExecutionDescriptor:
        size = -(-num_tokens // 32) * 32
        if size > 128 or uniform_token_count != 1:
            return BatchExecutionDescriptor(
                CUDAGraphMode.NONE, num_tokens, num_reqs, num_ubatches=num_ubatches
            )
        return BatchExecutionDescriptor(
            CUDAGraphMode.FULL, size, size, uniform_token_count, num_ubatches=num_ubatches
        )


@pytest.mark.parametrize(
    ("tokens", "size", "microbatches", "asked"),
    [((96, 90), 96, 2, 1), ((96, 20), 96, 1, 2), ((1, 128), 128, 1, 2), ((20, 20), 32, 2, 1)],
)
def test_both_ranks_replay_the_same_graph_and_a_step_that_cannot_be_split_a_plain_one(
    monkeypatch: pytest.MonkeyPatch,
    tokens: tuple[int, int],
    size: int,
    microbatches: int,
    asked: int,
) -> None:
    ranks = Ranks(monkeypatch, tokens=tokens)

    (first, sync), (second, other) = ranks.agreed()

    assert first == second
    assert (first.cg_mode, first.num_tokens) == (CUDAGraphMode.FULL, size)
    assert first.num_ubatches == microbatches
    assert ranks.reduced == [asked, asked]
    for one in (sync, other):
        assert one.num_tokens_across_dp.tolist() == [size, size]
        assert not one.eager


def test_without_the_wrapper_such_a_step_would_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "plain_when_one_is_empty", lambda agree: agree)

    found = Ranks(monkeypatch, tokens=(96, 20)).agreed()

    assert [(desc.cg_mode, desc.num_ubatches) for desc, _ in found] == [(CUDAGraphMode.NONE, 2)] * 2


def test_a_step_that_no_graph_holds_is_the_same_eager_one_on_both_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Ranks(monkeypatch, tokens=(200, 190)).agreed()

    assert [(desc.cg_mode, desc.num_ubatches) for desc, _ in found] == [(CUDAGraphMode.NONE, 1)] * 2
