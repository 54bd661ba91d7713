"""Run every benchmark, write its result, and renew docs/benchmarks.md: `make bench`.

    python -m bench.run [--resume]
    python -m bench.run --only router_64 demo
    python -m bench.run --list

Each part has a time limit and says every few seconds how far it is; what it says itself goes to
stderr. A part that fails or is stopped leaves its last result as it was, and the command fails in
the end. `--resume` leaves out the parts whose results were made by the code as it is now.
"""

import argparse
import ast
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench import report
from bench.demo import children_cpu_s
from bench.provenance import ROOT, git
from services.cli.up import build_model

RESULTS = Path(__file__).with_name("results")

COMMAND = re.compile(r"^    python -m (bench\.\w+)(.*?) > bench/results/(\w+)\.json$", re.M)
LIMIT_S = 300.0
"""Of a part that is not named below."""
LIMITS_S = {
    "serving_demo": 900.0,
    "serving_tiny": 600.0,
    "demo": 600.0,
    "waves": 600.0,
    "cpu_modes": 900.0,
    "handoff_cpu": 600.0,
    "wave_sim": 5 * 3600.0,
}
APART = ("wave_sim",)
"""Parts that take hours: run by their name only."""
SAY_EVERY_S = 15.0
KILLED_S = 5.0
STOP_S = 60.0
"""How long a part that is stopped may take to end what it started."""


def commands() -> dict[str, list[str]]:
    """By result: the module that makes it and its arguments, as the script's own docstring says."""
    found: dict[str, list[str]] = {}
    here = Path(__file__).parent
    for path in sorted((*here.glob("*.py"), *here.glob("*/__init__.py"))):
        words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False) or ""
        for module, arguments, result in COMMAND.findall(words):
            found[result] = [module, *arguments.split()]
    return found


COMMANDS = commands()


@dataclass(frozen=True, slots=True)
class Part:
    """One result and how it is made."""

    name: str
    command: Sequence[str]
    limit_s: float
    result: Path

    @classmethod
    def of(cls, name: str) -> "Part":
        """The part that makes a result."""
        arguments = [str(_model()) if word == "MODEL_DIR" else word for word in COMMANDS[name]]
        command = [sys.executable, "-m", *arguments]
        return cls(name, command, LIMITS_S.get(name, LIMIT_S), RESULTS / f"{name}.json")

    def run(self, say: Callable[[str], None], say_every_s: float = SAY_EVERY_S) -> bool:
        """Make the result; True if it was made. The last one stays if not."""
        began_s, cpu_before_s = time.monotonic(), children_cpu_s()
        say(f"{self.name}: begun, {self.limit_s:.0f} s at most")
        with tempfile.TemporaryFile("w+") as out:
            process = subprocess.Popen(self.command, cwd=ROOT, stdout=out, preexec_fn=_hears)
            code = self._wait(process, began_s + self.limit_s, say, say_every_s)
            out.seek(0)
            made = out.read()
        took_s, cpu_s = time.monotonic() - began_s, children_cpu_s() - cpu_before_s
        say(f"{self.name}: {_ended(code)} after {took_s:.0f} s, {cpu_s:.0f} CPU seconds")
        if code != 0 or not _is_json(made):
            return False
        fresh = self.result.with_suffix(".new")
        fresh.write_text(made, encoding="utf-8")
        fresh.replace(self.result)
        return True

    def _wait(
        self,
        process: "subprocess.Popen[bytes]",
        until_s: float,
        say: Callable[[str], None],
        say_every_s: float,
    ) -> int | None:
        """Its exit code; None if its time was over, and then it and its children are gone."""
        began_s = time.monotonic()
        while (left_s := until_s - time.monotonic()) > 0.0:
            try:
                return process.wait(min(say_every_s, left_s))
            except subprocess.TimeoutExpired:
                say(f"{self.name}: {time.monotonic() - began_s:.0f} s")
            except BaseException:
                _stop(process)
                raise
        _stop(process)
        return None


def _hears() -> None:
    """Let an interrupt through: a shell has it ignored by what it starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt, so that it stops what it started; then end what is left of its family."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(family, timeout=STOP_S)
    for survivor in alive:
        survivor.kill()
    process.wait()
    psutil.wait_procs(alive, timeout=KILLED_S)  # The next part shall not share the machine.


def _ended(code: int | None) -> str:
    if code is None:
        return "stopped, its time was over,"
    return "done" if code == 0 else f"failed with {code}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def is_fresh(result: Path) -> bool:
    """True if the code as it is now has made a result: nothing but results and pages changed."""
    if not result.is_file():
        return False
    told = json.loads(result.read_text(encoding="utf-8"))
    if told["git_dirty"]:
        return False
    paths = ("bench", "services", "splitwave", "requirements", ":(exclude)bench/results")
    return git("diff", "--stat", told["git_sha"], "--", *paths) == ""


def _model() -> Path:
    """The tiny model's directory, for what is told to take one."""
    return build_model("tiny", lambda who, what: None)


def chosen(only: Iterable[str] | None, *, resume: bool) -> list[str]:
    """Names of the parts to run. SystemExit, naming it, for one that is not there."""
    for name in only or ():
        if name not in COMMANDS:
            raise SystemExit(f"bench: {name}: no such part; there are {', '.join(COMMANDS)}")
    names = list(only) if only is not None else [x for x in COMMANDS if x not in APART]
    return [x for x in names if not (resume and is_fresh(RESULTS / f"{x}.json"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is named, or everything."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description="Run benchmarks.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these parts, in this order")
    parser.add_argument("--resume", action="store_true", help="leave out what is made already")
    parser.add_argument("--list", action="store_true", help="name the parts and their limits")
    args = parser.parse_args(arguments)
    if args.list:
        for name in COMMANDS:
            apart = ", by its name only" if name in APART else ""
            print(f"{name}: at most {LIMITS_S.get(name, LIMIT_S):.0f} s{apart}")
        return 0
    failed = []
    for name in chosen(args.only, resume=args.resume):
        if not Part.of(name).run(lambda line: print(line, flush=True)):
            failed.append(name)
        report.main()  # After each: what a later one does to it is then no matter.
    if failed:
        print(f"bench: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
