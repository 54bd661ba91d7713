"""Run a battery: `python -m splitwave.certify.battery ORDER.json`, as `splitwave certify` does.

A process of its own, since it forks engines: nothing of gRPC may have been imported here.
Progress goes to stderr, one line of JSON a subject to stdout. Exit codes: 0 all were signed, 1 one
was not, 2 for what cannot work.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any  # JSON

from splitwave.certify.accuracy.check import AccuracyCheck, Gateway
from splitwave.certify.accuracy.gateway import Command, stack_environment
from splitwave.certify.battery.campaign import (
    EnvelopeRefused,
    Order,
    Outcome,
    run,
    with_soak,
)
from splitwave.certify.battery.verdict import CheckBroken
from splitwave.certify.fingerprint import RanksDiffer
from splitwave.certify.keys import BadKey, load_signing_key
from splitwave.core.envelope import read_envelope
from splitwave.core.evidence import Check, Level
from splitwave.core.strict_json import JsonError
from splitwave.core.worker import Role
from splitwave.engine.port import EngineDied
from splitwave.engine.vllm.config import SettingsError, VllmGroupSettings
from splitwave.engine.vllm.start import preload
from splitwave.runtime.config import ConfigError, build

EXIT_NOT_SIGNED, EXIT_CANNOT = 1, 2
FIRST_EPOCH = 1


def main(arguments: Sequence[str]) -> int:
    """Read the order, run it, say what was signed."""
    began_s = time.monotonic()

    def say(words: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - began_s:6.1f}s] {words}\n")
        sys.stderr.flush()

    try:
        # First, since it takes the variables for the accuracy check's stacks as they are now.
        order = read_order(json.loads(Path(arguments[0]).read_text()))
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        say("importing vLLM")
        preload()
        outcomes = asyncio.run(run(order, say))
    except (BadKey, ConfigError, EnvelopeRefused, JsonError, SettingsError) as error:
        say(f"cannot certify: {error}")
        return EXIT_CANNOT
    except (CheckBroken, EngineDied, RanksDiffer, OSError) as error:
        say(f"the battery could not go on: {error}")
        return EXIT_NOT_SIGNED
    for outcome in outcomes:
        sys.stdout.write(json.dumps(told(outcome)) + "\n")
    return 0 if all(outcome.certificate for outcome in outcomes) else EXIT_NOT_SIGNED


def told(outcome: Outcome) -> dict[str, Any]:
    """What `splitwave certify` is told of one subject."""
    report = outcome.report
    return {
        "mode": report.subject.mode.name,
        "level": report.subject.level,
        "certificate": str(outcome.certificate or ""),
        "not_signed_for": report.not_signed_for,
        "envelope": report.subject.envelope.to_json(),
        "report": str(outcome.html),
        "cpu_s": round(report.cpu_s, 1),
        "checks": {result.evidence.check: result.evidence.passed for result in report.results},
    }


def read_order(value: Mapping[str, Any]) -> Order:
    """An order from its JSON, as `services.cli.certify` writes it."""
    settings = {Role(role): _settings(Role(role), group) for role, group in value["groups"].items()}
    envelopes = {
        Role(role): read_envelope(envelope, f"envelope of {role}")
        for role, envelope in value["envelopes"].items()
    }
    return Order(
        level=Level(value["level"]),
        settings=settings,
        targets=[Role(role) for role in value["targets"]],
        envelopes=envelopes,
        output_max_tokens=value["output_max_tokens"],
        out=Path(value["out"]),
        certificates=Path(value["certificates"]),
        key=load_signing_key(Path(value["key"])),
        accuracy=_accuracy(value, settings),
        rescale=with_soak(value["soak_s"]),
        leave_out=[Check(name) for name in value["leave_out"]],
    )


def _settings(role: Role, group: Mapping[str, Any]) -> VllmGroupSettings:
    """The settings that a worker of that role would make of the same words."""
    fixed: dict[str, object] = {
        "role": role,
        "mode": group["mode"],
        "model_path": Path(group["model_path"]),
        "served_model": group["served_model"],
        "group_id": f"{role}-0",
        "epoch": FIRST_EPOCH,
        "log_dir": Path(group["log_dir"]),
    }
    return build(VllmGroupSettings, group["engine_settings"], "engine_settings", fixed)


def _accuracy(
    value: Mapping[str, Any], settings: Mapping[Role, VllmGroupSettings]
) -> AccuracyCheck | None:
    gateway = value["gateway"]
    if gateway is None:
        return None
    return AccuracyCheck(
        settings=settings[Role.DECODE],
        gateway=Gateway(
            main=Command(**gateway["main"]),
            control=Command(**gateway["control"]),
            lm_eval_python=Path(gateway["lm_eval_python"]),
            gsm8k=Path(gateway["gsm8k"]),
        ),
        directory=Path(value["out"]) / "accuracy",
        environment=stack_environment(os.environ),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
