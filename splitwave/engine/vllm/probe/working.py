"""The worker's side: a log of its steps, and what can be broken where the model runs."""

import os
import time
from collections.abc import Callable
from typing import Any  # vLLM's worker, model and outputs are untyped here

import numpy as np
import psutil
from vllm.platforms import current_platform

from splitwave.engine.vllm import steps
from splitwave.engine.vllm.probe.breaks import Break

ROWS_MAX = 2**19
"""Steps that the log keeps, the latest: an hour and a half at 100 a second."""
STEP_MAX_S = 1.0
"""A longer time since the step before was idleness."""
WRONG_BY = 1.02
ODD_KIND = "piecewise"
"""A kind that vLLM has and no mode names."""
_FINAL_NORMS = ("model.norm.weight", "norm.weight", "ln_f.weight")

_FIRST_RUNNER, _SECOND_RUNNER = "_model_forward", "prepare_inputs"

Row = tuple[int, int, float, float]
"""Number of the step, tokens computed for requests, CPU seconds, when it ended (monotonic)."""


class StepLog:
    """The latest steps of a worker.

    Its memory is taken at once: what a soak looks for in a process is growth, and must not be it.
    """

    def __init__(self, rows_max: int = ROWS_MAX) -> None:
        self.number = 0
        """Of the latest step, from 1."""
        self._rows_max = rows_max
        self._tokens = np.full(rows_max, -1, np.int32)
        self._seconds = np.full((rows_max, 2), -1.0, np.float64)

    def add(self, tokens: int, cpu_s: float, ended_at_s: float) -> None:
        """Add a step, in place of the oldest if the log is full."""
        place = self.number % self._rows_max
        self._tokens[place] = tokens
        self._seconds[place] = (cpu_s, ended_at_s)
        self.number += 1

    def rows(self, since: int) -> list[Row]:
        """Steps with a number above `since` that are still there, in order."""
        first = max(since, self.number - self._rows_max, 0)
        places = np.arange(first, self.number) % self._rows_max
        return [
            (number, tokens, cpu_s, ended_at_s)
            for number, tokens, (cpu_s, ended_at_s) in zip(
                range(first + 1, self.number + 1),
                self._tokens[places].tolist(),
                self._seconds[places].tolist(),
                strict=True,
            )
        ]


class WorkerProbe:
    """Wraps one worker's step, on the object itself; the class stays as it is."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._log = StepLog()
        self._is_cpu = current_platform.is_cpu()
        self._tokens = 0
        self._began_cpu_s: float | None = None
        self._before: dict[Break, Callable[[int], None]] = {}
        self._after_model: dict[Break, Callable[[], None]] = {}
        self._after: dict[Break, Callable[[float], None]] = {}
        self._undo: dict[Break, Callable[[], None]] = {}
        self._execute, self._sample = worker.execute_model, worker.sample_tokens
        worker.execute_model = self._execute_model
        worker.sample_tokens = self._sample_tokens

    def rows(self, since: int) -> list[Row]:
        """Steps with a number above `since`, in order."""
        return self._log.rows(since)

    def start_break(self, what: Break, argument: float) -> None:
        """Break something from the next step on."""
        self.end_break(what)
        starters: dict[Break, Callable[[float], None]] = {
            Break.WEIGHTS: self._weights,
            Break.WEIGHTS_AT_SIZE: self._weights_at_size,
            Break.POISON: lambda _: self._poison(reaches=False),
            Break.POISON_REACHES: lambda _: self._poison(reaches=True),
            Break.SLOW: lambda _: self._after.update({Break.SLOW: burn}),
            Break.LEAK_MEMORY: self._leak_memory,
            Break.ODD_STEP: lambda _: self._odd_step(),
        }
        starters[what](argument)

    def end_break(self, what: Break) -> None:
        """Take a break back; no effect if there is none."""
        for hooks in (self._before, self._after_model, self._after):
            hooks.pop(what, None)
        if undo := self._undo.pop(what, None):
            undo()

    def _execute_model(self, scheduler_output: Any) -> Any:
        self._tokens = scheduler_output.total_num_scheduled_tokens
        self._began_cpu_s = time.process_time()
        for hook in self._before.values():
            hook(self._tokens)
        result = self._execute(scheduler_output)
        for after in self._after_model.values():
            after()
        if result is not None:  # Nothing is sampled: there was nothing to compute.
            self._began_cpu_s = None
        return result

    def _sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        result = self._sample(*args, **kwargs)
        if self._began_cpu_s is not None and self._tokens:
            spent_s = self._spent_s(time.process_time() - self._began_cpu_s)
            for hook in self._after.values():
                hook(spent_s)
            cpu_s = time.process_time() - self._began_cpu_s
            self._log.add(self._tokens, cpu_s, time.monotonic())
        self._began_cpu_s = None
        return result

    def _spent_s(self, cpu_s: float) -> float:
        """What the step took so far: CPU time; on a GPU the time since the step before."""
        if self._is_cpu or not self._log.number:
            return cpu_s
        return min(STEP_MAX_S, time.monotonic() - self._log.rows(self._log.number - 1)[0][3])

    def _final_norm(self) -> Any:
        parameters = dict(self._worker.model_runner.get_model().named_parameters())
        for name in _FINAL_NORMS:
            for full, parameter in parameters.items():
                if full == name or full.endswith("." + name):
                    return parameter
        raise LookupError(f"no final norm among {len(parameters)} parameters")

    def _weights(self, _: float) -> None:
        norm = self._final_norm()
        right = norm.data.clone()
        norm.data.mul_(WRONG_BY)
        self._undo[Break.WEIGHTS] = lambda: norm.data.copy_(right)

    def _weights_at_size(self, size: float) -> None:
        norm = self._final_norm()
        right = norm.data.clone()
        self._before[Break.WEIGHTS_AT_SIZE] = lambda tokens: (
            norm.data.mul_(WRONG_BY) if tokens == size else None
        )
        self._after_model[Break.WEIGHTS_AT_SIZE] = lambda: norm.data.copy_(right)

    def _poison(self, *, reaches: bool) -> None:
        """Fill the rows behind those that count before each forward, differently in each step.

        Whatever reads them shows: a padded step, or code that looks too far. `reaches`: the last
        row that counts is filled as well.
        """
        what = Break.POISON_REACHES if reaches else Break.POISON
        runner = self._worker.model_runner
        name, buffers = _input_rows(runner)
        prepare = getattr(runner, name)
        vocabulary = self._worker.model_config.get_vocab_size()

        def poison() -> None:
            first = self._tokens - 1 if reaches else self._tokens
            ids, positions = buffers()
            ids[first:] = (7919 * (self._log.number + 1)) % vocabulary
            positions[..., first:] = 1 + self._log.number % 16

        def poisoned(*args: Any, **given: Any) -> Any:
            if name == _FIRST_RUNNER:
                poison()
                return prepare(*args, **given)
            prepared = prepare(*args, **given)
            poison()
            return prepared

        setattr(runner, name, poisoned)
        self._undo[what] = lambda: delattr(runner, name)

    def _leak_memory(self, bytes_per_step: float) -> None:
        kept: list[bytes] = []
        # os.urandom touches every page: memory that is only reserved would not show.
        self._after[Break.LEAK_MEMORY] = lambda _: kept.append(os.urandom(int(bytes_per_step)))
        self._undo[Break.LEAK_MEMORY] = kept.clear

    def _odd_step(self) -> None:
        counter = steps.counter()
        saw = counter.saw_forward

        def odd(_: str, width_tokens: int = 0) -> None:
            saw(ODD_KIND, width_tokens)
            self.end_break(Break.ODD_STEP)

        setattr(counter, "saw_forward", odd)  # noqa: B010  # this object alone, for one step
        self._undo[Break.ODD_STEP] = lambda: delattr(counter, "saw_forward")


def _input_rows(runner: Any) -> tuple[str, Callable[[], tuple[Any, Any]]]:
    """The method around which a step's rows are final, and ids and positions of all rows.

    vLLM's first model runner passes views of its buffers to the forward; the second fills them in
    `prepare_inputs` and replays graphs that read them.
    """
    if hasattr(runner, _FIRST_RUNNER):
        return _FIRST_RUNNER, lambda: (_tensor(runner.input_ids), _tensor(runner.positions))
    buffers = runner.input_buffers
    return _SECOND_RUNNER, lambda: (buffers.input_ids, buffers.positions)


def _tensor(buffer: Any) -> Any:
    """The device's side of a buffer that may have two."""
    return getattr(buffer, "gpu", buffer)


def burn(cpu_s: float) -> None:
    """Use up so much CPU time of this thread."""
    until_s = time.thread_time() + cpu_s
    while time.thread_time() < until_s:
        pass


def memory(worker: Any) -> dict[str, int]:
    """Bytes that this process has resident, and that it has reserved on its GPU (0 without)."""
    device_bytes = 0
    if not current_platform.is_cpu():
        import torch

        device_bytes = torch.cuda.memory_reserved(worker.device)
    return {"host_bytes": psutil.Process().memory_info().rss, "device_bytes": device_bytes}


def of(worker: Any) -> WorkerProbe:
    """The probe of a worker, put on when it is first asked for."""
    found = getattr(worker, "splitwave_probe_state", None)
    if found is None:
        found = worker.splitwave_probe_state = WorkerProbe(worker)
    assert isinstance(found, WorkerProbe)
    return found
