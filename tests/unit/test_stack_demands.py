"""A stack whose router demands more than its groups can show says so, and makes nothing for it."""

import asyncio
from pathlib import Path

import pytest

from services.cli import certified
from services.cli.plan import Plan
from services.cli.stack import StackFailed, demands_of
from splitwave.core.evidence import Level


def plan(tmp_path: Path, *router: str) -> Plan:
    return Plan(
        model_path=tmp_path, served_model="m", run_dir=tmp_path, certificates=tmp_path,
        trust=tmp_path, worker_flags={"router": router},
    )  # fmt: skip


def test_the_demands_are_those_that_the_router_will_read(tmp_path: Path) -> None:
    assert demands_of(plan(tmp_path)).level is Level.SMOKE
    assert demands_of(plan(tmp_path, "--certificate-level=full")).level is Level.FULL
    assert demands_of(plan(tmp_path, "--allow-uncertified=true")).allow_uncertified


def test_no_smoke_certificates_are_made_for_a_router_that_demands_full_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certified, "check_ports", lambda plan: None)
    monkeypatch.setattr(certified, "check_memory", lambda plan: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    asked = plan(tmp_path, "--certificate-level=full")

    with pytest.raises(StackFailed, match=r"no full certificate fits .* `splitwave certify`"):
        asyncio.run(certified.make_smoke(asked, lambda who, what: None))
