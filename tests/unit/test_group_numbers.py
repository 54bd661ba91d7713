"""Numbers of a group of vLLM engines that no group could have: told with no vLLM imported."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from splitwave.engine.launch import check_settings
from splitwave.engine.sim.settings import SimSettings
from splitwave.engine.vllm.config import SettingsError, VllmGroupSettings
from splitwave.engine.vllm.numbers import REACH
from splitwave.runtime.convert import BadValue, check_reach
from tests.unit.test_adapter_config import MODEL, settings

NUMBERS = (int, float, int | None, float | None)


def refused(model: Path, **changes: object) -> SettingsError:
    with pytest.raises(SettingsError) as error:
        check_settings(settings(model, **changes), {})
    return error.value


def test_every_number_of_a_group_has_its_reach() -> None:
    hints = get_type_hints(VllmGroupSettings)

    assert REACH.keys() == {name for name, kind in hints.items() if kind in NUMBERS}


@pytest.mark.parametrize("name", REACH)
def test_one_below_one_above_and_no_number_are_refused_by_name_without_the_model(
    name: str, tmp_path: Path
) -> None:
    least, most = REACH[name]

    for value in (least - 1, most * 2 + 1, float("nan")):
        error = refused(tmp_path / "not-there", **{name: value})
        assert error.field == name
        assert f"is {value}" in str(error)
        assert "at most" in str(error)


def test_what_the_model_does_not_allow_is_told_where_the_model_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    check_settings(settings(tmp_path), {})
    check_settings(settings(tmp_path / "not-there", ranks=3), {})
    assert refused(tmp_path, ranks=3).field == "ranks"


def test_caches_beyond_the_machines_memory_are_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    many = refused(tmp_path, seats_max=65536, batch_max_tokens=65536)
    large = refused(tmp_path, kv_cache_bytes=2**60)

    ranks = refused(tmp_path, ranks=50000, expert_parallel=False)

    assert (many.field, large.field) == ("seats_max", "kv_cache_bytes")
    assert ranks.field == "ranks"
    assert "this machine's memory" in str(ranks)


def test_numbers_are_checked_with_no_vllm_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    program = (
        "import sys\n"
        "from services.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "assert not {'vllm', 'torch'} & set(sys.modules), 'imported'\n"
        "sys.exit(code)\n"
    )
    for command in ("up", "certify"):
        words = [command, f"--model={tmp_path}", "--decode-setting", "seats_max=0"]
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            capture_output=True, text=True, check=False, env={"XDG_STATE_HOME": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith(
            f"splitwave {command}: decode.engine_settings: seats_max: is 0"
        )


def test_a_worker_tells_its_numbers_as_it_reads_its_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from services.decode.main import main

    flags = [f"--model-path={tmp_path}", "--engine-settings", "lease_ttl_s=0"]

    assert main(flags) == 2
    assert "engine_settings: lease_ttl_s: is 0" in capsys.readouterr().err


def test_the_reach_holds_every_default() -> None:
    for item in dataclasses.fields(VllmGroupSettings):
        if item.name in REACH and item.default not in (None, dataclasses.MISSING):
            least, most = REACH[item.name]
            assert least <= item.default <= most, item.name


def test_a_simulated_group_may_be_told_its_own_defaults() -> None:
    for item in dataclasses.fields(SimSettings):
        check_reach(item.name, item.default)

    check_reach("pull_bytes_per_s", 1e11)  # bench/workloads/split_sim.toml
    with pytest.raises(BadValue, match="1000000 at most"):
        check_reach("step_fixed_s", 1e11)
