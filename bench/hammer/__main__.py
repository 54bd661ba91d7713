"""Hammer a transport on the GPUs of this machine and write what came of it.

    python -m bench.hammer --transport v2 --replays 50000 --out hammer_v2.json
    python -m bench.hammer --dry --sizes 8,16 --hidden 32 --experts 8 --topk 2 --replays 400

Exit codes: 0 passed, 1 wrong rows, 2 hang, 3 fault, 4 setup failed, 5 the time was over first.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from bench.hammer.parent import hammer
from bench.hammer.settings import parse
from bench.provenance import provenance
from splitwave.certify.hammer.verdict import EXIT_CODE


def main(arguments: list[str] | None = None) -> int:
    """Run, write the result, say the verdict."""
    settings = parse(arguments)
    source = origin(sys.argv[1:] if arguments is None else arguments)
    with tempfile.TemporaryDirectory(prefix="hammer", ignore_cleanup_errors=True) as folder:
        verdict, found = hammer(settings, Path(folder))
    report = found | {"settings": dataclasses.asdict(settings)} | source
    Path(settings.out).write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(f"{settings.transport} {verdict}: {found['why']}\n")
    sys.stdout.write(f"{found['replays']} replays, each pair {found['pair_min']} times or more, ")
    sys.stdout.write(f"{found['seconds']} s; written to {settings.out}\n")
    return EXIT_CODE[verdict]


def origin(arguments: list[str]) -> dict[str, object]:
    """Return where the result comes from; a machine without git knows only the command."""
    command = "python -m bench.hammer " + " ".join(arguments)
    try:
        return provenance(command, paths=["bench/hammer", "splitwave/certify/hammer"], packages=[])
    except OSError:
        return {"command": command}


if __name__ == "__main__":
    sys.exit(main())
