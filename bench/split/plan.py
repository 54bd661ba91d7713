"""What a call would run, in words: cells, commands, devices, time."""

import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.split.cells import Chosen, wanted
from bench.split.devices import check
from bench.split.programs import Place, launch
from bench.split.settings import Comparison, SettingsError, SystemSettings


def text(comparison: Comparison, engine: str, chosen: Chosen, gpus: Sequence[str]) -> str:
    """The plan of all that is asked for."""
    parts = [f"{comparison.name}: {comparison.words}", f"engines: {engine}"]
    if engine == "sim":
        parts.append("simulated engines: a timing model, no performance claim")
    total_s = total_max_s = 0.0
    for system in comparison.systems:
        cells = wanted(comparison, system, chosen)
        if not cells:
            continue
        each = [comparison.times_of(cell.shape) for cell in cells]
        took_s = comparison.times.boot_s + sum(times.cell_s for times in each)
        total_s += took_s
        total_max_s += comparison.times.ready_s + sum(times.cell_max_s for times in each)
        parts += ["", f"{system.name}: {system.words}", *_groups(system)]
        parts += _commands(comparison, system, engine, gpus)
        parts.append(f"  {len(cells)} cells, about {took_s:.0f} s with its start:")
        parts += [f"    {cell.name}" for cell in cells]
    parts += ["", f"all: about {total_s / 60:.0f} minutes, {total_max_s / 60:.0f} at most"]
    return "\n".join(parts)


def _groups(system: SystemSettings) -> list[str]:
    return [
        f"  {group.role}: DP={len(group.devices)} on GPUs {', '.join(map(str, group.devices))},"
        f" {group.seats} seats a rank, {group.batch_tokens} tokens a step"
        + (f", mode {group.mode}" if group.mode else "")
        for group in system.groups
    ]


def _commands(
    comparison: Comparison, system: SystemSettings, engine: str, gpus: Sequence[str]
) -> list[str]:
    """Commands as they would be; with fewer GPUs than are needed, by the numbers of the file."""
    try:
        check([system], gpus)
        found = tuple(gpus)
    except SettingsError:
        found = tuple(str(index) for index in range(max(system.devices) + 1))
    with tempfile.TemporaryDirectory() as folder:
        place = Place(
            engine=engine, model_path=Path("MODEL_DIR"), model="MODEL", run_dir=Path(folder),
            gpus=found,
        )  # fmt: skip
        launched = launch(comparison, system, place)
    lines = []
    for program in launched.programs:
        env = "".join(f"{name}={shlex.quote(value)} " for name, value in program.env.items())
        words = shlex.join(program.command).replace(sys.executable, "python")
        lines.append(f"  $ {env}{words}".replace(folder, "RUN_DIR"))
    return lines
