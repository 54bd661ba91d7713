"""What a start checks before it forks."""

import socket
from pathlib import Path

import pytest

from splitwave.engine.port import Role
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
