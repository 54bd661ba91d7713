"""The wave simulation and the coordinator in it, compiled: a third of the time for each seed.

    python -m bench.wave_compiled FOLDER && cd FOLDER && python -m bench.wave_sim ...

mypyc makes C of the same files, in a folder of their own that later edits leave alone. Before
the folder is any use, the compiled code must do to some seeds exactly what the Python code does.
"""

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from bench.provenance import ROOT, note_copy
from bench.wave_progress import SOURCES
from tests.sim.wave.runner import run

COPIED = (
    *SOURCES,
    "splitwave/__init__.py",
    "splitwave/core/__init__.py",
    "tests/__init__.py",
    "tests/sim/__init__.py",
    "services/__init__.py",
    "services/cli/__init__.py",
    "services/cli/tether.py",
    "bench/__init__.py",
    "bench/provenance.py",
    "bench/wave*.py",
    "pyproject.toml",
)
LEFT_AS_IT_IS = {"__init__", "__main__", "mutants", "runner", "stock", "words"}
"""Of the simulation: what is not run, seldom runs, or has classes that mypyc cannot compile."""
COMPARED = 200
_COUNT = f"""
import json, sys
from dataclasses import asdict
from tests.sim.wave import world
from tests.sim.wave.runner import run
assert not world.__file__.endswith(".py"), "nothing is compiled"
json.dump(asdict(run(range({COMPARED}))), sys.stdout, default=str)
"""


def main() -> int:
    """Copy, compile and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    copy(folder)
    compile_there(folder)
    differs = difference(folder)
    if differs:
        sys.stderr.write(f"compiled and interpreted differ in {differs}: {folder} is of no use\n")
        return 1
    sys.stderr.write(f"{COMPARED} seeds run the same compiled as interpreted\n")
    return 0


def copy(folder: Path) -> None:
    """Copy what the simulation needs, and write down what it is."""
    for path in (path for pattern in COPIED for path in ROOT.glob(pattern)):
        there = folder / path.relative_to(ROOT)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, there)
    note_copy(folder, paths=[*SOURCES], packages=["mypy"])


def compile_there(folder: Path) -> None:
    """Compile in the folder; the extension modules lie beside their sources."""
    modules = [
        str(path.relative_to(ROOT))
        for path in (path for pattern in SOURCES for path in sorted(ROOT.glob(pattern)))
        if path.stem not in LEFT_AS_IT_IS
    ]
    subprocess.run([sys.executable, "-m", "mypyc", *modules], cwd=folder, check=True)


def difference(folder: Path) -> list[str]:
    """Names of the figures that some seeds have otherwise here than there."""
    command = [sys.executable, "-c", _COUNT]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    there = json.loads(done.stdout)
    here = json.loads(json.dumps(asdict(run(range(COMPARED))), default=str))
    return [name for name in here if name != "cpu_s" and here[name] != there[name]]


if __name__ == "__main__":
    sys.exit(main())
