"""The coordinator of a group's waves, in the worker that starts the group.

It stands where vLLM would start a coordinator process, speaks vLLM's messages on the same kinds
of socket, so that stock engines and clients work with it, and leaves every decision to
`splitwave.core.wave`. docs/waves.md has the protocol.

All of it runs on the worker's event loop: a socket's descriptor becomes readable, what it holds
is read, and the effects are sent at once. No task waits anywhere.
"""

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any  # sockets and vLLM's objects are untyped here

import msgspec
import zmq
from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType, utils
from vllm.v1.serial_utils import MsgpackDecoder
from vllm.v1.utils import get_engine_client_zmq_addr

from splitwave.core.wave import WaveCoordinator
from splitwave.core.wave_message import (
    Effect,
    EpochEnded,
    GroupState,
    Publish,
    StartReason,
    StartWave,
    WaveSettings,
)
from splitwave.core.wave_record import WaveRecord, WaveStatus
from splitwave.core.wave_segment import WaveSegment, WaveSegments
from splitwave.engine.vllm.seams import SeamBroken, vllm_version
from splitwave.engine.vllm.switches import Fault, fault
from splitwave.engine.vllm.wave_report import report_from_outputs

log = logging.getLogger(__name__)

SUBSCRIBE, UNSUBSCRIBE = b"\x01", b"\x00"
READY = b"READY"
RESIZE = "SCALE_ELASTIC_EP"
SEGMENTS_MAX = 256
"""Ended segments that are kept for whoever takes them."""


@contextlib.contextmanager
def in_place_of_vllms(epoch: int) -> Iterator[list["Coordinator"]]:
    """Have vLLM's launch make our coordinator inside the block; the list has it afterwards.

    vLLM looks the class up when it launches engines that step together. For those that do not
    (dense models) it gets its own.
    """
    stock = utils.DPCoordinator
    made: list[Coordinator] = []

    def make(
        parallel_config: Any, enable_wave_coordination: bool = True, logging_config: Any = None
    ) -> Any:  # vLLM's configuration, and its coordinator or ours
        if not enable_wave_coordination:
            return stock(parallel_config, enable_wave_coordination, logging_config)
        made.append(Coordinator(parallel_config, epoch))
        return made[-1]

    utils.DPCoordinator = make
    try:
        yield made
    finally:
        utils.DPCoordinator = stock


class Coordinator:
    """Sockets and one timer around `WaveCoordinator`.

    Bound when it is made, since engines are told its addresses as they are forked; deaf until
    `serve`, which needs the running event loop. The first four names are what vLLM's launch uses.
    """

    def __init__(self, parallel_config: Any, epoch: int) -> None:  # vLLM's ParallelConfig
        self.proc = SimpleNamespace(pid=os.getpid())
        self.epoch = epoch
        self.record = WaveRecord(parallel_config.data_parallel_size)
        self.segments = WaveSegments(epoch)
        self.ended_segments: deque[WaveSegment] = deque(maxlen=SEGMENTS_MAX)
        """Those that nobody has taken yet; the oldest go first."""
        self.drops_wakes = fault(Fault.DROP_WAKES)
        self._is_quiet = False
        self._complained_of = -1
        self._machine = WaveCoordinator(
            ranks=parallel_config.data_parallel_size,
            epoch=epoch,
            now_s=time.monotonic(),
            settings=WaveSettings(),
        )
        self._context = zmq.Context()
        front, back_out, back_in = _paths(parallel_config)
        self._front = self._bind(front, zmq.XPUB)
        self._from_engines = self._bind(back_out, zmq.PULL)
        self._to_engines = self._bind(back_in, zmq.XPUB)
        self._subscribers_missing = self._machine.ranks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._outputs = MsgpackDecoder(EngineCoreOutputs)

    def get_engine_socket_addresses(self) -> tuple[str, str]:
        """Where engines subscribe to starts, and where they send to."""
        return _endpoint(self._to_engines), _endpoint(self._from_engines)

    def get_stats_publish_address(self) -> str:
        """Where front-ends subscribe, and announce first requests."""
        return _endpoint(self._front)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop serving and unbind. Idempotent; takes no time, whatever vLLM allows for it."""
        del timeout
        if self._loop is not None:
            for socket in self._sockets():
                self._loop.remove_reader(socket.getsockopt(zmq.FD))
            self._loop = None
        if self._timer is not None:
            self._timer.cancel()
        self.ended_segments += self.segments.end_epoch(self.epoch, time.monotonic())
        self._context.destroy(linger=0)

    @property
    def is_asleep(self) -> bool:
        """True if no rank steps and none has work."""
        return self._machine.state is GroupState.PAUSED

    @property
    def machine(self) -> WaveCoordinator:
        """The state machine, to look at."""
        return self._machine

    def status(self) -> WaveStatus:
        """The waves as they are now, for people and metrics."""
        machine, record = self._machine, self.record
        return WaveStatus(
            state=machine.state.name.lower(),
            wave=machine.wave,
            why=machine.why or "",
            waves=record.waves,
            starts_by_why=dict(record.starts_by_why),
            messages=record.messages,
            wake_counts=tuple(record.wake_counts),
            wake_total_s=record.wake_total_s,
            ranks=record.ranks(time.monotonic()),
        )

    def serve(self) -> None:
        """Answer from now on, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        for socket in self._sockets():
            self._loop.add_reader(socket.getsockopt(zmq.FD), self._turn)
        self._turn()

    def on_rank_died(self, rank: int, why: str) -> None:
        """A rank's process has ended: so has the epoch, and front-ends are told."""
        if self._loop is not None:
            self._do(self._machine.on_rank_died(rank, self.epoch, why, time.monotonic()))
            self._turn()

    def be_quiet(self) -> None:
        """Wake nobody any more: the group is being stopped."""
        self._is_quiet = True

    def _sockets(self) -> tuple[Any, Any, Any]:
        return self._front, self._from_engines, self._to_engines

    def _bind(self, path: str, kind: int) -> Any:
        return make_zmq_socket(self._context, path, kind, bind=True, linger=0)

    def _turn(self) -> None:
        """Read all that has come, and what comes meanwhile, then set the timer.

        The descriptors tell of changes only, and a send may use one up: so it ends with a look at
        each socket that found nothing, behind the last send.
        """
        if self._loop is None:
            return
        while sum(self._read(socket, take) for socket, take in self._inputs()):
            continue
        now_s = time.monotonic()
        self._do(self._machine.tick(now_s))
        self.ended_segments += self.segments.settle(self._machine.state, self._machine.wave, now_s)
        wait_s = self._machine.wait_s()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wait_s < math.inf:
            self._timer = self._loop.call_later(wait_s, self._turn)

    def _inputs(self) -> tuple[tuple[Any, Callable[[bytes], Sequence[Effect]]], ...]:
        return (
            (self._from_engines, self._from_engine),
            (self._front, self._from_front),
            (self._to_engines, self._from_subscriber),
        )

    def _read(self, socket: Any, take: Callable[[bytes], Sequence[Effect]]) -> int:
        """Handle what waits in a socket; return how many messages that was."""
        count = 0
        with contextlib.suppress(zmq.Again):
            while True:
                message = socket.recv(zmq.NOBLOCK)
                count += 1
                try:
                    self._do(take(message))
                except Exception:  # one bad message must not stop the group's waves
                    log.exception("a message to the wave coordinator makes no sense")
        return count

    def _from_engine(self, message: bytes) -> Sequence[Effect]:
        outputs = self._outputs.decode(message)
        self.record.messages += 1
        machine, now_s, rank = self._machine, time.monotonic(), outputs.engine_index
        if (report := report_from_outputs(outputs)) is not None:
            self.record.on_report(report, now_s)
            self.segments.on_report(report, now_s)
            return machine.on_report(report, now_s)
        if outputs.wave_complete is not None:
            return machine.on_wave_complete(rank, self.epoch, outputs.wave_complete, now_s)
        if outputs.start_wave is not None:
            return machine.on_start_wave(rank, self.epoch, outputs.start_wave, now_s)
        return ()

    def _from_front(self, message: bytes) -> Sequence[Effect]:
        if message in (SUBSCRIBE, UNSUBSCRIBE):
            return ()
        self.record.messages += 1
        first, second = msgspec.msgpack.decode(message)
        if first == RESIZE:
            self.record.resize(second)
            return self._machine.on_resized([self.epoch] * second, time.monotonic())
        return self._machine.on_first_request(second, time.monotonic())

    def _from_subscriber(self, message: bytes) -> Sequence[Effect]:
        """An engine subscribes to starts: once all have, they are told to begin."""
        if message == SUBSCRIBE:
            self._subscribers_missing -= 1
            if self._subscribers_missing <= 0:  # Late ones join by an elastic resize.
                self._to_engines.send(READY, zmq.NOBLOCK)
        return ()

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartWave():
                    self._start(effect)
                case Publish():
                    self._front.send(_published(effect), zmq.NOBLOCK)
                case EpochEnded():
                    log.error("epoch %d of the group has ended: %s", effect.epoch, effect.reason)

    def _start(self, start: StartWave) -> None:
        if self._is_quiet or (self.drops_wakes and start.why is not StartReason.WATCHDOG):
            return
        now_s = time.monotonic()
        self.record.on_start(start, now_s)
        self.segments.on_start(start, now_s)
        if start.why is StartReason.WATCHDOG and start.wave != self._complained_of:
            self._complained_of = start.wave
            log.warning("the watchdog wakes wave %d again", start.wave)
        wave = msgspec.msgpack.encode((start.wave, start.exclude))
        message = (EngineCoreRequestType.START_DP_WAVE.value, wave)
        self._to_engines.send_multipart(message, zmq.NOBLOCK)


def _published(publish: Publish) -> bytes:
    """Loads, wave and state, as front-ends expect them."""
    counts = [list(count) for count in publish.counts]
    return msgspec.msgpack.encode((counts, publish.wave, publish.running))


def require_made(made: Sequence[Coordinator], ranks: int, is_moe: bool) -> Coordinator | None:
    """The coordinator that vLLM's launch has made; None for a group without waves."""
    if len(made) != int(ranks > 1 and is_moe):
        raise SeamBroken(
            f"vLLM {vllm_version()} does not fit: its launch of {ranks} ranks made {len(made)} of "
            "Splitwave's wave coordinators. Splitwave wraps vLLM 0.32.0; install that version."
        )
    return made[0] if made else None


def _paths(parallel_config: Any) -> tuple[str, str, str]:  # vLLM's ParallelConfig
    """Where to bind: for front-ends, for engines to send to, and for engines to subscribe to.

    Within one host by files, else by ports, as vLLM's own coordinator chooses.
    """
    config, host = parallel_config, parallel_config.data_parallel_master_ip
    engines_here = config.data_parallel_size == config.data_parallel_size_local
    if config.enable_elastic_ep:
        engines_here = False  # More may come from elsewhere.
    front = get_engine_client_zmq_addr(not config.local_engines_only, host=host)
    back = [get_engine_client_zmq_addr(engines_here, host=host) for _ in range(2)]
    return front, back[0], back[1]


def _endpoint(socket: Any) -> str:
    name: str = socket.getsockopt(zmq.LAST_ENDPOINT).decode()
    return name
