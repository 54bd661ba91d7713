"""What a start checks before it forks, and how it tells the end of what it forked."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any  # In place of a process.

import pytest

from splitwave.engine.port import Role
from splitwave.engine.vllm import launch
from splitwave.engine.vllm.config import SettingsError, VllmGroupSettings
from splitwave.engine.vllm.launch import check_ports


def settings(port: int) -> VllmGroupSettings:
    return VllmGroupSettings(
        role=Role.DECODE,
        mode="decode_cpu_eager",
        model_path=Path(),
        served_model="m",
        group_id="g",
        epoch=1,
        log_dir=Path(),
        ranks=2,
        side_channel_port=port,
    )


def test_a_taken_port_is_named_with_its_rank() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(SettingsError, match=f"side_channel_port: rank 1 .*:{port} "):
            check_ports(settings(port - 1))


def test_free_ports_pass() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    check_ports(settings(port))


class Ended:
    """A process whose status another thread reads: it is known after some looks."""

    def __init__(self, *looks: int | None) -> None:
        self._looks = [*looks]

    def join(self, timeout: float) -> None:
        assert timeout > 0

    @property
    def exitcode(self) -> int | None:
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        ((1,), "exited with status 1"),
        ((None, None, 1), "exited with status 1"),
        ((None, -9), "was killed by SIGKILL"),
        ((None,), "has ended, and nobody has kept its status"),
    ],
)
def test_a_status_that_another_thread_reads_is_waited_for(
    looks: Sequence[int | None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "STATUS_WAIT_S", 0.1)
    process: Any = Ended(*looks)

    assert launch._how_it_ended(process) == told  # noqa: SLF001  # the rest needs engines
