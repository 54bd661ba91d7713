"""Settings of the simulator are checked where they are made."""

import dataclasses
import json
import re

import pytest

from splitwave.engine.port import Role
from splitwave.engine.sim import RankDeath, RankPause, SimFaults, SimSettings, settings_from_json


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


def test_settings_come_from_json() -> None:
    text = """{
      "ranks": 2, "lockstep": false, "group_id": "g", "step_fixed_s": 1, "model_seed": 3,
      "faults": {
        "seed": 4, "pull_delay_rate": 0.5, "death": {"rank": 1, "at_step": 9},
        "pauses": [{"rank": 0, "at_step": 2, "pause_s": 0.5}]
      }
    }"""

    assert settings_from_json(text, Role.DECODE) == SimSettings(
        role=Role.DECODE,
        ranks=2,
        lockstep=False,
        group_id="g",
        step_fixed_s=1.0,
        model_seed=3,
        faults=SimFaults(
            seed=4,
            pull_delay_rate=0.5,
            death=RankDeath(rank=1, at_step=9),
            pauses=(RankPause(rank=0, at_step=2, pause_s=0.5),),
        ),
    )
    assert settings_from_json("{}", Role.PREFILL) == SimSettings(role=Role.PREFILL)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "settings are not JSON: "),
        ("[]", "settings is []: it must be a JSON object"),
        ('{"role": "prefill"}', "settings.role is 'prefill', but this is a decode worker"),
        ('{"rank": 1}', "settings.rank is unknown: remove it or use one of batch_max_tokens, "),
        ('{"ranks": 1.5}', "settings.ranks is 1.5: it must be a whole number"),
        ('{"ranks": true}', "settings.ranks is True: it must be a whole number"),
        ('{"ranks": 0}', "SimSettings.ranks is 0: set it to at least 1"),
        ('{"lockstep": 1}', "settings.lockstep is 1: it must be true or false"),
        ('{"model": 1}', "settings.model is 1: it must be a string"),
        ('{"time_scale": "1"}', "settings.time_scale is '1': it must be a number"),
        ('{"faults": 1}', "settings.faults is 1: it must be a JSON object"),
        ('{"faults": {"sed": 1}}', "settings.faults.sed is unknown"),
        ('{"faults": {"pauses": {}}}', "settings.faults.pauses is {}: it must be a list"),
        ('{"faults": {"pauses": [{}]}}', "settings.faults.pauses[0]: "),
        ('{"faults": {"death": {"rank": 0}}}', "required keyword-only argument: 'at_step'"),
    ],
)
def test_bad_json_is_named_with_its_fix(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        settings_from_json(text, Role.DECODE)


def test_every_setting_can_be_read() -> None:
    defaults = dataclasses.asdict(SimSettings(role=Role.DECODE))

    assert settings_from_json(json.dumps(defaults), Role.DECODE) == SimSettings(role=Role.DECODE)
