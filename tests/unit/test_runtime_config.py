"""Settings: where they come from, which wins, and what is said of those that cannot work."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

import pytest

from services.decode import main as decode_main
from services.decode.config import DecodeConfig
from services.prefill import main as prefill_main
from services.prefill.config import PrefillConfig
from services.router import main as router_main
from splitwave.core.worker import Role
from splitwave.engine.sim import SimSettings
from splitwave.runtime.config import (
    ConfigError,
    ProcessConfig,
    build,
    load,
    require,
    setting,
    to_toml,
)
from splitwave.runtime.worker import make_group_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class PaintConfig(ProcessConfig):
    service: ClassVar[str] = "paint"

    coats: int = setting(2, "how many coats")
    thick_mm: float = setting(0.1, "how thick")
    glossy: bool = setting(False, "whether it shines")
    colour: str = setting("red", "its colour", choices=("red", "blue"))
    more: Mapping[str, str] = setting({}, "more by name")

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        require(self, "coats", self.coats >= 1, "set it to at least 1")


def loaded(
    *flags: str, environ: Mapping[str, str] | None = None
) -> tuple[PaintConfig, Mapping[str, str]]:
    """A config from flags and variables."""
    return load(PaintConfig, "paint", flags, environ or {})


def problem(*flags: str, environ: Mapping[str, str] | None = None) -> str:
    """What is said of settings that cannot work."""
    with pytest.raises(ConfigError) as error:
        loaded(*flags, environ=environ)
    return str(error.value)


def test_flags_win_over_the_environment_over_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "paint.toml"
    path.write_text('coats = 3\nthick_mm = 0.3\ncolour = "blue"\n')
    environ = {"SPLITWAVE_PAINT_COATS": "4", "SPLITWAVE_PAINT_THICK_MM": "0.4"}

    config, sources = loaded(f"--config={path}", "--coats=5", environ=environ)

    assert (config.coats, config.thick_mm, config.colour, config.glossy) == (
        5, 0.4, "blue", False,
    )  # fmt: skip
    assert sources == {
        "coats": "flag --coats",
        "thick_mm": "environment SPLITWAVE_PAINT_THICK_MM",
        "colour": f"file {path}",
    }


def test_tables_are_merged_over_all_sources_and_nested_names_get_dots(tmp_path: Path) -> None:
    path = tmp_path / "paint.toml"
    path.write_text("[more]\na = 1\nb = 2\n[more.deep]\nc = 3\n")
    environ = {"SPLITWAVE_PAINT_MORE": "b=20, d=4", "SPLITWAVE_PAINT_CONFIG": str(path)}

    config, _ = loaded("--more=d=40", "--more", "e=5", environ=environ)

    assert config.more == {"a": "1", "b": "20", "deep.c": "3", "d": "40", "e": "5"}


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        (["--coats=two"], {}, ["coats", "'two'", "a whole number", "flag --coats"]),
        (["--coats=0"], {}, ["coats", "is 0", "at least 1", "flag --coats"]),
        ([], {"SPLITWAVE_PAINT_GLOSSY": "maybe"}, ["glossy", "true or false", "environment"]),
        (["--colour=green"], {}, ["colour", "'green'", "red, blue"]),
        (["--more=a"], {}, ["more", "NAME=VALUE"]),
        (["--listen=nowhere"], {}, ["listen", "host:port", "flag --listen"]),
        (["--config=/no/such/file"], {}, ["config", "/no/such/file", "No such file"]),
    ],
)
def test_an_error_names_the_field_its_source_and_the_fix(
    flags: list[str], environ: dict[str, str], words: list[str]
) -> None:
    said = problem(*flags, environ=environ)

    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize(
    ("text", "word"), [("coat = 1", "known are"), ("coats = [1]", "whole number"), ("=", "TOML")]
)
def test_a_file_with_what_is_no_setting_is_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "paint.toml"
    path.write_text(text)

    assert word in problem(f"--config={path}")


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        ([], {"SPLITWAVE_PAINT_COAT": "3"}, ["coat: unknown", "environment SPLITWAVE_PAINT_COAT"]),
        ([], {"SPLITWAVE_PAINT_COATS_PORT": "3"}, ["coats_port: unknown"]),
        (["--coat=3"], {}, ["--coat: unknown (flag)", "--coats"]),
        (["--nope", "3"], {}, ["--nope: unknown (flag)"]),
        (["blue"], {}, ["'blue' is no setting", "--NAME VALUE"]),
    ],
)
def test_what_is_no_setting_is_refused_wherever_it_stands(
    flags: list[str], environ: dict[str, str], words: list[str]
) -> None:
    said = problem(*flags, environ=environ)

    assert [word for word in words if word not in said] == []


def test_variables_that_are_not_of_the_service_are_left_alone() -> None:
    links = {
        "SERVICE_HOST": "10.0.0.7",
        "SERVICE_PORT": "80",
        "SERVICE_PORT_HTTP": "80",
        "PORT": "tcp://10.0.0.7:80",
        "PORT_80_TCP": "tcp://10.0.0.7:80",
        "PORT_80_TCP_ADDR": "10.0.0.7",
        "HTTP_SERVICE_HOST": "10.0.0.8",
        "HTTP_PORT": "tcp://10.0.0.8:80",
    }
    environ = {f"SPLITWAVE_PAINT_{name}": value for name, value in links.items()}

    config, sources = loaded(environ={**environ, "SPLITWAVE_FAULTS": "x", "PAINT_COATS": "9"})

    assert (config, dict(sources)) == (PaintConfig(), {})


@pytest.mark.parametrize(
    ("run", "wanting"),
    [(router_main.main, "prefill"), (prefill_main.main, "model_path")],
    ids=["router", "prefill"],
)
def test_a_config_that_lacks_something_is_printed_with_what_it_lacks_and_not_run(
    run: Callable[[list[str]], int], wanting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--print-config"]) == 0
    printed = capsys.readouterr()
    assert f'{wanting} = ""  # default' in printed.out
    assert f"cannot start so: {wanting}: is ''" in printed.err

    assert run([]) == 2
    assert f": {wanting}: is ''" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "flags", "words"),
    [
        (router_main.main, ["--live-max=0"], "live_max: is 0"),
        (router_main.main, ["--prefill=nowhere"], "prefill: 'nowhere' is no worker address"),
        (decode_main.main, ["--engine-settings=nope=3"], "engine_settings: nope: unknown"),
        (decode_main.main, ["--engine-settings=ranks=x"], "engine_settings: ranks: is 'x'"),
        (decode_main.main, ["--mode=prefill_cpu_eager"], "mode: is 'prefill_cpu_eager'; name one"),
    ],
)
def test_what_is_set_and_cannot_work_is_not_printed(
    run: Callable[[list[str]], int],
    flags: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([*flags, "--print-config"]) == 2

    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.endswith(")\n") or "; known are " in printed.err
    assert printed.out == ""


def test_the_printed_config_can_be_read_back(tmp_path: Path) -> None:
    config, sources = loaded(
        "--coats=7",
        "--glossy=true",
        '--more=a="q\\',
    )
    path = tmp_path / "printed.toml"
    path.write_text(to_toml(config, sources))

    again, _ = loaded(f"--config={path}")

    assert again == config
    assert "coats = 7  # flag --coats" in path.read_text()


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    role: Role
    name: str
    path: Path | None = None
    inner: Inner = field(default_factory=Inner)


def test_a_dataclass_of_another_layer_is_built_from_texts() -> None:
    texts = {"role": "decode", "name": "n", "inner.depth": "3", "path": "x/y"}

    made = build(Outer, texts, "engine_settings", {})

    assert made == Outer(role=Role.DECODE, name="n", path=Path("x/y"), inner=Inner(depth=3))


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"nome": "n"}, ["nome", "unknown", "known are", "name"]),
        ({"role": "decode"}, ["role", "a setting of its own"]),
        ({}, ["name", "not set"]),
        ({"name": "n", "inner.deep": "1"}, ["deep", "unknown", "depth"]),
    ],
)
def test_what_cannot_be_built_is_said_by_name(texts: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        build(Outer, texts, "engine_settings", {"role": Role.DECODE})

    assert [word for word in words if word not in str(error.value)] == []


def test_group_settings_come_from_the_worker_s_own_and_the_engine_s() -> None:
    config = PrefillConfig(
        engine="sim",
        worker_id="p7",
        epoch=3,
        model="m",
        engine_settings={"ranks": "2", "faults.seed": "5"},
    )
    settings = make_group_settings(config, Role.PREFILL, SimSettings)

    assert isinstance(settings, SimSettings)
    assert (settings.group_id, settings.epoch, settings.model) == ("p7", 3, "m")
    assert (settings.ranks, settings.faults.seed) == (2, 5)
    assert settings.mode == "prefill_cpu_eager"


def test_an_epoch_that_is_not_set_grows_with_the_clock() -> None:
    made = [
        make_group_settings(DecodeConfig(engine="sim"), Role.DECODE, SimSettings) for _ in range(2)
    ]
    first, second = (x.epoch for x in made if isinstance(x, SimSettings))

    assert 1_700_000_000_000 < first <= second


def test_every_setting_of_a_worker_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in (PrefillConfig, DecodeConfig):
        with pytest.raises(SystemExit) as stopped:
            load(kind, kind.service, ["--help"], {})
        assert stopped.value.code == 0
        text = capsys.readouterr().out
        assert f"SPLITWAVE_{kind.service.upper()}_" in text
        assert text.count("(default:") == len(fields(kind))
