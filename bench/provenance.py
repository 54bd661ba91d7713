"""Where a result comes from: code, command, versions and machine."""

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGUN_WITH = "provenance.json"
"""At the root of a copy that is no checkout: what it is a copy of."""
NOT_CODE = ":(exclude)bench/results"
"""Parts that run one after the other write there; no figure depends on it."""


def provenance(command: str, *, paths: list[str], packages: list[str]) -> dict[str, object]:
    """What must stand beside figures. `paths` is the code that they depend on."""
    copied = ROOT / BEGUN_WITH
    if copied.exists():
        known: dict[str, object] = json.loads(copied.read_text())
        return known | {"command": command}
    return {
        "command": command,
        "git_sha": git("rev-parse", "HEAD"),
        "git_dirty": bool(git("status", "--porcelain", "--", *paths, NOT_CODE)),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
    }


def note_copy(folder: Path, *, paths: list[str], packages: list[str]) -> None:
    """Write down what a folder is a copy of, so that results made there say so."""
    known = provenance("", paths=paths, packages=packages)
    (folder / BEGUN_WITH).write_text(json.dumps(known), encoding="utf-8")


def git(*arguments: str) -> str:
    """What git says in this repository; empty if it fails."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
