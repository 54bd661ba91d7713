"""Run every benchmark, write its result, and renew docs/benchmarks.md: `make bench`.

    python -m bench.run [RESULT ...]

A benchmark that fails leaves its last result as it was, and the command fails in the end.
"""

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

from bench import report
from services.cli.up import build_model

RESULTS = Path(__file__).with_name("results")

COMMAND = re.compile(r"^    python -m (bench\.\w+)(.*?) > bench/results/(\w+)\.json$", re.M)


def commands() -> dict[str, list[str]]:
    """By result: the module that makes it and its arguments, as the script's own docstring says."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False) or ""
        for module, arguments, result in COMMAND.findall(words):
            found[result] = [module, *arguments.split()]
    return found


COMMANDS = commands()


def run(name: str) -> bool:
    """Make one result; True if it was made."""
    began_s = time.monotonic()
    print(f"{name} ...", flush=True)
    arguments = [str(_model()) if word == "MODEL_DIR" else word for word in COMMANDS[name]]
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(f"{name}: {time.monotonic() - began_s:.0f} s", flush=True)
    if done.returncode == 0:
        (RESULTS / f"{name}.json").write_text(done.stdout, encoding="utf-8")
    return done.returncode == 0


def _model() -> Path:
    """The tiny model's directory, for what is told to take one."""
    return build_model("tiny", lambda who, what: None)


def main() -> int:
    """Run what is named, or everything."""
    failed = [name for name in sys.argv[1:] or COMMANDS if not run(name)]
    report.main()
    if failed:
        print(f"bench: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
