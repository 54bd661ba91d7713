"""The coordinator's sockets, with engines and a front-end that speak vLLM's messages by hand."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any  # sockets are untyped

import msgspec
import pytest
import zmq
import zmq.asyncio
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.serial_utils import MsgpackEncoder

from splitwave.core.wave_message import RankReport, RankWork, WaveSettings
from splitwave.engine.vllm.coordinator import Coordinator, in_place_of_vllms, require_made
from splitwave.engine.vllm.seams import SeamBroken
from splitwave.engine.vllm.wave_report import report_to_outputs

RANKS = 2
START = EngineCoreRequestType.START_DP_WAVE.value
PARALLEL = SimpleNamespace(
    data_parallel_size=RANKS,
    data_parallel_size_local=RANKS,
    data_parallel_master_ip="127.0.0.1",
    local_engines_only=False,
    enable_elastic_ep=False,
)


class Parties:
    """Two engines' sockets and a front-end's, connected to a coordinator."""

    def __init__(self, coordinator: Coordinator, context: zmq.asyncio.Context) -> None:
        self.coordinator = coordinator
        starts, reports = coordinator.get_engine_socket_addresses()
        self.starts = [self._connected(context, zmq.XSUB, starts) for _ in range(RANKS)]
        self.reports = [self._connected(context, zmq.PUSH, reports) for _ in range(RANKS)]
        front = coordinator.get_stats_publish_address()
        self.front = self._connected(context, zmq.XSUB, front)
        self.numbers = [0] * RANKS
        self._encode = MsgpackEncoder().encode

    def _connected(self, context: Any, kind: int, address: str) -> Any:  # likewise
        socket = context.socket(kind)
        socket.connect(address)
        return socket

    async def subscribe(self) -> list[bytes]:
        """All subscribe; what the engines are told then."""
        for socket in (self.front, *self.starts):
            await socket.send(b"\x01")
        return [await heard(socket) for socket in self.starts]

    async def report(self, rank: int, wave: int, *, stepping: bool, tokens: int = 0) -> None:
        self.numbers[rank] += 1
        work = RankWork(
            steps_by_kind={"full": tokens},
            steps_by_size={64: tokens},
            tokens=tokens,
            padded_tokens=tokens,
        )
        said = RankReport(rank, 7, self.numbers[rank], wave, stepping, work=work)
        await self.send(rank, report_to_outputs(said))

    async def send(self, rank: int, outputs: Any) -> None:  # vLLM's EngineCoreOutputs
        outputs.engine_index = rank
        await self.reports[rank].send_multipart(self._encode(outputs))

    async def first_request(self, wave: int) -> None:
        await self.front.send(msgspec.msgpack.encode((b"\x00\x00", wave)))

    async def started(self, rank: int = 0) -> tuple[int, int | None]:
        """The next start that a rank is sent: wave and excluded rank."""
        kind, body = await asyncio.wait_for(self.starts[rank].recv_multipart(), 2)
        assert kind == START
        wave, exclude = msgspec.msgpack.decode(body)
        return wave, exclude

    async def published(self, wave: int, running: bool) -> list[list[float]]:
        """Counts of the next publication of that wave and state."""
        while True:
            counts, *told = msgspec.msgpack.decode(await heard(self.front))
            if told == [wave, running]:
                return list(counts)


async def heard(socket: Any) -> bytes:
    message: bytes = await asyncio.wait_for(socket.recv(), 2)
    return message


@pytest.fixture
async def parties() -> AsyncIterator[Parties]:
    coordinator = Coordinator(PARALLEL, epoch=7)
    coordinator.serve()
    context = zmq.asyncio.Context()
    found = Parties(coordinator, context)
    assert await found.subscribe() == [b"READY"] * RANKS
    yield found
    coordinator.shutdown()
    context.destroy(linger=0)


async def test_a_first_request_at_a_sleeping_group_is_one_start_however_many_ask(
    parties: Parties,
) -> None:
    for rank in range(RANKS):
        await parties.report(rank, 3, stepping=False)
    await parties.published(3, False)
    for _ in range(10):
        await parties.first_request(3)

    assert await parties.started(0) == (3, None)
    assert await parties.started(1) == (3, None)
    for rank in range(RANKS):
        await parties.report(rank, 3, stepping=True)
    await parties.published(3, True)
    assert parties.coordinator.machine.starts == 1


async def test_work_on_one_rank_wakes_the_other_though_nobody_asked(parties: Parties) -> None:
    await parties.report(1, 5, stepping=False)
    await parties.report(0, 5, stepping=True)

    assert await parties.started(1) == (5, None)


async def test_a_dropped_start_is_repeated_by_the_watchdog(parties: Parties) -> None:
    parties.coordinator.drops_wakes = True
    began_s = asyncio.get_running_loop().time()
    await parties.first_request(0)

    assert await parties.started(0) == (0, None)
    waited_s = asyncio.get_running_loop().time() - began_s
    assert waited_s >= WaveSettings().patience_s


async def test_a_group_that_is_being_stopped_is_not_woken(parties: Parties) -> None:
    parties.coordinator.be_quiet()
    await parties.first_request(0)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(parties.started(0), 0.5)


async def test_what_makes_no_sense_is_logged_and_the_next_message_heard(
    parties: Parties, caplog: pytest.LogCaptureFixture
) -> None:
    await parties.reports[0].send(b"\xc1")
    await parties.report(0, 5, stepping=True)

    assert await parties.started(1) == (5, None)
    assert "a message to the wave coordinator makes no sense" in caplog.text


async def test_a_wave_s_status_and_segment_are_kept(parties: Parties) -> None:
    for rank in range(RANKS):
        await parties.report(rank, 0, stepping=False)
    await parties.first_request(0)
    await parties.started()
    for rank in range(RANKS):
        await parties.report(rank, 0, stepping=True)
    await parties.published(0, True)
    await parties.send(0, EngineCoreOutputs(wave_complete=0))
    for rank in range(RANKS):
        await parties.report(rank, 1, stepping=False, tokens=5)
    await parties.published(1, False)
    await asyncio.sleep(0)

    status = parties.coordinator.status()
    assert (status.state, status.wave, status.waves) == ("paused", 1, 1)
    assert sum(status.wake_counts) == RANKS
    async with asyncio.timeout(2):
        while not parties.coordinator.ended_segments:
            await parties.report(0, 1, stepping=False, tokens=5)
            await asyncio.sleep(0.01)
    (segment,) = parties.coordinator.ended_segments
    assert (segment.wave, segment.tokens, len(segment.wake_s)) == (0, 2 * 5, RANKS)


async def test_a_rank_s_death_ends_the_epoch_and_its_segment(
    parties: Parties, caplog: pytest.LogCaptureFixture
) -> None:
    await parties.report(1, 5, stepping=False)
    await parties.report(0, 5, stepping=True)
    await parties.started()

    parties.coordinator.on_rank_died(1, "was killed by SIGKILL")

    assert parties.coordinator.status().state == "ended"
    assert [segment.end for segment in parties.coordinator.ended_segments] == ["epoch"]
    assert "epoch 7 of the group has ended: rank 1: was killed by SIGKILL" in caplog.text


@pytest.fixture
def launch() -> Iterator[Any]:  # vLLM's module
    from vllm.v1.engine import utils

    stock = utils.DPCoordinator
    yield utils
    assert utils.DPCoordinator is stock


def test_vllms_launch_makes_ours_and_its_own_name_comes_back(launch: Any) -> None:
    with in_place_of_vllms(7) as made:
        coordinator = launch.DPCoordinator(PARALLEL, enable_wave_coordination=True)
    coordinator.shutdown()

    assert require_made(made, RANKS, is_moe=True) is coordinator
    assert require_made([], 1, is_moe=True) is None
    assert require_made([], RANKS, is_moe=False) is None
    with pytest.raises(SeamBroken, match="launch of 2 ranks made 0 of"):
        require_made([], RANKS, is_moe=True)
