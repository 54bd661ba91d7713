"""Start and stop a group's processes: one engine process a rank.

Engines are forked from this process after one import of vLLM, from the thread that calls, which
must be the main one (the kernel kills a child when the thread that forked it ends). gRPC must not
have been initialised by then: a fork does not carry its threads.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any  # vLLM's configuration and client are untyped here

from splitwave.core.mode import (
    CPU_BUILD,
    DEEP_EP,
    GPU_BUILD,
    GPU_PER_RANK,
    NVLINK,
    NVSHMEM,
    Device,
    Mode,
    lookup,
    missing_needs,
)
from splitwave.engine.port import EngineDied
from splitwave.engine.vllm import forking, stacks
from splitwave.engine.vllm.check import check_resolved
from splitwave.engine.vllm.config import (
    SettingsError,
    VllmGroupSettings,
    device_numbers,
    engine_arguments,
    shares_devices,
    transfer_arguments,
)
from splitwave.engine.vllm.logs import COORDINATOR, ProcessLogs
from splitwave.engine.vllm.pulse import LOOK_S, Pulse, is_stopped, silent_max_s
from splitwave.engine.vllm.switches import WAVE_EPOCH, WEDGE_DIR, Fault, fault
from splitwave.engine.vllm.worst_token import wedge
from splitwave.engine.vllm.worst_token.collectives import diagnose

if TYPE_CHECKING:
    from splitwave.engine.vllm.coordinator import Coordinator

POLL_S = 0.2
KILL_WAIT_S = 5.0
STATUS_WAIT_S = 1.0
"""How long at most the status of a process that has ended is waited for."""
LOST_GRACE_S = 0.2
"""Given to the other ranks of a lost group: time to write the end of their logs."""
REPORTS_WAIT_S = 3.0
"""Given at most to the ranks of a wedged group to say where they stand."""
REPORTS_LOOK_S = 0.05
DEATH_WAIT_S = REPORTS_WAIT_S + 1.0
"""How long a start that vLLM gives up waits to hear which process has ended."""

Progress = Callable[[int, str], None]
"""Called with a rank and words for how far its start has come."""


def build_config(settings: VllmGroupSettings, mode: Mode) -> Any:
    """Make vLLM's configuration; SettingsError if vLLM, or a rule of the mode, refuses it."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.exceptions import VLLMError

    check_build(mode)
    try:
        arguments = AsyncEngineArgs(
            **engine_arguments(settings, mode),
            kv_transfer_config=KVTransferConfig(**transfer_arguments(settings, mode)),
        )
        config = arguments.create_engine_config()
        if shares_devices(settings):  # The option that vLLM has for it refuses doubles.
            config.parallel_config.assigned_physical_gpu_ids = list(device_numbers(settings))
    except (ValueError, NotImplementedError, OSError, VLLMError) as error:
        raise SettingsError("settings", f"vLLM refuses them: {error}") from error
    check_resolved(settings, mode, config, os.environ)
    return config


def check_build(mode: Mode) -> None:
    """Raise SettingsError for what the mode needs and is not here, such as a build of vLLM.

    On a GPU build it is not told here that GPUs or links are missing, only that packages are.
    """
    from vllm.platforms import current_platform

    if missing := missing_needs(mode, _needs_met(is_cpu=current_platform.is_cpu())):
        raise SettingsError("mode", f"{mode.name} needs {', '.join(missing)}")
    if mode.device is Device.CPU and not type(current_platform).__module__.startswith("splitwave"):
        raise SettingsError(
            "mode", "vLLM did not load Splitwave's platform plugin; VLLM_PLUGINS must list it"
        )


def _needs_met(*, is_cpu: bool) -> set[str]:
    """Names of the needs that are met here, or of which only a start can tell."""
    if is_cpu:
        return {CPU_BUILD.name}
    met = {GPU_BUILD.name, GPU_PER_RANK.name, NVLINK.name, NVSHMEM.name}
    return met if find_spec("deep_ep") is None else {*met, DEEP_EP.name}


def check_ports(settings: VllmGroupSettings) -> None:
    """Raise SettingsError if a port that a rank will listen on is taken."""
    for rank, port in enumerate(settings.side_channel_ports):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((settings.side_channel_host, port))
            except OSError as error:
                raise SettingsError(
                    "side_channel_port",
                    f"rank {rank} cannot listen on {settings.side_channel_host}:{port} "
                    f"({error.strerror}); choose another",
                ) from error


class Processes:
    """The processes of one group, from their fork to their end."""

    def __init__(self, settings: VllmGroupSettings, vllm_config: Any) -> None:
        self._settings = settings
        self._vllm_config = vllm_config
        self.logs = ProcessLogs(settings.log_dir, settings.group_id, settings.epoch, settings.ranks)
        self.died: asyncio.Future[EngineDied] = asyncio.get_running_loop().create_future()
        """Resolved with what happened when a process ends, or with the call of `close`."""
        self.coordinator: Coordinator | None = None
        """Of the group's waves; None for a single rank, and for ranks that do not step together."""
        self._pulse: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        """Since a rank has ended for waiting too long: asks the others where they stand."""
        self._launch: Any = None
        self._starting: Any = None
        self._watched: list[tuple[int | str, BaseProcess]] = []

    def fork(self) -> dict[str, Any]:
        """Start all processes and return the addresses that a client binds to.

        Blocks for the forks alone, some milliseconds each.
        """
        from vllm.platforms import current_platform
        from vllm.v1.engine.utils import (
            EngineZmqAddresses,
            get_engine_zmq_bind_addresses,
            launch_core_engines,
        )
        from vllm.v1.executor import Executor

        os.environ[WEDGE_DIR] = str(self.logs.wedge_dir)  # For engines started from here.
        if not current_platform.is_cpu():
            os.environ[forking.METHOD] = forking.start_method()
        bind = get_engine_zmq_bind_addresses(self._vllm_config)
        addresses = EngineZmqAddresses(inputs=bind.inputs, outputs=bind.outputs)
        self._starting = launch_core_engines(
            self._vllm_config, Executor.get_class(self._vllm_config), False, addresses
        )
        with self.logs.capturing(), self._coordinated():
            self._launch = self._starting.__enter__()
        self._watch()
        return {
            "input_address": addresses.inputs[0],
            "output_address": addresses.outputs[0],
            "stats_update_address": addresses.frontend_stats_publish_address,
        }

    @contextlib.contextmanager
    def _coordinated(self) -> Iterator[None]:
        """Let what is launched inside be coordinated by us, and begin with it."""
        from splitwave.engine.vllm import coordinator

        os.environ.pop(WAVE_EPOCH, None)
        if fault(Fault.STOCK_COORDINATOR):
            yield
            return
        os.environ[WAVE_EPOCH] = str(self._settings.epoch)  # For engines started from here.
        with coordinator.in_place_of_vllms(self._settings.epoch) as made:
            yield
        is_moe = self._vllm_config.model_config.is_moe
        self.coordinator = coordinator.require_made(made, self._settings.ranks, is_moe)
        if self.coordinator is not None:
            self._launch.coordinator = None  # It is no process: vLLM has none to watch or to stop.
            self.coordinator.serve()

    def _watch(self) -> None:
        """Notice the end of any process at once. vLLM itself does not watch the coordinator."""
        self._watched = list(enumerate(self._launch.engine_manager.processes))
        if self._launch.coordinator is not None:
            self._watched.append((COORDINATOR, self._launch.coordinator.proc))
        loop = asyncio.get_running_loop()
        for who, process in self._watched:
            loop.add_reader(process.sentinel, self._on_end, who, process)

    def watch_pulse(self) -> None:
        """Notice ranks that stop running, from now on: call it once every rank runs."""
        if fault(Fault.NO_PULSE):
            return
        self._pulse = asyncio.create_task(self._feel_pulse(), name="pulse of the ranks")

    async def _feel_pulse(self) -> None:
        ranks = [(who, process) for who, process in self._watched if isinstance(who, int)]
        pids = [process.pid or 0 for _, process in ranks]
        pulse = Pulse(pids, time.monotonic(), silent_max_s(lookup(self._settings.mode).device))
        while not self.died.done():
            await asyncio.sleep(LOOK_S)
            heard_at_s = [] if self.coordinator is None else self.coordinator.record.heard_at_s
            if (stuck := pulse.look(heard_at_s, time.monotonic())) is not None:
                rank, why = stuck
                if not is_stopped(pids[rank]):
                    await stacks.ask(pids)
                self._end_epoch(self._describe(rank, ranks[rank][1], why))

    def _unwatch(self) -> None:
        """Stop watching."""
        if self._pulse is not None:
            self._pulse.cancel()
        if self._asking is not None:
            self._asking.cancel()
        loop = asyncio.get_running_loop()
        for _, process in self._watched:
            loop.remove_reader(process.sentinel)

    def _on_end(self, who: int | str, process: BaseProcess) -> None:
        """Keep the first end as the group's cause of death; others follow from it."""
        asyncio.get_running_loop().remove_reader(process.sentinel)
        if self._asking is not None:
            return
        died = self.death(who, process)
        if process.exitcode == wedge.EXIT_CODE:
            self._asking = asyncio.create_task(self._ask(who, process), name="wedge reports")
        else:
            self._end_epoch(died)

    async def _ask(self, who: int | str, process: BaseProcess) -> None:
        """End the epoch with what all ranks say of the wedge, or as many as do in time."""
        give_up_at_s = time.monotonic() + REPORTS_WAIT_S
        ranks = range(self._settings.ranks)
        while not set(ranks) <= set(reports := wedge.read_reports(self.logs.wedge_dir)):
            if time.monotonic() >= give_up_at_s:
                break
            await asyncio.sleep(REPORTS_LOOK_S)
        how = f"has given up waiting for its peers (exit code {wedge.EXIT_CODE})"
        self._end_epoch(self._describe(who, process, f"{how}: {diagnose(reports, ranks)}"))

    def _end_epoch(self, died: EngineDied) -> None:
        """The group is lost, if it was not before."""
        if self.died.done():
            return
        if self.coordinator is not None and died.rank is not None:
            self.coordinator.on_rank_died(died.rank, str(died))
        self.died.set_result(died)

    def death(self, who: int | str, process: BaseProcess) -> EngineDied:
        """Describe the end of a process, with the end of its log."""
        return self._describe(who, process, _how_it_ended(process))

    def _describe(self, who: int | str, process: BaseProcess, how: str) -> EngineDied:
        """Say of a process what has become of it."""
        rank = who if isinstance(who, int) else None
        name = f"rank {who}" if rank is not None else f"the group's {who}"
        tail = self.logs.tail(who)
        message = f"{name} (pid {process.pid}) {how}; its log is {self.logs.path(who)}"
        return EngineDied(message, rank=rank, log_tail=tail)

    async def until_ready(self, on_progress: Progress) -> None:
        """Wait until every rank has loaded its model; EngineDied if one fails or time is up."""
        waiting = asyncio.ensure_future(
            asyncio.to_thread(self._starting.__exit__, None, None, None)
        )
        give_up_at_s = time.monotonic() + self._settings.start_timeout_s
        said: dict[int, str] = {}
        try:
            while not waiting.done():
                await asyncio.wait({waiting, self.died}, timeout=POLL_S)
                self._report(said, on_progress)
                if self.died.done():
                    raise self.died.result()
                if time.monotonic() > give_up_at_s:
                    raise self._late(said)
            await self._raise_cause(waiting)
        finally:
            if not waiting.done():
                self._kill()  # ends the thread's wait
                await asyncio.wait({waiting}, timeout=KILL_WAIT_S)
            if waiting.done():
                waiting.exception()  # retrieved: the cause is what was raised above

    async def _raise_cause(self, waiting: asyncio.Future[Any]) -> None:
        """Raise the death that made vLLM's own wait fail, if it failed."""
        error = waiting.exception()
        if error is None:
            return
        await asyncio.wait({self.died}, timeout=DEATH_WAIT_S)
        if self.died.done():
            raise self.died.result() from error
        raise EngineDied(f"the group did not start: {error}") from error

    def _report(self, said: dict[int, str], on_progress: Progress) -> None:
        """Pass on each rank's milestone once."""
        for rank in range(self._settings.ranks):
            words = self.logs.milestone(rank)
            if words and said.get(rank) != words:
                said[rank] = words
                on_progress(rank, words)

    def _late(self, said: dict[int, str]) -> EngineDied:
        """Describe a start that took too long by the rank that came least far."""
        rank = min(range(self._settings.ranks), key=lambda rank: len(self.logs.tail(rank)))
        return EngineDied(
            f"rank {rank} was not ready after {self._settings.start_timeout_s:g} s "
            f"(last: {said.get(rank, 'started')}); its log is {self.logs.path(rank)}",
            rank=rank,
            log_tail=self.logs.tail(rank),
        )

    def pids(self) -> list[int]:
        """Return the process ids of all that were started."""
        return [process.pid for _, process in self._watched if process.pid is not None]

    def _kill(self) -> None:
        """Kill every process with what it has started; each leads a process group of its own."""
        for _, process in self._watched:
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()

    async def close(self) -> None:
        """End every process: politely, then for certain. Idempotent; bounded in time."""
        if self._launch is None:
            return
        self._unwatch()
        if self.coordinator is not None:
            self.coordinator.be_quiet()
        # Ranks of a group that has lost one wait for it in a collective: they cannot end politely,
        # and one that is stopped does not even hear that it should.
        grace_s = LOST_GRACE_S if self.died.done() else self._settings.close_grace_s
        if not self.died.done():
            self.died.set_result(EngineDied("the group was closed"))
        engines = [process for who, process in self._watched if who != COORDINATOR]
        for process in engines:
            if process.is_alive():
                process.terminate()
        await _until_ended(engines, grace_s)
        self._kill()
        await _until_ended([process for _, process in self._watched], KILL_WAIT_S)
        # vLLM's handles: nothing is left to stop, but their finalizers must not run at exit.
        self._launch.engine_manager.shutdown(timeout=0)
        for coordinator in (self._launch.coordinator, self.coordinator):
            if coordinator is not None:
                coordinator.shutdown(timeout=0)
        self._launch = None


def _how_it_ended(process: BaseProcess) -> str:
    """Say how a process has ended, which its sentinel has told.

    Another thread may be waiting for it in this very moment (vLLM's, or whoever starts a process):
    then the status is that one's to read, and is here a moment later.
    """
    give_up_at_s = time.monotonic() + STATUS_WAIT_S
    process.join(timeout=STATUS_WAIT_S)
    while (code := process.exitcode) is None and time.monotonic() < give_up_at_s:
        time.sleep(0.001)
    if code is None:
        return "has ended, and nobody has kept its status"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with status {code}"


async def _until_ended(processes: list[BaseProcess], timeout_s: float) -> None:
    """Wait until all processes have ended, at most `timeout_s`."""
    await asyncio.to_thread(_join_all, processes, time.monotonic() + timeout_s)


def _join_all(processes: list[BaseProcess], give_up_at_s: float) -> None:
    """Join processes one after the other; they end side by side."""
    for process in processes:
        process.join(timeout=max(0.0, give_up_at_s - time.monotonic()))


async def or_death(call: Awaitable[Any], died: asyncio.Future[EngineDied]) -> Any:
    """Await `call`, but no longer than the group lives: a dead engine never answers."""
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task, died}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise died.result()
        return task.result()
    finally:
        task.cancel()
