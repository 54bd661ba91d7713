"""docs/configuration.md shows settings that the programs take."""

import re
import shlex
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from services.cli.stack_config import PROGRAMS, StackConfig, programs
from services.cli.up import plan_of
from services.worker.start import check_engine_settings
from splitwave.engine.vllm.config import VllmGroupSettings
from splitwave.runtime.config import ProcessConfig, check_complete, load
from splitwave.runtime.worker import WorkerConfig

PAGE = (Path(__file__).parents[2] / "docs/configuration.md").read_text(encoding="utf-8")


def part(title: str) -> str:
    """What stands below a heading."""
    found = re.search(rf"^## {title}$(.*?)^## ", PAGE, re.M | re.S)
    assert found is not None, title
    return found[1]


def block(title: str, language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", part(title), re.S)
    assert found is not None, title
    return found[1]


def default(value: object) -> str:
    """A default as the tables have it."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "none" if value is None else f"`{value}`" if value != "" else "empty"


def test_each_setting_of_vllms_engines_is_listed_with_its_default() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", part("Settings of engines"), re.M))
    own = {item.name: default(item.default) for item in fields(VllmGroupSettings)
           if item.default is not MISSING}  # fmt: skip

    assert listed == own


def test_the_stack_that_is_shown_can_be_started(tmp_path: Path) -> None:
    file = tmp_path / "stack.toml"
    file.write_text(block("A local stack", "toml"))

    config, sources = load(StackConfig, "up", ["--config", str(file)], {})

    assert programs(config, sources, plan_of(config, tmp_path)).keys() == PROGRAMS.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_that_are_shown_alone_take_their_flags(name: str) -> None:
    commands = block("The programs alone", "sh").replace("\\\n", " ").splitlines()
    words = next(shlex.split(line) for line in commands if line.startswith(f"splitwave {name} "))

    config, sources = load(PROGRAMS[name], name, words[2:], {})

    assert isinstance(config, ProcessConfig)
    check_complete(config, sources)
    if isinstance(config, WorkerConfig):
        check_engine_settings(config, sources)
