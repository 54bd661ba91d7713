"""The GPU as the hammer uses it, with a recorder in CUDA's place: order, joins, bounded looks."""

import contextlib
from collections.abc import Iterator
from typing import Any  # whatever CUDA is asked

import pytest
import torch

from bench.hammer import device
from bench.hammer.device import Cuda

said: list[str] = []


class Stream:
    made = 0

    def __init__(self, place: object = None) -> None:
        Stream.made += 1
        self.name = f"s{Stream.made}"

    def wait_stream(self, other: "Stream") -> None:
        said.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        said.append(f"{self.name} drained")


class Event:
    answers = True

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        said.append("event waited for")

    def query(self) -> bool:
        return Event.answers

    def elapsed_time(self, other: "Event") -> float:
        return 10.0


class CUDAGraph:
    def replay(self) -> None:
        said.append("replayed")


class Current:
    stream = Stream()

    @classmethod
    def set(cls, stream: Stream) -> None:
        cls.stream = stream
        said.append(f"on {stream.name}")


@contextlib.contextmanager
def graph(made: CUDAGraph, *, pool: object, capture_error_mode: str) -> Iterator[None]:
    said.append(f"capture in {pool}, {capture_error_mode}")
    yield
    said.append("captured")


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def unpinned(*shape: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return zeros(*shape, **options)

    fakes = {
        "Stream": Stream, "Event": Event, "CUDAGraph": CUDAGraph, "graph": graph,
        "set_stream": Current.set, "current_stream": lambda: Current.stream,
        "set_device": lambda rank: None, "get_device_name": lambda rank: f"GPU {rank}",
        "graph_pool_handle": lambda: "one pool", "synchronize": lambda: None,
        "_sleep": lambda cycles: said.append(f"spins {cycles}"),
        "device": lambda place: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "zeros", unpinned)
    monkeypatch.setattr(Stream, "made", 0)
    monkeypatch.setattr(Event, "answers", True)
    said.clear()


def test_graphs_share_a_pool_or_have_their_own() -> None:
    for pool, name in (("shared", "one pool"), ("own", "None")):
        gpu = Cuda(0, pool, one_channel=False)
        said.clear()
        replay = gpu.capture(lambda: said.append("the stack"))
        replay()

        assert said == [f"capture in {name}, thread_local", "the stack", "captured", "replayed"]


def test_two_lanes_fork_from_the_stream_and_join_it() -> None:
    gpu = Cuda(0, "own", one_channel=False)
    said.clear()
    first, second, join = gpu.lanes()
    first()
    with gpu.channel():
        said.append("work")
    second()
    join()

    assert said == [
        "s3 waits for s1", "s4 waits for s1", "on s3", "work", "on s4",
        "on s1", "s1 waits for s3", "s1 waits for s4",
    ]  # fmt: skip


def test_one_channel_carries_both_lanes_in_their_order() -> None:
    gpu = Cuda(0, "own", one_channel=True)
    first, second, _ = gpu.lanes()
    said.clear()
    for enter in (first, second):
        enter()
        with gpu.channel():
            said.append("collective")

    assert said == [
        "on s3", "s5 waits for s3", "on s5", "collective", "on s3", "s3 waits for s5",
        "on s4", "s5 waits for s4", "on s5", "collective", "on s4", "s4 waits for s5",
    ]  # fmt: skip


def test_a_look_at_a_stuck_gpu_ends_and_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "PEEK_S", 0.01)
    gpu = Cuda(0, "own", one_channel=False)
    marks = torch.tensor([7, 6, 3])
    assert gpu.peek(marks) == [7, 6, 3]

    Event.answers = False
    assert gpu.peek(marks) is None
    marks += 1
    assert gpu.peek(marks) is None
    Event.answers = True
    assert gpu.peek(marks) == [7, 6, 3]  # The copy that was under way, from before.
    assert gpu.peek(marks) == [8, 7, 4]


def test_a_spin_is_measured_in_this_gpus_cycles() -> None:
    gpu = Cuda(0, "own", one_channel=False)
    said.clear()
    gpu.spin(2.0)
    gpu.ticket()()
    gpu.drain()

    assert said == ["spins 4000000", "event waited for", "s1 drained"]
