"""Tables for operators: the metrics and the settings of every service, from their declarations."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from services.cli.stack_config import PROGRAMS, StackConfig
from services.decode import metrics as decode
from services.prefill import metrics as prefill
from services.router import metrics as router
from services.worker.group_guard import GUARD_FAMILIES
from splitwave.runtime import tracing
from splitwave.runtime.config import flag, variable
from splitwave.runtime.engine_metrics import ENGINE_FAMILIES
from splitwave.runtime.metrics import PROCESS_FAMILIES, Family, Kind
from splitwave.runtime.wave_metrics import WAVE_FAMILIES

METRICS: Mapping[str, Sequence[Family]] = {
    "process": (*PROCESS_FAMILIES, *tracing.FAMILIES),
    "router": router.FAMILIES,
    "prefill": prefill.FAMILIES,
    "decode": decode.FAMILIES,
    "engine": ENGINE_FAMILIES,
    "group": GUARD_FAMILIES,
    "waves": WAVE_FAMILIES,
}
"""Declared families by who exports them: every process, one service, or every worker."""

SETTINGS = {**PROGRAMS, "up": StackConfig}
"""Settings by service."""


def metric_rows(families: Iterable[Family]) -> list[list[str]]:
    """Name, kind, labels, meaning."""
    return [[f"`{_name(x)}`", x.kind.value, ", ".join(x.labels), x.means] for x in families]


def _name(family: Family) -> str:
    return family.name if family.kind is Kind.HISTOGRAM else family.samples[0]


def setting_rows(service: str) -> list[list[str]]:
    """Name in the file, flag, variable, default, meaning."""
    rows = []
    for item in dataclasses.fields(SETTINGS[service]):
        words = str(item.metadata["help"]).replace("|", "\\|")
        if choices := item.metadata.get("choices"):
            words += f"; one of {', '.join(choices)}"
        rows.append([f"`{item.name}`", f"`{flag(item.name)}`",
                     f"`{variable(service, item.name)}`", _default(item), words])  # fmt: skip
    return rows


def _default(item: "dataclasses.Field[object]") -> str:
    if item.default is dataclasses.MISSING:
        return "none"
    if isinstance(item.default, bool):
        return f"`{str(item.default).lower()}`"
    return f"`{item.default}`" if item.default != "" else "empty"
