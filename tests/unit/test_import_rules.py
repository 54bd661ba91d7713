"""The layers hold, and each rule that holds them can be broken."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Set
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import HAS_TORCH

ROOT = Path(__file__).parents[2]

PACKAGES = [
    "services.cli",
    "services.router",
    "services.prefill",
    "services.decode",
    "services.worker",
    "splitwave.certify",
    "splitwave.demo_model",
    "splitwave.engine",
    "splitwave.runtime",
    "splitwave.text",
    "splitwave.wire",
    "splitwave.v1alpha1",
    "splitwave.core",
]

CORE_MAY_IMPORT = {
    "abc", "bisect", "collections", "dataclasses", "decimal", "enum", "fractions", "functools",
    "hashlib", "heapq", "itertools", "json", "math", "operator", "re", "splitwave", "statistics",
    "string", "struct", "types", "typing",
}  # fmt: skip
"""What has no clock, no I/O, no loop and no chance in it."""

HEAVY = {"deep_ep", "nixl", "safetensors", "torch", "transformers", "vllm"}
"""What takes seconds to import, or is not there on every machine."""

PROVIDERS = packages_distributions()

MAY_IMPORT_HEAVY = ("splitwave.engine.vllm", "splitwave.demo_model")


def lint_imports(root: Path) -> str:
    """Check the tree at `root` by the project's contracts; return the verdicts, one a line."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo", "--config",
         str(ROOT / "pyproject.toml")],
        cwd=root, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(root)},
    )  # fmt: skip
    return done.stdout + done.stderr


def module_name(path: Path) -> str:
    """Return the dotted name of a file of the tree."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def sources(*packages: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each module below the packages, with the top names of what it imports."""
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield module_name(path), {name.partition(".")[0] for name in imported(path)}


def test_the_tree_keeps_every_contract() -> None:
    verdicts = lint_imports(ROOT)

    assert " 0 broken." in verdicts, verdicts


@pytest.mark.parametrize(
    ("importer", "imports", "contract"),
    [
        ("splitwave.core", "splitwave.wire", "layers"),
        ("splitwave.wire", "splitwave.engine", "layers"),
        ("splitwave.engine", "splitwave.runtime", "layers"),
        ("splitwave.runtime", "services.router", "layers"),
        ("services.router", "services.decode", "layers"),
        ("services.decode", "services.prefill", "layers"),
        ("services.prefill", "services.cli", "layers"),
        ("services.worker", "services.decode", "layers"),
        ("splitwave.certify", "services.worker", "layers"),
        ("splitwave.core", "asyncio", "core is pure"),
        ("splitwave.core", "grpc", "core is pure"),
        ("splitwave.engine", "grpc", "the engine does not know the wire"),
        ("splitwave.engine", "splitwave.wire", "the engine does not know the wire"),
        ("services.router", "splitwave.engine", "the router runs without an engine"),
        ("services.router", "torch", "the router runs without an engine"),
        ("services.router", "splitwave.v1alpha1", "generated code stays at the edge"),
        ("splitwave.runtime", "splitwave.v1alpha1", "generated code stays at the edge"),
    ],
)
def test_a_contract_can_be_broken(
    tmp_path: Path, importer: str, imports: str, contract: str
) -> None:
    for package in PACKAGES:
        folder = tmp_path / package.replace(".", "/")
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder.parent / "__init__.py").write_text("")
    (tmp_path / importer.replace(".", "/") / "culprit.py").write_text(f"import {imports}\n")

    verdicts = lint_imports(tmp_path)

    assert f"{contract} BROKEN" in verdicts, verdicts


def test_core_takes_only_pure_parts_of_the_standard_library() -> None:
    strays = {name: found - CORE_MAY_IMPORT for name, found in sources("splitwave/core")}

    assert {name: found for name, found in strays.items() if found} == {}


def test_only_the_adapter_and_the_demo_model_know_torch_and_vllm() -> None:
    heavy = {name: found & HEAVY for name, found in sources("splitwave", "services")}

    assert {n: f for n, f in heavy.items() if f and not n.startswith(MAY_IMPORT_HEAVY)} == {}


def undeclared(found: set[str], declared: Set[str]) -> set[str]:
    """Return the imported names that belong to no declared dependency."""
    ours = {"services", "splitwave"} | sys.stdlib_module_names
    return {
        name
        for name in found - ours
        if not {canonicalize_name(owner) for owner in PROVIDERS.get(name, [])} & declared
    }


def test_what_is_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    extras = {
        place: core | {canonicalize_name(Requirement(line).name) for line in extra}
        for places, extra in (
            (MAY_IMPORT_HEAVY, project["optional-dependencies"]["cpu"]),
            (("services.router.vllm_engine",), project["optional-dependencies"]["smg"]),
        )
        for place in places
    }

    stray = {
        name: undeclared(
            found - HEAVY, next((x for p, x in extras.items() if name.startswith(p)), core)
        )
        for name, found in sources("splitwave", "services")
        if HAS_TORCH or not name.startswith(MAY_IMPORT_HEAVY)
    }

    assert {name: found for name, found in stray.items() if found} == {}
    assert undeclared({"yaml", "grpc", "asyncio"}, core) == {"yaml"}


def test_an_import_inside_a_function_is_seen(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden.py"
    hidden.write_text("def f():\n    import torch.nn\n    from vllm.v1 import engine\n")

    assert list(imported(hidden)) == ["torch.nn", "vllm.v1"]
