"""Dashboard, alerts and their documentation speak of metrics that exist, and of each other."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # types-PyYAML is not worth a dependency

from scripts.operators_tables import METRICS
from splitwave.runtime.metrics import Family

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
DASHBOARD = ROOT / "deploy/grafana/splitwave.json"
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
PROMTOOL = shutil.which("promtool")

FAMILIES: dict[str, Family] = {
    sample: family
    for families in METRICS.values()
    for family in families
    for sample in family.samples
}
"""By the names that queries use."""
GIVEN = {"job", "instance", "le"}
"""Labels that Prometheus itself adds, or a histogram has."""
WORD = re.compile(r"(splitwave_\w+)(?:\{([^}]*)\})?")
LABELS = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


def rules() -> list[dict[str, str]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    made: list[dict[str, str]] = group["rules"]
    return made


def dashboard_queries() -> Iterator[tuple[str, str]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


QUERIES = [*dashboard_queries(), *((rule["alert"], rule["expr"]) for rule in rules())]


def faults(expression: str) -> Iterator[str]:
    """Yield what a query names that does not exist: metrics, and labels that none of its has."""
    known = set(GIVEN)
    for name, matchers in WORD.findall(expression):
        family = FAMILIES.get(name)
        if family is None:
            yield f"metric {name}"
            continue
        known |= set(family.labels)
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers):
            if label not in {*family.labels, *GIVEN}:
                yield f"label {label} of {name}"
    for labels in LABELS.findall(expression):
        yield from (f"label {x}" for x in re.findall(r"\w+", labels) if x not in known)


@pytest.mark.parametrize(("title", "expression"), QUERIES)
def test_a_query_names_what_is_exported(title: str, expression: str) -> None:
    assert list(faults(expression)) == [], title


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("rate(splitwave_router_tokens_total[5m])", ["metric splitwave_router_tokens_total"]),
        ('splitwave_router_workers{rank="0"}', ["label rank of splitwave_router_workers"]),
        ("sum by (rank) (splitwave_router_workers)", ["label rank"]),
        ('sum by (role, instance) (splitwave_router_workers{role=~"d.*"})', []),
        ("splitwave_router_ttft_seconds", ["metric splitwave_router_ttft_seconds"]),
    ],
)
def test_what_does_not_exist_is_found(expression: str, found: list[str]) -> None:
    assert list(faults(expression)) == found


def test_every_metric_has_one_name_and_says_what_it_means() -> None:
    declared = [family for families in METRICS.values() for family in families]

    assert len({family.name for family in declared}) == len(declared)
    for family in declared:
        assert re.fullmatch(r"splitwave_[a-z]+(_[a-z]+)+", family.name)
        assert not family.name.endswith(("_total", "_bucket", "_sum", "_count"))
        assert family.means.endswith(".")


def test_every_metric_that_the_document_names_exists() -> None:
    named = set(re.findall(r"splitwave_[a-z]+_[a-z_]+", OPERATIONS))

    assert named - FAMILIES.keys() - {family.name for family in FAMILIES.values()} == set()


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    sections = re.findall(r"^### (Splitwave\w+)$", OPERATIONS, re.M)

    assert sections == [rule["alert"] for rule in rules()]


def test_every_alert_links_to_its_section_and_has_a_severity_that_the_section_says() -> None:
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
        alert, severity = rule["alert"], rule["labels"]["severity"]
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{alert.lower()}"
        assert f"### {alert}\n**{severity}.** " in OPERATIONS, alert


def test_every_alert_is_made_to_fire_somewhere() -> None:
    fired = re.findall(r'alertname="(\w+)"', (ALERTS.parent / "alerts_test.yml").read_text())

    assert set(fired) == {rule["alert"] for rule in rules()}


@pytest.mark.skipif(PROMTOOL is None, reason="NOT RUN: no promtool here; it comes with Prometheus")
def test_alerts_fire_for_what_they_are_about_and_for_nothing_else() -> None:
    for words in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            [str(PROMTOOL), *words], cwd=ALERTS.parent, capture_output=True, text=True, timeout=50
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_panels_of_the_dashboard_lie_beside_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} over {taken.get((x, y))}"
                taken[x, y] = panel["title"]
