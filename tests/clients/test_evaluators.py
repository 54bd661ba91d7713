"""Clients with large environments: `make clients-all` runs them, `make test` does not."""

import json
import re

from tests.clients.documented import Target, run
from tests.clients.environments import ROOT


def test_lm_eval_generates_and_compares_likelihoods(target: Target) -> None:
    said = run("lm-eval", target)

    rows = dict(re.findall(r"^\|(\w+)\s*\|Yaml.*?\|↑\s*\|\s*([\d.]+)\|", said, re.M))
    assert rows.keys() == {"capitals", "colours"}
    assert all(0.0 <= float(value) <= 1.0 for value in rows.values())


def test_aiperf(target: Target) -> None:
    run("aiperf", target)

    told = json.loads((ROOT / "build/aiperf/profile_export_aiperf.json").read_text())
    assert told["request_count"]["avg"] == 16
    assert told["output_sequence_length"]["avg"] == 16
    assert told["time_to_first_token"]["avg"] > 0
