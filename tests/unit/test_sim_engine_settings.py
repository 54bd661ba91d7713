"""Settings of the simulator are checked where they are made."""

import re

import pytest

from splitwave.core.mode import lookup
from splitwave.engine.port import Role
from splitwave.engine.sim import RankDeath, RankPause, SimFaults, SimSettings


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"ranks": 0}, "SimSettings.ranks is 0: set it to at least 1"),
        ({"group_id": ""}, "SimSettings.group_id is '': give it a name"),
        ({"step_fixed_s": 0.0}, "SimSettings.step_fixed_s is 0.0: set it above 0"),
        ({"lease_ttl_s": -1.0}, "SimSettings.lease_ttl_s is -1.0: set it above 0"),
        ({"pull_fixed_s": -0.1}, "SimSettings.pull_fixed_s is -0.1: set it to 0 or more"),
        ({"eos_rate": 1.5}, "SimSettings.eos_rate is 1.5: set it to a share from 0 to 1"),
        (
            {"blocks_per_rank": 10, "model_len_max_tokens": 161},
            "SimSettings.model_len_max_tokens is 161: one request must fit a rank's 160 tokens",
        ),
        (
            {"batch_max_tokens": 63},
            "SimSettings.batch_max_tokens is 63: each of the 64 seats needs a token a step",
        ),
        (
            {"faults": SimFaults(death=RankDeath(rank=1, at_step=5))},
            "RankDeath.rank is 1: the group has ranks 0 to 0",
        ),
        (
            {"faults": SimFaults(pauses=(RankPause(rank=2, at_step=5, pause_s=1.0),))},
            "RankPause.rank is 2: the group has ranks 0 to 0",
        ),
    ],
    ids=str,
)
def test_a_bad_setting_is_named_with_its_fix(changed: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        SimSettings(role=Role.DECODE, **changed)  # type: ignore[arg-type]  # names a field


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"slow_step_rate": -0.1}, "SimFaults.slow_step_rate is -0.1: set it to a share"),
        ({"stale_pull_rate": 2.0}, "SimFaults.stale_pull_rate is 2.0: set it to a share"),
        ({"pull_delay_s": 0.0}, "SimFaults.pull_delay_s is 0.0: set it above 0"),
    ],
    ids=str,
)
def test_a_bad_fault_is_named_with_its_fix(changed: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        SimFaults(**changed)  # type: ignore[arg-type]  # names a field


def test_steps_of_scripted_faults_count_from_one() -> None:
    with pytest.raises(ValueError, match=r"RankDeath.at_step is 0: steps count from 1"):
        RankDeath(rank=0, at_step=0)
    with pytest.raises(ValueError, match=r"RankPause.pause_s is 0.0: set it to seconds above 0"):
        RankPause(rank=0, at_step=1, pause_s=0.0)


def test_the_layout_agrees_exactly_if_the_caches_do() -> None:
    prefill = SimSettings(role=Role.PREFILL, group_id="p", ranks=2)

    assert prefill.kv_layout == SimSettings(role=Role.DECODE, blocks_per_rank=512).kv_layout
    for other in (
        SimSettings(role=Role.DECODE, model="other"),
        SimSettings(role=Role.DECODE, model_seed=1),
        SimSettings(role=Role.DECODE, block_size_tokens=32),
        SimSettings(role=Role.DECODE, block_bytes=1),
    ):
        assert other.kv_layout != prefill.kv_layout


def test_the_description_speaks_in_the_loops_seconds() -> None:
    settings = SimSettings(role=Role.PREFILL, lease_ttl_s=30.0, time_scale=0.1, epoch=4)

    assert settings.description().lease_ttl_s == pytest.approx(3.0)
    assert settings.description().epoch == 4
    assert settings.description().versions == {"sim": "1"}
    assert SimSettings(role=Role.DECODE).description().lease_ttl_s == 0.0


@pytest.mark.parametrize("role", Role)
def test_the_default_mode_is_one_of_its_role_and_names_its_steps(role: Role) -> None:
    settings = SimSettings(role=role)

    mode = lookup(settings.description().mode)

    assert mode.role == role
    assert settings.step_kind in mode.step_kinds
