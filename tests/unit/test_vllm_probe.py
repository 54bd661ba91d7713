"""What the battery does inside an engine: walks, breaks, and that each is taken back whole."""

import time
from types import SimpleNamespace
from typing import Any  # stand-ins for vLLM's objects

import pytest
import torch
from vllm.v1.engine import EngineCoreRequestType

from splitwave.engine.vllm import misrouting, steps
from splitwave.engine.vllm.probe import calls
from splitwave.engine.vllm.probe.breaks import OF_THE_SCHEDULER, Break
from splitwave.engine.vllm.probe.scheduling import CoreProbe, Walk
from splitwave.engine.vllm.probe.working import ODD_KIND, StepLog, WorkerProbe


class Scheduler:
    """Schedules one token for as many running requests as its budget allows."""

    def __init__(self, running: int) -> None:
        self.running = list(range(running))
        self.max_num_scheduled_tokens = 100
        self.freed: list[str] = []
        self.kv_cache_manager = SimpleNamespace(
            get_block_ids=lambda name: ([],) if name == "empty" else ([1],)
        )

    def schedule(self, throttle_prefills: bool = False) -> Any:
        chosen = self.running[: self.max_num_scheduled_tokens]
        return SimpleNamespace(total_num_scheduled_tokens=len(chosen), chosen=chosen)

    def add_request(self, request: Any) -> None:
        self.running.append(request)

    def _free_blocks(self, request: Any) -> None:
        self.freed.append(request.request_id)


def test_a_walk_runs_its_sizes_once_enough_requests_run_and_takes_turns() -> None:
    scheduler = Scheduler(3)
    walk = Walk(scheduler, [1, 4, 2], needed=4)

    early = scheduler.schedule()
    scheduler.running.append(3)
    outputs = [scheduler.schedule() for _ in range(3)]

    assert early.total_num_scheduled_tokens == 3
    assert walk.done == [1, 4, 2]
    assert walk.left == 0
    assert [output.chosen for output in outputs] == [[1], [2, 3, 0, 1], [3, 0]]
    assert scheduler.schedule().total_num_scheduled_tokens == 4
    assert scheduler.max_num_scheduled_tokens == 100


def test_a_stopped_walk_leaves_the_scheduler_as_it_was() -> None:
    scheduler = Scheduler(4)
    Walk(scheduler, [1], needed=1).stop()

    assert "schedule" not in vars(scheduler)
    assert scheduler.schedule().total_num_scheduled_tokens == 4


def request(name: str) -> Any:
    return SimpleNamespace(request_id=name)


def test_one_request_with_blocks_is_kept_until_the_leak_is_mended() -> None:
    scheduler = Scheduler(0)
    probe = CoreProbe(SimpleNamespace(scheduler=scheduler))
    probe.start_break(Break.LEAK_BLOCKS, 0.0)

    for name in ("empty", "kept", "freed"):
        scheduler._free_blocks(request(name))  # noqa: SLF001  # called so by vLLM's scheduler

    assert scheduler.freed == ["empty", "freed"]
    probe.end_break(Break.LEAK_BLOCKS)
    assert scheduler.freed == ["empty", "freed", "kept"]
    assert "_free_blocks" not in vars(scheduler)


@pytest.mark.parametrize("comes", [0, 3])
def test_one_request_is_lost_and_those_behind_it_are_not(comes: int) -> None:
    scheduler = Scheduler(0)
    probe = CoreProbe(SimpleNamespace(scheduler=scheduler))
    probe.start_break(Break.LOSE_REQUEST, 0.0)

    for number in range(comes):
        scheduler.add_request(number)
    probe.end_break(Break.LOSE_REQUEST)
    scheduler.add_request("later")

    assert scheduler.running == [*range(1, comes), "later"]
    assert "add_request" not in vars(scheduler)


def test_a_narrowed_scheduler_has_lower_limits_and_gets_its_own_back() -> None:
    scheduler = SimpleNamespace(max_num_active_reqs=16, max_num_scheduled_tokens=2048)
    probe = CoreProbe(SimpleNamespace(scheduler=scheduler))

    probe.start_break(Break.NARROW, 31.0)
    assert (scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens) == (16, 31)
    probe.start_break(Break.NARROW, 7.0)
    assert (scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens) == (7, 7)

    probe.end_break(Break.NARROW)
    assert (scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens) == (16, 2048)


class Core:
    """Hears messages."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def _handle_client_request(self, request_type: Any, request: Any) -> None:
        self.heard.append(request_type)


def test_a_deaf_rank_hears_all_but_starts_and_those_after_its_time() -> None:
    core = Core()
    probe = CoreProbe(core)
    start, abort = EngineCoreRequestType.START_DP_WAVE, EngineCoreRequestType.ABORT
    probe.start_break(Break.LATE_WAKE, 60.0)

    core._handle_client_request(start, None)  # noqa: SLF001  # called so by vLLM's loop
    core._handle_client_request(abort, None)  # noqa: SLF001  # likewise
    probe.start_break(Break.LATE_WAKE, -1.0)
    core._handle_client_request(start, None)  # noqa: SLF001  # likewise

    assert core.heard == [abort, start]
    probe.end_break(Break.LATE_WAKE)
    assert "_handle_client_request" not in vars(core)


class Runner:
    """A first model runner: its forward sees views of its buffers."""

    def __init__(self) -> None:
        self.input_ids = SimpleNamespace(gpu=torch.zeros(8, dtype=torch.int64))
        self.positions = torch.zeros(8, dtype=torch.int64)
        self.norm = torch.ones(4)
        self.seen: list[Any] = []

    def get_model(self) -> Any:
        parameter = SimpleNamespace(data=self.norm)
        return SimpleNamespace(named_parameters=lambda: [("model.norm.weight", parameter)])

    def _model_forward(self, **given: Any) -> None:
        self.seen.append((self.input_ids.gpu.clone(), self.norm.clone()))


class Worker:
    """Runs a step's forward, and samples."""

    def __init__(self) -> None:
        self.model_runner = Runner()
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 100)

    def execute_model(self, scheduler_output: Any) -> None:
        steps.counter().saw_forward("eager")
        self.model_runner._model_forward()  # noqa: SLF001  # called so by vLLM's runner

    def sample_tokens(self, grammar_output: Any) -> str:
        return "sampled"


def step(worker: Worker, tokens: int) -> Any:
    worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=tokens))
    return worker.sample_tokens(None)


def test_each_step_with_tokens_is_logged_from_the_number_that_is_asked_for() -> None:
    worker = Worker()
    probe = WorkerProbe(worker)

    assert [step(worker, tokens) for tokens in (3, 0, 5)] == ["sampled"] * 3

    assert [(number, tokens) for number, tokens, _, _ in probe.rows(0)] == [(1, 3), (2, 5)]
    assert [number for number, *_ in probe.rows(1)] == [2]


def test_a_full_log_keeps_the_latest_steps_and_grows_no_more() -> None:
    log = StepLog(rows_max=4)
    for number in range(1, 8):
        log.add(10 * number, 0.5, float(number))

    assert log.rows(0) == [(n, 10 * n, 0.5, float(n)) for n in (4, 5, 6, 7)]
    assert log.rows(6) == [(7, 70, 0.5, 7.0)]
    assert log.rows(7) == []


def test_weights_are_wrong_at_one_size_alone_and_right_afterwards() -> None:
    worker = Worker()
    probe = WorkerProbe(worker)
    probe.start_break(Break.WEIGHTS_AT_SIZE, 2.0)

    for tokens in (1, 2, 3):
        step(worker, tokens)

    wrong = [bool((norm != 1.0).any()) for _, norm in worker.model_runner.seen]
    assert wrong == [False, True, False]
    probe.end_break(Break.WEIGHTS_AT_SIZE)
    probe.start_break(Break.WEIGHTS, 0.0)
    assert bool((worker.model_runner.norm != 1.0).all())
    probe.end_break(Break.WEIGHTS)
    assert bool((worker.model_runner.norm == 1.0).all())


@pytest.mark.parametrize(("what", "first"), [(Break.POISON, 3), (Break.POISON_REACHES, 2)])
def test_poison_fills_what_does_not_count_and_the_control_one_row_more(
    what: Break, first: int
) -> None:
    worker = Worker()
    probe = WorkerProbe(worker)
    probe.start_break(what, 0.0)

    step(worker, 3)

    ids, _ = worker.model_runner.seen[0]
    assert ids.nonzero().flatten().tolist() == list(range(first, 8))
    probe.end_break(what)
    assert "_model_forward" not in vars(worker.model_runner)


def test_a_slow_step_costs_twice_and_a_leak_keeps_its_bytes() -> None:
    worker = Worker()
    probe = WorkerProbe(worker)
    inner = worker.model_runner._model_forward  # noqa: SLF001  # made slow enough to be measured

    def forward(**given: Any) -> None:
        until_s = time.process_time() + 0.02
        while time.process_time() < until_s:
            pass
        inner(**given)

    worker.model_runner._model_forward = forward  # type: ignore[method-assign]  # noqa: SLF001  # likewise
    step(worker, 1)
    probe.start_break(Break.SLOW, 0.0)
    step(worker, 1)
    probe.end_break(Break.SLOW)
    step(worker, 1)

    plain, slow, mended = (cpu_s for _, _, cpu_s, _ in probe.rows(0))
    assert slow > 1.6 * max(plain, mended)


def test_one_step_is_recorded_as_a_kind_that_no_mode_has() -> None:
    worker = Worker()
    probe = WorkerProbe(worker)
    counter = steps.counter()
    before = dict(counter.steps_by_kind)
    probe.start_break(Break.ODD_STEP, 0.0)

    for _ in range(2):
        counter.begin()
        step(worker, 1)
        counter.end(tokens=1)

    gained = {k: n - before.get(k, 0) for k, n in counter.steps_by_kind.items()}
    assert (gained[ODD_KIND], gained["eager"]) == (1, 1)
    assert "saw_forward" not in vars(counter)


def test_an_engine_that_was_not_started_for_it_cannot_be_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPLITWAVE_PROBE", raising=False)

    for call, arguments in (
        (calls.splitwave_probe_steps, (0,)),
        (calls.splitwave_probe_memory, ()),
        (calls.splitwave_probe_walk, ([1], 1)),
        (calls.splitwave_probe_walked, ()),
        (calls.splitwave_probe_break, ("slow", 0.0)),
        (calls.splitwave_probe_mend, ("slow",)),
    ):
        with pytest.raises(PermissionError, match="SPLITWAVE_PROBE"):
            call(object(), *arguments)
    assert {call.__name__ for call in calls.CALLS} == {
        name for name in dir(calls) if name.startswith("splitwave_probe_")
    }


def test_every_break_is_made_somewhere() -> None:
    worker = WorkerProbe(Worker())

    for what in set(Break) - OF_THE_SCHEDULER:
        worker.start_break(what, 1.0)
        worker.end_break(what)


def test_shifted_routing_goes_around_at_the_last_expert() -> None:
    def select(router: Any, hidden: Any, logits: Any) -> tuple[Any, Any]:
        return torch.ones(2, 2), torch.tensor([[0, 3], [2, 1]])

    shifted = misrouting._shifted(select)  # noqa: SLF001  # the wrapper alone
    _, ids = shifted(object(), None, torch.zeros(2, 4))

    assert ids.tolist() == [[1, 0], [3, 2]]
