"""A virtual environment for each client, from its pinned packages, made when first asked for.

    python -m tests.clients.environments openai smg

They lie in `.clients/`, so that no client's dependencies meet the project's own.
"""

import fcntl
import hashlib
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PINS = Path(__file__).with_name("env")
HOME = ROOT / ".clients"
ALL = tuple(sorted(path.stem for path in PINS.glob("*.txt")))


class ClientFailed(Exception):
    """A client's environment cannot be made; the message says why."""


def client(name: str) -> Path:
    """The `bin` directory of a client's environment, installed if it is not yet.

    One process installs it; others wait.
    """
    pins = PINS / f"{name}.txt"
    if not pins.is_file():
        raise ClientFailed(f"{name}: no such client; there are {', '.join(ALL)}")
    stamp = hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()
    home = HOME / name
    HOME.mkdir(exist_ok=True)
    with (HOME / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = home / "installed"
        if not done.is_file() or done.read_text() != stamp:
            _install(name, home, pins)
            done.write_text(stamp)
    return home / "bin"


def version(name: str) -> str:
    """The pinned version of the package that a client is called after."""
    lines = (PINS / f"{name}.txt").read_text().replace("_", "-").lower().splitlines()
    packages = (name, f"{name}-bin")
    return next(line.split("==")[1] for line in lines if line.split("==")[0] in packages)


def _install(name: str, home: Path, pins: Path) -> None:
    began_s = time.monotonic()
    _run(name, [sys.executable, "-m", "venv", "--clear", str(home)])
    options = ["--quiet", "--no-deps", "--no-input", "--disable-pip-version-check"]
    _run(name, [str(home / "bin/python"), "-m", "pip", "install", *options, "-r", str(pins)])
    sys.stderr.write(f"  .clients/{name} ... {time.monotonic() - began_s:.0f} s\n")


def _run(name: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise ClientFailed(f"{name}: cannot be installed:\n{why}")


def main() -> int:
    """Install what is named, or everything."""
    try:
        for name in sys.argv[1:] or ALL:
            client(name)
    except ClientFailed as error:
        sys.stderr.write(f"clients: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
