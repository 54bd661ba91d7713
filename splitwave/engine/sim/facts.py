"""What a simulated group says of itself for its fingerprint."""

import dataclasses
from collections.abc import Mapping

from splitwave.core.neutral import variables
from splitwave.core.strict_json import Scalar, flatten
from splitwave.engine.sim.settings import SimSettings


def fingerprint_facts(settings: SimSettings, environ: Mapping[str, str]) -> dict[str, Scalar]:
    """Every setting, faults among them, and the variables that count."""
    description = settings.description()
    return {
        **{f"version.{name}": version for name, version in description.versions.items()},
        "hardware.device": "simulated",
        "parallel.ranks": settings.ranks,
        "parallel.tensor_parallel": 1,
        **variables(environ),
        **flatten(dataclasses.asdict(settings) | {"recites": settings.recites.hex()}, "sim"),
    }
