"""Which GPUs there are, and whether they are enough."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.split.settings import SettingsError, SystemSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"


def present(environ: Mapping[str, str] | None = None, dev: Path = Path("/dev")) -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name, in order: all GPUs, or those it names now."""
    environ = os.environ if environ is None else environ
    if VISIBLE in environ:
        return [part.strip() for part in environ[VISIBLE].split(",") if part.strip()]
    return [str(index) for index in range(len(list(dev.glob("nvidia[0-9]*"))))]


def check(systems: Sequence[SystemSettings], found: Sequence[str]) -> None:
    """Raise SettingsError, naming the system, if one needs a GPU that is not there."""
    for system in systems:
        needed = max(system.devices) + 1
        if needed > len(found):
            raise SettingsError(
                f"systems.{system.name}: its groups are on GPUs"
                f" {', '.join(map(str, system.devices))}, which takes {needed}; {len(found)} can be"
                " seen here. Use a machine that has them, name others in `devices`, or test with"
                " --engine sim"
            )


def visible(devices: Sequence[int], found: Sequence[str]) -> str:
    """CUDA_VISIBLE_DEVICES of a group."""
    return ",".join(found[device] for device in devices)
