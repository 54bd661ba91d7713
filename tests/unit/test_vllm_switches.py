"""The environment switches of engine processes."""

import pytest

from splitwave.engine.vllm.switches import Fault, fault, fork_wanted, nixl_progress_thread_wanted


def test_nothing_is_switched_on_by_default() -> None:
    assert not fork_wanted({})
    assert nixl_progress_thread_wanted({})
    assert not any(fault(name, {}) for name in Fault)


def test_switches_are_read_from_the_environment() -> None:
    assert fork_wanted({"SPLITWAVE_FORK": "1"})
    assert not nixl_progress_thread_wanted({"SPLITWAVE_NIXL_PROGRESS_THREAD": "0"})


def test_faults_are_named_with_commas_between() -> None:
    environ = {"SPLITWAVE_FAULTS": "no_release, no_bytes"}

    assert [name for name in Fault if fault(name, environ)] == [Fault.NO_RELEASE, Fault.NO_BYTES]


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"SPLITWAVE_FAULTS names no_relase; it knows .*no_release"
    ):
        fault(Fault.NO_RELEASE, {"SPLITWAVE_FAULTS": "no_relase"})


def test_a_switch_that_is_neither_on_nor_off_is_refused() -> None:
    with pytest.raises(ValueError, match="SPLITWAVE_FORK is 'yes'; set it to 0 or 1"):
        fork_wanted({"SPLITWAVE_FORK": "yes"})
