"""The battery's report: one JSON file with all that was seen, one HTML page for people."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any  # JSON

from splitwave.certify.battery.bench import Subject
from splitwave.certify.battery.run import Result
from splitwave.certify.battery.scale import Scale
from splitwave.certify.battery.soak import curves
from splitwave.certify.battery.svg import Curve, plot
from splitwave.core.evidence import Check
from splitwave.core.fingerprint import Fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one battery did to one subject."""

    subject: Subject
    fingerprint: Fingerprint
    scale: Scale
    results: Sequence[Result]
    not_signed_for: str
    """Why there is no certificate; empty if there is one."""
    certificate_id: str
    cpu_s: float
    """CPU seconds of all processes of the battery."""
    made_at_s: float

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "mode": self.subject.mode.name,
            "role": self.subject.mode.role,
            "level": self.subject.level,
            "dtype": self.subject.dtype,
            "envelope": self.subject.envelope.to_json(),
            "fingerprint": dict(self.fingerprint.values),
            "fingerprint_digest": self.fingerprint.digest,
            "scale": asdict(self.scale),
            "checks": [result.to_json() for result in self.results],
            "certificate_id": self.certificate_id,
            "not_signed_for": self.not_signed_for,
            "cpu_s": round(self.cpu_s, 1),
            "made_at": datetime.fromtimestamp(self.made_at_s, UTC).isoformat(timespec="seconds"),
        }


def write(report: Report, directory: Path) -> tuple[Path, Path]:
    """Write both files; returns JSON's path and HTML's."""
    directory.mkdir(parents=True, exist_ok=True)
    as_json, as_html = directory / "report.json", directory / "report.html"
    value = report.to_json()
    as_json.write_text(json.dumps(value, indent=1) + "\n")
    as_html.write_text(page(value))
    return as_json, as_html


def page(value: Mapping[str, Any]) -> str:
    """The HTML page of a JSON report."""
    title = f"Battery of {value['mode']}, {value['level']}"
    if value["certificate_id"]:
        outcome = f"Signed: certificate {value['certificate_id']}."
    else:
        outcome = f"Not signed: {value['not_signed_for']}."
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{html.escape(title)}</h1>",
            f"<p class='{'good' if value['certificate_id'] else 'bad'}'>{html.escape(outcome)}</p>",
            f"<p>{html.escape(value['made_at'])}, {value['cpu_s']} CPU seconds, fingerprint"
            f" <code>{value['fingerprint_digest'][:16]}</code>.</p>",
            _checks(value["checks"]),
            *_plots(value["checks"]),
            "<h2>Envelope</h2>",
            _table(value["envelope"]),
            "<h2>Fingerprint</h2>",
            _table(value["fingerprint"]),
            "</body></html>\n",
        ]
    )


def _checks(checks: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for check in checks:
        evidence = check["evidence"]
        control = evidence["control"]
        caught = control is not None and control["was_caught"]
        rows.append(
            f"<tr class='{'good' if evidence['passed'] and caught else 'bad'}'>"
            f"<td>{html.escape(evidence['check'])}</td>"
            f"<td>{'passed' if evidence['passed'] else 'FAILED'}"
            f"{_said(check['problems'])}</td>"
            f"<td>{_figures(evidence['figures'])}</td>"
            f"<td>{'caught' if caught else 'NOT CAUGHT'}: "
            f"{html.escape(control['broken'] if control else 'no control ran')}"
            f"{_said(check['noticed'])}</td>"
            f"<td>{evidence['seconds']:.1f}</td><td>{evidence['replays']}</td></tr>"
        )
    head = "".join(
        f"<th>{name}</th>"
        for name in ("check", "verdict", "figures", "positive control", "seconds", "steps")
    )
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _said(problems: Sequence[str]) -> str:
    return "".join(f"<br><small>{html.escape(words)}</small>" for words in problems)


def _figures(figures: Mapping[str, Any]) -> str:
    return "<br>".join(html.escape(f"{name} {value}") for name, value in figures.items())


def _plots(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the soak: step time by size, over time, and memory."""
    soak = next((c["seen"] for c in checks if c["evidence"]["check"] == Check.SOAK), None)
    if not soak:
        return []
    found = curves(soak)
    return [
        "<h2>Soak</h2>",
        plot("CPU time a step by batch size", "tokens a step", "ms", [
            Curve(f"rank {rank}", [(float(size), 1e3 * s) for size, s in sizes.items()])
            for rank, sizes in enumerate(found["by_size"])
        ]),
        plot("CPU time a step of the commonest size", "share of the soak, %", "ms", [
            Curve(
                f"rank {rank}",
                [
                    ((place + 0.5) * 100.0 / len(parts), None if s is None else 1e3 * s)
                    for place, s in enumerate(parts)
                ],
            )
            for rank, parts in enumerate(found["over_time"])
        ]),
        plot("Memory of the processes", "share of the soak, %", "MiB", [
            Curve(
                f"rank {rank}",
                [(place * 100.0 / len(held), size / 2**20) for place, size in enumerate(held)],
            )
            for rank, held in enumerate(found["memory"])
        ]),
    ]  # fmt: skip


def _table(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(str(value))}</td></tr>"
        for name, value in values.items()
    )
    return f"<table>{rows}</table>"


_STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { border: 1px solid #ccc; padding: .3rem .5rem; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; }
small { color: #555; }
.good td:first-child, p.good { border-left: 4px solid #2ca02c; padding-left: .5rem; }
.bad td:first-child, p.bad { border-left: 4px solid #d62728; padding-left: .5rem; }
svg { width: 100%; max-width: 560px; display: block; margin: 1rem 0; font-size: 11px; }
.grid { stroke: #ddd; }
"""
