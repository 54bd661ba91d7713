"""Engines on GPUs are forked only from a process that has not touched CUDA."""

import ctypes
from typing import Any  # a C library

import pytest

from splitwave.engine.vllm import forking
from splitwave.engine.vllm.forking import driver_is_initialised, look, start_method
from splitwave.engine.vllm.switches import FORK

NOT_INITIALISED, NO_DEVICE, SUCCESS = 3, 100, 0


class Driver:
    """libcuda as far as we ask it."""

    def __init__(self, status: int) -> None:
        self.status = status

    def __call__(self, name: str) -> "Driver":
        assert name == "libcuda.so.1"
        return self

    def cuDeviceGetCount(self, count: Any) -> int:  # the driver's own name
        del count
        return self.status


def no_driver(name: str) -> Any:
    raise OSError(name)


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "_touched", False)


@pytest.mark.parametrize(
    ("status", "initialised"), [(NOT_INITIALISED, False), (SUCCESS, True), (NO_DEVICE, True)]
)
def test_the_driver_knows_whether_it_was_initialised(status: int, initialised: bool) -> None:
    assert driver_is_initialised(Driver(status)) is initialised


def test_where_there_is_no_driver_nothing_can_have_initialised_it() -> None:
    assert not driver_is_initialised(no_driver)
    assert start_method(no_driver) == "fork"


def test_engines_are_spawned_from_a_process_that_has_touched_cuda() -> None:
    assert start_method(Driver(NOT_INITIALISED)) == "fork"
    assert start_method(Driver(SUCCESS)) == "spawn"


def test_engines_are_spawned_if_that_is_asked_for() -> None:
    assert start_method(Driver(NOT_INITIALISED), {FORK: "0"}) == "spawn"
    assert start_method(Driver(NOT_INITIALISED), {FORK: "1"}) == "fork"


def test_what_a_parent_has_seen_is_known_to_its_child_whose_driver_says_nothing() -> None:
    look(Driver(SUCCESS))

    assert start_method(Driver(NOT_INITIALISED)) == "spawn"


def test_the_real_driver_is_not_initialised_by_looking() -> None:
    try:
        ctypes.CDLL(forking.LIBRARY)
    except OSError:
        pytest.skip("no NVIDIA driver here: cuDeviceGetCount itself was not asked")
    assert not driver_is_initialised()
    assert not driver_is_initialised(), "nor by having looked"
