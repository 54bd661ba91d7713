"""Make one result of several results files, and compare their tokens.

    python -m bench.decode_modes.merge bench/results/gpu/decode_modes.json PART.json ...

Rows measured side by side write a file each. A row's later part replaces an earlier one, unless it
did not come to its end and the earlier one did. What only a failed row needs (ends of logs) is kept
for failed rows alone, and of a profile the kernels that take the most time.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any  # results are JSON

from bench.decode_modes.result import PhaseTokens, token_facts
from bench.decode_modes.rows import Row, kind_of
from bench.decode_modes.tokens import TokenFile
from bench.provenance import ROOT

KERNELS_KEPT = 80
LOG_CHARACTERS_KEPT = 3000
FACTS = ("command", "git_sha", "git_dirty", "python", "cpu", "cores", "gpus", "packages")


def merged(parts: Sequence[Path]) -> dict[str, Any]:
    """The result of all parts. ValueError if there is none."""
    rows: dict[str, Any] = {}
    tokens: dict[str, PhaseTokens] = {}
    runs: list[dict[str, Any]] = []
    for path in parts:
        told = json.loads(path.read_text(encoding="utf-8"))
        runs += told["runs"]
        for name, row in told["rows"].items():
            if name in rows and rows[name]["status"] == "done" != row["status"]:
                continue
            rows[name] = _trimmed(row)
            if found := TokenFile(path.with_suffix(".tokens.zip")).read(name):
                tokens[name] = found
    if not runs:
        raise ValueError("nothing to merge")
    for name, row in rows.items():
        if name in tokens:
            row |= token_facts(
                row["mode"], tokens[name], partial(_of, tokens, row["model"], kind_of(name))
            )
    facts = {fact: runs[-1].get(fact) for fact in FACTS}
    return _without_home(facts | {"runs": runs, "rows": rows})


def _without_home(result: dict[str, Any]) -> dict[str, Any]:
    """The result with paths below the repository as they are from its root."""
    cleared: dict[str, Any] = json.loads(json.dumps(result).replace(f"{ROOT}/", ""))
    return cleared


def _of(tokens: Mapping[str, PhaseTokens], model: str, kind: str, mode: str) -> PhaseTokens:
    return tokens.get(Row(model, mode, kind).name, {})


def _trimmed(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = dict(row)
    tails = kept.pop("log_tails", [])
    if row["status"] != "done":
        kept["log_tails"] = [tail[-LOG_CHARACTERS_KEPT:] for tail in tails]
    if "profiles" in row:
        kept["profiles"] = {
            name: profile | {"kernels": (profile["kernels"] or [])[:KERNELS_KEPT]}
            for name, profile in row["profiles"].items()
        }
    return kept


def main(arguments: Sequence[str]) -> int:
    """Write the merged result and say what is in it."""
    if len(arguments) < 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    out = Path(arguments[0])
    result = merged([Path(part) for part in arguments[1:]])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, row in sorted(result["rows"].items()):
        print(f"{name}: {row['status']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
