"""What a battery certifies of a started group when nobody has written an envelope."""

from dataclasses import replace
from pathlib import Path

import pytest

from splitwave.certify.battery.campaign import Order, subject_of
from splitwave.certify.keys import SigningKey
from splitwave.core.evidence import Level
from splitwave.engine.port import GroupDescription, Role
from splitwave.engine.vllm.config import VllmGroupSettings

SETTINGS = VllmGroupSettings(
    role=Role.DECODE, mode="decode_graph_ht_tbo", model_path=Path("m"), served_model="m",
    group_id="g", epoch=1, log_dir=Path("logs"), ranks=2,
)  # fmt: skip
GROUP = GroupDescription(
    group_id="g", epoch=1, role=Role.DECODE, mode=SETTINGS.mode, model="m", ranks=2,
    block_size_tokens=32, blocks_per_rank=64, seats_per_rank=64, model_len_max_tokens=1024,
    batch_max_tokens=64, block_bytes=1, kv_layout="k", capture_grid=(32, 64),
)  # fmt: skip


def order(tmp_path: Path) -> Order:
    return Order(
        level=Level.FULL, settings={Role.DECODE: SETTINGS}, targets=(Role.DECODE,), out=tmp_path,
        certificates=tmp_path, key=SigningKey.generate(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "step_max_tokens", "floor"),
    [
        ("decode_graph_ht_tbo", 64, 32),
        ("decode_graph_ht_tbo", 16, 16),
        ("decode_graph_ht", 64, 0),
    ],
)
def test_the_floor_of_a_mode_is_certified_so_that_placement_knows_it(
    mode: str, step_max_tokens: int, floor: int, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, mode=mode)
    group = replace(GROUP, mode=mode, batch_max_tokens=step_max_tokens)

    envelope = subject_of(order(tmp_path), group, settings).envelope

    assert (envelope.step_min_tokens, envelope.step_max_tokens) == (floor, step_max_tokens)
