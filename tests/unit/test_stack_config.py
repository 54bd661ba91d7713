"""Settings of a local stack: one schema for flags, environment and file, printed whole."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.cli.stack_config import PROGRAMS, StackConfig, whole_stack_toml
from services.cli.up import main, plan_of
from splitwave.runtime.config import ConfigError, load
from tests.unit.test_adapter_config import MODEL


def printed(*flags: str, environ: Mapping[str, str] | None = None) -> str:
    config, sources = load(StackConfig, "up", flags, environ or {})
    return whole_stack_toml(config, sources, plan_of(config, Path("run")))


def test_the_printed_stack_starts_the_same_one(tmp_path: Path) -> None:
    first = printed(
        "--engine=sim", "--decode-ranks=4", "--decode-setting", "seats_per_rank=8",
        "--router", "live_max=12", "--prefill", "engine_settings.blocks_per_rank=999",
    )  # fmt: skip
    path = tmp_path / "stack.toml"
    path.write_text(first)

    assert tomllib.loads(printed(f"--config={path}")) == tomllib.loads(first)


def test_each_program_has_its_table_with_what_it_is_given() -> None:
    whole = tomllib.loads(printed("--engine=sim", "--router", "live_max=12", "--http-port=18080"))

    assert PROGRAMS.keys() <= whole.keys()
    assert whole["http_port"] == 18080
    assert whole["router"]["http_listen"] == "127.0.0.1:18080"
    assert whole["router"]["live_max"] == 12
    assert whole["router"]["decode"] == whole["decode"]["listen"]
    assert whole["decode"]["engine_settings"]["ranks"] == "2"


def test_flags_win_over_the_environment_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "stack.toml"
    path.write_text('engine = "sim"\ndecode_ranks = 3\ngrpc_port = 1000\n[router]\nlive_max = 5\n')
    environ = {"SPLITWAVE_UP_CONFIG": str(path), "SPLITWAVE_UP_DECODE_RANKS": "4"}

    text = printed("--grpc-port=2000", environ=environ)

    whole = tomllib.loads(text)
    assert (whole["decode_ranks"], whole["grpc_port"]) == (4, 2000)
    assert whole["router"]["live_max"] == 5
    assert "decode_ranks = 4  # environment SPLITWAVE_UP_DECODE_RANKS" in text


def test_metrics_ports_are_the_workers() -> None:
    whole = tomllib.loads(printed("--engine=sim", "--metrics-port=9201"))

    assert whole["prefill"]["metrics_listen"] == "127.0.0.1:9201"
    assert whole["decode"]["metrics_listen"] == "127.0.0.1:9202"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--router", "live_max=0"], ["router.live_max", "is 0", "1 or more"]),
        (["--decode", "colour=red"], ["decode.colour: unknown (flag --decode); known", "epoch"]),
        (["--decode", "config=x.toml"], ["decode.config: unknown"]),
        (["--router", "live_max=x"], ["router.live_max", "(flag --router)"]),
        (
            ["--decode-setting", "nope=3"],
            ["decode.engine_settings: nope: unknown (splitwave up, flag --decode-setting); known"],
        ),
        (["--prefill", "engine_settings.ranks=x"], ["prefill.engine_settings: ranks", "prefill)"]),
        (["--decode-setting", "ranks=4"], ["decode_setting", "is 4 here", "set decode_ranks"]),
        (["--prefill", "engine_settings.ranks=3"], ["prefill: is", "set prefill_ranks instead"]),
        (["--decode-ranks=0"], ["decode_ranks", "1 or more"]),
        (["--decode-ranks=100000"], ["decode_ranks: is 100000; set it to 1 or more, 4096 at most"]),
        (["--http-port=0"], ["http_port", "a port"]),
        (["--engine=x"], ["engine", "vllm, sim"]),
        (["--ready-timeout-s=inf"], ["ready_timeout_s: is 'inf'; write a number"]),
        (["--ready-timeout-s=1e9"], ["ready_timeout_s: is 1000000000.0; set it to 1000000 at"]),
        (["--decode", f"grant_blocks={2**40}"], ["decode.grant_blocks", "2147483647 at most"]),
        (["--decode-setting", "seats_max=0"], ["decode.engine_settings: seats_max: is 0", "1 or"]),
        (["--prefill-setting", "start_timeout_s=-1"], ["start_timeout_s: is -1.0", "flag --pre"]),
        (["--prefill-setting", f"seats_max={2**30}"], ["seats_max: is 1073741824", "65536 at"]),
    ],
)
def test_what_cannot_work_is_named(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ConfigError, SystemExit)) as error:
        printed(*flags)

    said = str(error.value) + capsys.readouterr().err
    assert [word for word in words if word not in said] == []


def test_ranks_that_the_model_cannot_be_spread_over_are_named_with_their_flag(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    with pytest.raises(ConfigError, match=r"ranks: 3 does not divide .*--decode-ranks sets them"):
        printed(f"--model={tmp_path}", "--decode-ranks=3")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[router]\nnope = 1\n", "router.nope: unknown (file {path}); known are"),
        (
            '[router]\nlive_max = "x"\n',
            "router.live_max: is 'x'; write a whole number (file {path})",
        ),
        ("[decode_setting]\nnope = 1\n", "nope: unknown (splitwave up, file {path}); known are"),
    ],
)
def test_a_program_s_setting_in_a_file_is_named_with_the_file(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "stack.toml"
    path.write_text(text)

    with pytest.raises(ConfigError) as error:
        printed(f"--config={path}")

    assert said.format(path=path) in str(error.value)


def test_a_start_is_refused_for_a_program_s_setting_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--router", "nope=1"]) == 2
    assert "splitwave up: router.nope: unknown (flag --router)" in capsys.readouterr().err

    monkeypatch.setenv("SPLITWAVE_PREFILL_NOPE", "1")
    assert main([]) == 2
    said = capsys.readouterr().err
    assert "prefill.nope: unknown (environment SPLITWAVE_PREFILL_NOPE)" in said


def test_what_was_set_is_printed_with_where_it_stands() -> None:
    text = printed("--router", "live_max=12", "--decode-setting", "seats_max=8")

    assert "live_max = 12  # flag --router" in text
    assert "[decode.engine_settings]  # splitwave up, flag --decode-setting" in text
    assert 'http_listen = "127.0.0.1:8080"  # splitwave up' in text
