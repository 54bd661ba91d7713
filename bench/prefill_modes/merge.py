"""Join rows that ran side by side into one file, compared with the row of whole steps.

python -m bench.prefill_modes.merge --out all.json --work-dir W row1.json row2.json ...
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any  # results are JSON

from bench.prefill_modes.rows import equal_share, first_tokens, rates_of
from bench.prefill_modes.variants import ratio_to_whole


def merged(parts: Sequence[Mapping[str, Any]], work_dir: Path) -> dict[str, Any]:
    """All rows; first tokens are read again, since `whole` may have ended after another row."""
    rows: dict[str, Any] = {}
    for part in parts:
        rows |= part["rows"]
    for name, row in rows.items():
        model = name.partition("/")[0]
        folder = work_dir / "rows"
        ours, whole = (
            first_tokens(folder / one) for one in (name.replace("/", "."), f"{model}.whole")
        )
        row["first_tokens_equal_to_whole"] = equal_share(ours, whole)
    models = sorted({name.partition("/")[0] for name in rows})
    return {
        "rows": rows,
        "runs": [run for part in parts for run in part.get("runs", [])],
        "ratio_to_whole": {model: ratio_to_whole(rates_of(rows, model)) for model in models},
    }


def main(arguments: Sequence[str]) -> int:
    """Merge what is there; 0 if every row is done."""
    made = argparse.ArgumentParser(prog="bench.prefill_modes.merge", description=__doc__)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--work-dir", type=Path, required=True)
    made.add_argument("parts", type=Path, nargs="+")
    asked = made.parse_args(arguments)
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in asked.parts if path.exists()]
    found = merged(parts, asked.work_dir)
    asked.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    missing = len(parts) < len(asked.parts)
    return 1 if missing or any(row["status"] != "done" for row in found["rows"].values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
