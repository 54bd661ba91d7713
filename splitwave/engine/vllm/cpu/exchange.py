"""Bytes between the ranks of one machine, each to each, over Unix sockets.

A decode step of a few rows makes half a dozen collectives of a few kilobytes. gloo hands each to
a thread of its own and waits for it; a socket's two system calls cost a tenth of that
(bench/results/cpu_modes.json: the step).
"""

import contextlib
import select
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

CONNECT_S = 60.0
"""The other ranks of the group are at the same place of their start."""
RANK_BYTES = 4
HEADER = struct.Struct("<QQ")
"""Before each message: which call of its sender it is of, and its bytes."""


class RankGone(Exception):
    """Another rank's end of a connection is closed: its process has ended."""


class OutOfStep(Exception):
    """Ranks made different calls: what has come is not what was waited for."""


class Exchange:
    """This rank's connections to all others; one call at a time.

    All ranks make the same calls in the same order. Where one does not, its peers wait or see
    that its message is of another call: they never take it for their own.
    """

    def __init__(self, rank: int, share: Callable[[str], Sequence[str]]) -> None:
        """Connect; all ranks do so together.

        `share` gives a rank's word to all and returns theirs in rank order. Raises OSError if a
        rank is on another machine or does not come within CONNECT_S.
        """
        self.rank = rank
        self._calls = 0
        folder = Path(tempfile.mkdtemp(prefix="splitwave-"))  # For this user alone.
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
                door.bind(str(folder / "rank"))
                door.listen()
                door.settimeout(CONNECT_S)
                addresses = share(str(folder / "rank"))
                self.ranks = len(addresses)
                self._peers = {
                    peer: _connected(address, rank) for peer, address in enumerate(addresses[:rank])
                }
                for _ in addresses[rank + 1 :]:
                    peer, connection = _accepted(door)
                    self._peers[peer] = connection
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def all_to_all(
        self, sent: Sequence[Sequence[memoryview]], received: Sequence[Sequence[memoryview]]
    ) -> None:
        """Give each rank its buffers and fill those that are to come from it.

        Both are by rank, this rank's own place is not looked at. Buffers are of bytes; how many
        travel is known at both ends. Raises RankGone, and OutOfStep.
        """
        self._calls += 1
        heads = {peer: bytearray(HEADER.size) for peer in self._peers}
        expected = {peer: self._header(received[peer]) for peer in self._peers}
        left = {peer: _filled([self._header(sent[peer]), *sent[peer]]) for peer in self._peers}
        missing = {
            peer: _filled([memoryview(head), *received[peer]]) for peer, head in heads.items()
        }
        for peer, buffers in left.items():
            self._send(peer, buffers)
        while any(left.values()):  # More than a socket holds: the others must be read meanwhile.
            self._wait(left, missing)
            for peer, buffers in left.items():
                self._send(peer, buffers)
                self._receive(peer, missing[peer], socket.MSG_DONTWAIT)
        for peer, buffers in missing.items():
            while buffers:  # It has all it needs from here, so it will send.
                self._receive(peer, buffers, socket.MSG_WAITALL)
        for peer, head in heads.items():
            if head != expected[peer]:
                raise OutOfStep(
                    f"rank {peer} sent (call, bytes) {HEADER.unpack(head)},"
                    f" rank {self.rank} waits for {HEADER.unpack(expected[peer])}"
                )

    def close(self) -> None:
        """The others see it as this rank's end. Safe to call twice."""
        for connection in self._peers.values():
            connection.close()

    def _header(self, buffers: Sequence[memoryview]) -> memoryview:
        return memoryview(HEADER.pack(self._calls, sum(buffer.nbytes for buffer in buffers)))

    def _wait(
        self, left: dict[int, list[memoryview]], missing: dict[int, list[memoryview]]
    ) -> None:
        some = select.poll()
        for peer, connection in self._peers.items():
            wanted = (select.POLLOUT if left[peer] else 0) | (select.POLLIN if missing[peer] else 0)
            if wanted:
                some.register(connection, wanted)
        some.poll()

    def _send(self, peer: int, buffers: list[memoryview]) -> None:
        if not buffers:
            return
        try:
            with contextlib.suppress(BlockingIOError):
                _drop(buffers, self._peers[peer].sendmsg(buffers, (), socket.MSG_DONTWAIT))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._gone(peer) from error

    def _receive(self, peer: int, buffers: list[memoryview], flags: int) -> None:
        if not buffers:
            return
        try:
            count = self._peers[peer].recvmsg_into(buffers, 0, flags)[0]
        except BlockingIOError:
            return
        except ConnectionResetError as error:
            raise self._gone(peer) from error
        if count == 0:
            raise self._gone(peer)
        _drop(buffers, count)

    def _gone(self, peer: int) -> RankGone:
        return RankGone(f"rank {peer} has ended; this is rank {self.rank}")


def _connected(address: str, rank: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_S)
    connection.connect(address)
    connection.sendall(rank.to_bytes(RANK_BYTES, "little"))
    connection.settimeout(None)
    return connection


def _accepted(door: socket.socket) -> tuple[int, socket.socket]:
    connection, _ = door.accept()
    connection.settimeout(CONNECT_S)
    said = connection.recv(RANK_BYTES, socket.MSG_WAITALL)
    connection.settimeout(None)
    return int.from_bytes(said, "little"), connection


def _filled(buffers: Sequence[memoryview]) -> list[memoryview]:
    return [buffer for buffer in buffers if buffer.nbytes]


def _drop(buffers: list[memoryview], count: int) -> None:
    """Take `count` bytes off the front."""
    while buffers and count >= buffers[0].nbytes:
        count -= buffers.pop(0).nbytes
    if count:
        buffers[0] = buffers[0][count:]
