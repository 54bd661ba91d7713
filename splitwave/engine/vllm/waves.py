"""What a rank tells the coordinator of its waves, from inside the engine.

The engine core's loop says where it is: before it sleeps, and when it goes on. A thread repeats
the last word while the loop computes, sleeps or waits for its peers, and brings changed counts.
With it a lost message costs no more than a report interval, and silence means that the process
does not run. An idle rank sends one report a second.

Active in an engine whose coordinator is Splitwave's (`switches.wave_epoch`), inert in any other.
"""

import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Any  # vLLM's objects are untyped here

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from splitwave.core.wave_message import RankReport, RankWork, WaveSettings
from splitwave.engine.vllm import steps
from splitwave.engine.vllm.switches import wave_epoch
from splitwave.engine.vllm.wave_report import report_to_outputs

COUNTS_S = 0.05
"""Longest time that a changed number of requests goes unreported."""
ASK_WORKERS_S = 1.0
"""How often counts are asked of workers that live in other processes."""

_MARK = "splitwave_waves_installed"
_REPORTER = "splitwave_reporter"


class Reporter:
    """One rank's words to the coordinator.

    The loop calls `look`; the thread only repeats what the loop saw last, so no report tells of
    a state between two statements of the loop.
    """

    def __init__(self, core: Any, epoch: int) -> None:  # vLLM's DPEngineCoreProc
        self._core = core
        self._epoch = epoch
        self._settings = WaveSettings()
        self._sending = threading.Condition()
        self._word: tuple[int, bool, bool] | None = None
        self._counts = (0, 0)
        self._number = 0
        self._sent_at_s = -math.inf
        self._due_s = math.inf
        self._votes = 0
        self._work = _WorkOf(core)
        threading.Thread(target=self._repeat, name="splitwave waves", daemon=True).start()

    def look(self) -> None:
        """Report at once if the loop is in another place than it last said. Loop only."""
        core = self._core
        stepping = bool(
            core.engines_running or core.scheduler.has_unfinished_requests() or core.batch_queue
        )
        word = (core.current_wave, stepping, bool(core.ignore_start_dp_wave))
        if word == self._word:
            return
        self._work.refresh()
        with self._sending:
            self._word = word
            self._send()
            self._sending.notify()

    def look_at_counts(self) -> None:
        """Have a changed number of requests reported soon. Loop only."""
        counts = self._core.scheduler.get_request_counts()
        if counts == self._counts:
            return
        self._counts = counts
        with self._sending:
            due_s = self._sent_at_s + COUNTS_S
            if due_s < self._due_s:
                self._due_s = due_s
                self._sending.notify()

    def start_discarded(self) -> None:
        """A start did not wake this rank: the coordinator has missed its last word. Loop only."""
        self._word = None

    def voted(self) -> None:
        """The ranks have asked one another whether there is work left. Loop only."""
        self._votes += 1
        self._work.refresh()

    def _send(self) -> None:
        """Send the last word with the counts of now. Call it while `_sending` is held."""
        assert self._word is not None
        wave, stepping, held = self._word
        scheduler = self._core.scheduler
        running, waiting = scheduler.get_request_counts()
        self._number += 1
        report = RankReport(
            rank=self._core.engine_index,
            epoch=self._epoch,
            number=self._number,
            wave=wave,
            stepping=stepping,
            held=held,
            waiting=waiting,
            running=running,
            kv_usage=scheduler.get_kv_cache_usage(),
            work=self._work.now(self._votes),
        )
        self._core.output_queue.put_nowait((-1, report_to_outputs(report)))
        settings = self._settings
        self._sent_at_s = time.monotonic()
        self._due_s = self._sent_at_s + (
            settings.report_busy_s if stepping else settings.report_idle_s
        )

    def _repeat(self) -> None:
        """The thread: say the last word again whenever it is due."""
        with self._sending:
            while True:
                left_s = self._due_s - time.monotonic()
                if left_s > 0:
                    self._sending.wait(min(left_s, threading.TIMEOUT_MAX))
                elif self._word is not None:
                    self._send()
                else:  # The loop is about to speak.
                    self._sending.wait(self._settings.report_busy_s)


class _WorkOf:
    """Counts of what this rank has computed, wherever its worker runs."""

    def __init__(self, core: Any) -> None:  # vLLM's DPEngineCoreProc
        self._core = core
        self._is_here = isinstance(core.model_executor, UniProcExecutor)
        self._asked: dict[str, Any] = steps.counted()
        self._asked_at_s = -math.inf

    def refresh(self) -> None:
        """Ask workers in other processes, now and then. Loop only: the call is not the thread's."""
        now_s = time.monotonic()
        if not self._is_here and now_s >= self._asked_at_s + ASK_WORKERS_S:
            self._asked = self._core.collective_rpc("splitwave_steps")[0]
            self._asked_at_s = now_s

    def now(self, votes: int) -> RankWork:
        """The counts as they are, or as they were when last asked."""
        counts = steps.counted() if self._is_here else self._asked
        return RankWork(
            steps_by_kind=counts["steps_by_kind"],
            steps_by_size=counts["steps_by_size"],
            dummy_steps=counts["dummy_steps"],
            votes=votes,
            tokens=counts["tokens"],
            padded_tokens=counts["padded_tokens"],
        )


def install() -> None:
    """Let the ranks of this process report. Idempotent."""
    if getattr(DPEngineCoreProc, _MARK, False):
        return
    setattr(DPEngineCoreProc, _MARK, True)
    for name, wrap in _WRAPPED.items():
        setattr(DPEngineCoreProc, name, wrap(getattr(DPEngineCoreProc, name)))


def _reporter(core: Any) -> Reporter | None:  # vLLM's DPEngineCoreProc
    """This rank's reporter, made when its loop begins; None under vLLM's own coordinator."""
    if not hasattr(core, _REPORTER):
        epoch = wave_epoch() if core.has_coordinator else None
        setattr(core, _REPORTER, None if epoch is None else Reporter(core, epoch))
    found: Reporter | None = getattr(core, _REPORTER)
    return found


def _looking(process: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(process)
    def processed(core: Any) -> None:  # vLLM's DPEngineCoreProc
        reporter = _reporter(core)
        if reporter is not None and _is_about_to_sleep(core):
            reporter.look()
        process(core)
        if reporter is not None:
            reporter.look()

    return processed


def _is_about_to_sleep(core: Any) -> bool:  # vLLM's DPEngineCoreProc
    """True if the loop will wait for a message: there is no work and none is queued."""
    return core.input_queue.empty() and not core.has_work()


def _listening(handle: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    @functools.wraps(handle)
    def handled(core: Any, request_type: Any, request: Any) -> None:  # vLLM's
        handle(core, request_type, request)
        reporter = _reporter(core)
        if reporter is None:
            return
        if request_type == EngineCoreRequestType.START_DP_WAVE and (
            not core.engines_running or request[0] != core.current_wave
        ):
            reporter.start_discarded()
        if _is_about_to_sleep(core):
            reporter.look()

    return handled


def _counting(publish: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(publish)
    def published(core: Any) -> None:  # vLLM's DPEngineCoreProc
        reporter = _reporter(core)
        if reporter is None:
            publish(core)
        else:  # Instead: reports carry the counts, and not with each step.
            reporter.look_at_counts()

    return published


def _voting(ask: Callable[[Any, bool], bool]) -> Callable[[Any, bool], bool]:
    @functools.wraps(ask)
    def asked(core: Any, local_unfinished: bool) -> bool:  # vLLM's DPEngineCoreProc
        unfinished = ask(core, local_unfinished)
        reporter = _reporter(core)
        step = core.step_counter
        if reporter is not None and (step == 1 or step % core.dp_sync_interval == 0):
            reporter.voted()
        return unfinished

    return asked


_WRAPPED: dict[str, Callable[[Any], Any]] = {
    "_process_input_queue": _looking,
    "_handle_client_request": _listening,
    "_maybe_publish_request_counts": _counting,
    "_has_global_unfinished_reqs": _voting,
}
