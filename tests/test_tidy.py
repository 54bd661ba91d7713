"""Limits that reviewers would otherwise have to police by eye."""

import ast
import io
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 50
VAGUE = {"utils", "util", "common", "helpers", "helper", "misc", "base", "manager"}
TEST_FOLDERS = {"unit", "contract", "sim", "integration", "e2e", "chaos", "clients"}
TEST_FILES = {"__init__.py", "conftest.py", "fakes.py", "test_tidy.py"}
HOSTS = {
    "127.0.0.1", "0.0.0.0", "localhost", "example.com", "www.apache.org", "www.w3.org",
    "opentelemetry.io",
}  # fmt: skip
"""Hosts that a tracked file may name in a URL: the project is fetched from none."""


def tracked() -> list[Path]:
    """Return the files that git has or would add; a plain copy of the tree gives all of it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = sorted({ROOT / line for line in listed.stdout.splitlines()})
    return [path for path in paths if path.is_file()]


FILES = tracked()
TEXTS = [path for path in FILES if path.suffix not in {".binpb", ".png"}]
PYTHON = [path for path in FILES if path.suffix == ".py"]
SOURCES = [path for path in PYTHON if path.parent != ROOT / "splitwave/v1alpha1"]


def name(path: Path) -> str:
    """Name a file by its place in the tree."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_files_and_functions_fit_in_the_head(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= FILE_LINES_MAX
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{node.name} has {lines} lines"


def test_no_module_is_named_for_what_it_is_not_about() -> None:
    named = {part for path in SOURCES for part in path.relative_to(ROOT).with_suffix("").parts}

    assert named & VAGUE == set()


def unreasoned(text: str) -> Iterator[str]:
    """Yield lines that switch a check off, or import Any, and do not say why on the line."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            switch = re.match(r"#\s*(type:\s*ignore|noqa)\S*(.*)", token.string)
            if switch and not re.search(r"#\s*\w{3,}", switch[2]):
                yield token.line.strip()
    yield from re.findall(r"^from typing import [^#\n]*\bAny\b[^#\n]*$", text, re.M)
    yield from re.findall(r"^    Any,$", text, re.M)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_check_is_switched_off_only_with_a_reason(path: Path) -> None:
    assert list(unreasoned(path.read_text())) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("x = f()  # type: ignore[arg-type]", True),
        ("x = f()  # type: ignore[arg-type]  # the stub lacks it", False),
        ("import a  # noqa: F401", True),
        ("import a  # noqa: F401  # imported for its registration", False),
        ("from typing import Any", True),
        ("from typing import Any, Final", True),
        ("from typing import (\n    Any,\n    Final,\n)", True),
        ("from typing import Any  # JSON", False),
        ("from typing import Final", False),
    ],
)
def test_a_reason_is_told_from_none(line: str, found: bool) -> None:
    assert bool(list(unreasoned(line))) is found


MACHINE_PATH = re.compile(r"(?<![\w.*}])/(?:tmp/[A-Za-z]|work/|root/|opt/|home/\w)")
REGISTRY = re.compile(r"pythonhosted|\bpypi\.\w|index-url|\bregistry\.\w+\.\w", re.IGNORECASE)
URL_HOST = re.compile(r"https?://([A-Za-z0-9.-]+)")


def stray(text: str) -> set[str]:
    """Return paths of a machine and hosts that a fresh clone elsewhere would not have."""
    found = set(MACHINE_PATH.findall(text)) | set(REGISTRY.findall(text))
    return found | (set(URL_HOST.findall(text)) - HOSTS)


def test_no_file_names_a_machine_or_a_registry() -> None:
    here = Path(__file__)
    found = {name(p): stray(p.read_text()) for p in TEXTS if p != here}

    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("text", ["/opt/x", "a /home/me/x", "http://a.b.org/x", "index-url = y"])
def test_a_stray_name_is_found(text: str) -> None:
    assert stray(text)


def make_targets() -> set[str]:
    """Return the Makefile's targets for people: those with a `## ` text."""
    return set(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))


def test_each_make_target_is_documented() -> None:
    documents = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()

    undocumented = {t for t in make_targets() if not re.search(rf"make {t}\b(?!-)", documents)}

    assert undocumented == set()


def test_each_documented_make_target_exists() -> None:
    documents = [path for path in TEXTS if path.suffix == ".md"]
    named = {t for p in documents for t in re.findall(r"`make ([a-z0-9-]+)", p.read_text())}

    assert named - make_targets() == set()


def test_ci_runs_the_command_that_the_readme_gives() -> None:
    block = re.search(r"```\w*\n(make demo\nmake test)\n```", (ROOT / "README.md").read_text())

    assert block is not None, "README.md: one code block with `make demo` and `make test`"
    assert re.search(r"\bmake test$", (ROOT / ".ci/run").read_text(), re.M)


def test_each_folder_of_tests_is_known() -> None:
    tests = [path.relative_to(ROOT / "tests") for path in PYTHON if ROOT / "tests" in path.parents]

    strays = {p.name for p in tests if len(p.parts) == 1} - TEST_FILES

    assert {path.parts[0] for path in tests if len(path.parts) > 1} <= TEST_FOLDERS
    assert strays == set()


def test_each_part_of_the_tree_has_its_layer() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = " ".join(next(c for c in config["contracts"] if c["type"] == "layers")["layers"])
    inside = [
        p.relative_to(ROOT)
        for p in SOURCES
        if p.relative_to(ROOT).parts[0] in ("splitwave", "services")
    ]
    parts = {f"{p.parts[0]}.{Path(p.parts[1]).stem}" for p in inside} - {
        "splitwave.__init__",
        "services.__init__",
    }

    assert {part for part in parts if part not in re.findall(r"[\w.]+", layers)} == set()


def test_a_news_fragment_has_a_name_that_towncrier_reads() -> None:
    kinds = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    kind = "|".join(entry["directory"] for entry in kinds)
    named = re.compile(rf"(\d+|\+[\w-]+)\.({kind})(\.\d+)?\.md")
    fragments = [path.name for path in FILES if path.parent == ROOT / "changelog.d"]

    assert [fragment for fragment in fragments if not named.fullmatch(fragment)] == []
