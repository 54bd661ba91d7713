"""Bytes and rows between the ranks of a CPU group: threads stand in for its processes."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch

from splitwave.engine.vllm.cpu import padding
from splitwave.engine.vllm.cpu.communicator import CpuEpCommunicator
from splitwave.engine.vllm.cpu.exchange import Exchange, OutOfStep, RankGone

T = TypeVar("T")
RANKS = 3
LARGE = 3_000_000
"""Bytes; several times what a socket holds."""


class Words:
    """What the ranks tell each other before they are connected."""

    def __init__(self, ranks: int) -> None:
        self.words = [""] * ranks
        self._all_said = threading.Barrier(ranks)

    def of(self, rank: int) -> Callable[[str], list[str]]:
        def share(word: str) -> list[str]:
            self.words[rank] = word
            self._all_said.wait(10.0)
            return self.words

        return share


def by_rank(call: Callable[[int], T], ranks: int = RANKS) -> list[T]:
    """The call of every rank, all at once."""
    with ThreadPoolExecutor(ranks) as pool:
        return [each.result(20.0) for each in [pool.submit(call, rank) for rank in range(ranks)]]


@pytest.fixture
def exchanges() -> Iterator[list[Exchange]]:
    words = Words(RANKS)
    made = by_rank(lambda rank: Exchange(rank, words.of(rank)))
    assert not any(Path(word).parent.exists() for word in words.words), "a folder is left"
    yield made
    for exchange in made:
        exchange.close()


@pytest.fixture
def communicators(exchanges: list[Exchange]) -> list[CpuEpCommunicator]:
    made = []
    for rank, exchange in enumerate(exchanges):
        communicator = CpuEpCommunicator.__new__(CpuEpCommunicator)
        communicator.rank_in_group, communicator.world_size = rank, RANKS
        communicator.exchange = exchange
        made.append(communicator)
    return made


@pytest.mark.parametrize("size", [1, 2400, LARGE])
def test_each_rank_gets_what_each_other_sent_it(exchanges: list[Exchange], size: int) -> None:
    def call(rank: int) -> list[bytes]:
        sent = [[memoryview(bytes([10 * rank + to]) * size), memoryview(b"!")] for to in range(3)]
        filled = [bytearray(size + 1) for _ in range(RANKS)]
        halves = [[memoryview(each)[:1], memoryview(each)[1:]] for each in filled]
        for _ in range(3):
            exchanges[rank].all_to_all(sent, halves)
        return [bytes(each) for each in filled]

    for rank, got in enumerate(by_rank(call)):
        for sender in {0, 1, 2} - {rank}:
            assert got[sender] == bytes([10 * sender + rank]) * size + b"!"
        assert got[rank] == bytes(size + 1), "its own place is not looked at"


@pytest.mark.parametrize("size", [0, 4, LARGE])
def test_the_end_of_a_rank_is_an_error_in_the_others(exchanges: list[Exchange], size: int) -> None:
    """Whether it is noticed in sending, in the middle of that, or in waiting."""

    def call(rank: int) -> None:
        if rank == 1:
            exchanges[1].close()
            return
        sent = [[memoryview(bytearray(size))] for _ in range(RANKS)]
        received = [[memoryview(bytearray(8))] for _ in range(RANKS)]
        with pytest.raises(RankGone, match=rf"rank [012] has ended; this is rank {rank}"):
            exchanges[rank].all_to_all(sent, received)
        exchanges[rank].close()  # As its process does.

    by_rank(call)


@pytest.mark.parametrize(("calls", "count"), [(1, 8), (2, 4)])
def test_a_message_of_another_call_is_never_taken_for_this_ones(
    exchanges: list[Exchange], calls: int, count: int
) -> None:
    """Rank 1 has sent 4 bytes more, or is a call ahead: what it sent would fit all the same."""

    def call(rank: int) -> str:
        length = count if rank == 1 else 4
        sent = [[memoryview(bytearray(length))] for _ in range(RANKS)]
        received = [[memoryview(bytearray(4))] for _ in range(RANKS)]
        if rank == 1:
            exchanges[1]._calls = calls - 1  # noqa: SLF001  # what a call of its own would do
        try:
            exchanges[rank].all_to_all(sent, received)
        except OutOfStep as error:
            return str(error)
        return ""

    said = by_rank(call)

    for rank in (0, 2):
        assert said[rank] == (
            f"rank 1 sent (call, bytes) ({calls}, {count}), rank {rank} waits for (1, 4)"
        )


@pytest.mark.parametrize("sizes", [[2, 2, 2], [3, 0, 1], [0, 0, 5], [700, 1, 512]])
def test_rows_of_several_kinds_are_gathered_in_rank_order(
    communicators: list[CpuEpCommunicator], sizes: list[int]
) -> None:
    def parts(rank: int) -> list[torch.Tensor]:
        count = sizes[rank]
        return [
            torch.full((count, 64), rank + 0.5, dtype=torch.bfloat16),
            torch.arange(count * 2, dtype=torch.int32).view(count, 2) + 100 * rank,
            torch.full((count,), rank, dtype=torch.int64),
            torch.full((2, count), 7.0 + rank).T,  # Not contiguous.
        ]

    expected = [torch.cat(columns) for columns in zip(*map(parts, range(RANKS)), strict=True)]

    for got in by_rank(lambda rank: communicators[rank].all_gatherv(parts(rank), 0, sizes)):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert [each.dtype for each in got] == [each.dtype for each in expected]


def test_one_tensor_and_equal_rows_need_no_list(communicators: list[CpuEpCommunicator]) -> None:
    for got in by_rank(lambda rank: communicators[rank].all_gatherv(torch.full((2, 3), rank))):
        assert isinstance(got, torch.Tensor)
        assert got.tolist() == [[rank] * 3 for rank in (0, 0, 1, 1, 2, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[2, 2, 2], [3, 0, 1], [0, 0, 5]])
def test_each_rank_keeps_the_sum_of_its_rows(
    communicators: list[CpuEpCommunicator], sizes: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    partial = [torch.randn(sum(sizes), 16).to(dtype) for _ in range(RANKS)]
    whole = torch.stack(partial).float().sum(0).to(dtype)

    got = by_rank(lambda rank: communicators[rank].reduce_scatterv(partial[rank], 0, sizes))

    assert all(torch.equal(a, b) for a, b in zip(got, whole.split(sizes), strict=True))
    if len(set(sizes)) == 1:
        equal = by_rank(lambda rank: communicators[rank].reduce_scatterv(partial[rank].T))
        assert all(torch.equal(a.T, b) for a, b in zip(equal, whole.split(2), strict=True))


def test_what_ranks_tell_before_a_step_is_as_vllms_own_sum(
    communicators: list[CpuEpCommunicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed import parallel_state

    here = threading.local()
    monkeypatch.setattr(parallel_state, "get_dp_group", lambda: here.group)

    def call(rank: int) -> list[list[int]]:
        here.group = SimpleNamespace(all_gatherv=communicators[rank].all_gatherv)
        told: list[list[int]] = padding.gathered(rank == 1, 5 + rank, 8, 2 - rank, None).tolist()
        return told

    assert by_rank(call) == [[[5, 6, 7], [8, 8, 8], [0, 1, 0], [2, 1, 0]]] * RANKS


@pytest.mark.parametrize("works", [(0, 0, 0), (0, 1, 0), (1, 1, 1)])
@pytest.mark.parametrize("pauses", [(0, 0, 0), (1, 0, 1), (1, 1, 1)])
def test_a_vote_comes_out_as_vllms_own(
    exchanges: list[Exchange],
    monkeypatch: pytest.MonkeyPatch,
    works: tuple[bool, ...],
    pauses: tuple[bool, ...],
) -> None:
    here = threading.local()
    monkeypatch.setattr(padding, "_votes", lambda: here.votes)

    def call(rank: int) -> tuple[bool, bool]:
        here.votes = exchanges[rank]
        ask = padding.voted(lambda *_, **__: pytest.fail("vLLM's own was asked"))
        return ask(None, has_unfinished=bool(works[rank]), pending_pause=bool(pauses[rank]))

    # vLLM: the sum of the works is above 0, or that of the pauses no multiple of the ranks.
    expected = (sum(works) > 0 or sum(pauses) % RANKS != 0, sum(pauses) == RANKS)
    assert by_rank(call) == [expected] * RANKS


def test_where_the_worker_is_another_process_vllms_own_vote_is_asked() -> None:
    def ask(group: str, *, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:
        assert group == "group"
        return has_unfinished, pending_pause

    asked = padding.voted(ask)

    assert asked("group", has_unfinished=True, pending_pause=False) == (True, False)
