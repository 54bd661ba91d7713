"""The fingerprint of a group: every rank, every setting, every variable that counts."""

import dataclasses
from pathlib import Path
from typing import Any  # a test's keywords

import pytest

from splitwave.certify.fingerprint import RanksDiffer, assemble, read_fingerprint, shape_of
from splitwave.certify.weights import WeightsCache
from splitwave.core.envelope import GroupShape
from splitwave.core.fingerprint import Fingerprint
from splitwave.engine.port import Role
from splitwave.engine.sim import RankDeath, SimFaults, SimSettings, start_sim_group
from splitwave.engine.sim.facts import fingerprint_facts

SETTINGS = SimSettings(role=Role.DECODE, ranks=2, seats_per_rank=4, batch_max_tokens=4)


def test_ranks_that_agree_make_one_table_with_the_weights() -> None:
    rank = {"env.NCCL_X": "1", "env.VLLM_HOST_IP": "10.0.0.1"}
    other = {"env.NCCL_X": "1", "env.VLLM_HOST_IP": "10.0.0.2"}

    found = assemble([rank, other], {"model.safetensors": "9f"})

    assert found.values == {"env.NCCL_X": "1", "weights.model.safetensors": "9f"}


def test_a_rank_that_runs_otherwise_is_named() -> None:
    with pytest.raises(RanksDiffer, match=r"rank 1 .*env\.NCCL_X is '2' there and '1' on rank 0"):
        assemble([{"env.NCCL_X": "1"}, {"env.NCCL_X": "2"}], {})


async def test_a_running_groups_fingerprint_has_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_NEVER_HEARD_OF", "on")
    (tmp_path / "model.safetensors").write_text("weights")
    engine = await start_sim_group(SETTINGS)
    try:
        found = await read_fingerprint(engine, tmp_path, WeightsCache(None))
        alone = await read_fingerprint(engine, None, WeightsCache(None))
        shape = shape_of(engine.description)
    finally:
        await engine.close()

    assert found.values["env.NCCL_NEVER_HEARD_OF"] == "on"
    assert [x.name for x in alone.differences(found)] == ["weights.model.safetensors"]
    assert shape == GroupShape(
        ranks=2, tensor_parallel=1, seats_per_rank=4, sequence_max_tokens=4096, step_max_tokens=4
    )


async def test_a_simulated_groups_grid_is_in_its_shape() -> None:
    engine = await start_sim_group(
        dataclasses.replace(SETTINGS, mode="decode_cpu_compiled", step_kind="compiled")
    )
    try:
        assert shape_of(engine.description).capture_grid == (1, 2, 3, 4)
    finally:
        await engine.close()


OTHER: dict[str, Any] = {
    "role": Role.PREFILL,
    "mode": "decode_cpu_compiled",
    "faults": SimFaults(death=RankDeath(rank=0, at_step=5)),
    "recites": b"x",
    "seats_per_rank": 3,
    "eos_rate": 0.5,
}
NEUTRAL = {"group_id", "epoch", "model"}
"""Ids and labels."""


def other(setting: dataclasses.Field[Any]) -> Any:  # of the setting's type
    value = getattr(SETTINGS, setting.name)
    if setting.name in OTHER:
        return OTHER[setting.name]
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
    pytest.fail(f"{setting.name} is new: say another value of it in OTHER")


@pytest.mark.parametrize("setting", dataclasses.fields(SimSettings), ids=lambda x: str(x.name))
def test_any_other_setting_of_a_simulated_group_is_named(
    setting: dataclasses.Field[Any],
) -> None:
    changed = dataclasses.replace(SETTINGS, **{setting.name: other(setting)})
    before, after = (assemble([fingerprint_facts(x, {})], {}) for x in (SETTINGS, changed))

    names = [difference.name for difference in before.differences(after)]

    if setting.name in NEUTRAL:
        assert names == []
    else:
        assert any(name.startswith(("sim.", "parallel.ranks")) for name in names)
        assert any(setting.name in name for name in names)


def test_versions_and_variables_of_a_simulated_group_count() -> None:
    def found(environ: dict[str, str]) -> Fingerprint:
        return assemble([fingerprint_facts(SETTINGS, environ)], {})

    bare = found({"HOME": "/", "SPLITWAVE_DECODE_LISTEN": "here"})

    assert bare.values["version.sim"] == "1"
    assert [str(x) for x in bare.differences(found({"NCCL_NEW": "7"}))] == [
        "env.NCCL_NEW: certified not there, found '7'"
    ]
