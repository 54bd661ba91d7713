"""Serve with certificates: smoke ones are made where no certificate of this machine fits."""

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from services.cli.battery import run_battery, smoke, worker_configs
from services.cli.machine import Machine, default_home
from services.cli.plan import Plan
from services.cli.stack import (
    FIX,
    Report,
    StackFailed,
    check_memory,
    check_ports,
    demands_of,
)
from services.worker.certification import check_certificates, check_trust
from splitwave.certify.keys import BadKey
from splitwave.core.certificate import CertificateRefused
from splitwave.core.demands import RefusedGroup
from splitwave.core.evidence import Level
from splitwave.runtime.config import BadSetting, ConfigError

EXIT_REFUSED = 3
"""A worker's exit code when no certificate lets its group serve."""
T = TypeVar("T")


def machine() -> Machine:
    """What this user keeps of certificates on this machine."""
    return Machine(default_home())


async def serve_certified(
    plan: Plan, serve: Callable[[], Awaitable[T]], make: Callable[[], Awaitable[None]]
) -> T:
    """Serve; where no certificate fits the stack, `make` some and serve again.

    Only running engines know whether one fits, so a stack that may have one is started to see.
    Raises ConfigError before that for stores and certificates that no engines could serve with.
    """
    if plan.certificates is not None:
        # Certificates may lie here that another key signed; a worker without a trust store ends.
        _make_key()
    check_given(plan, os.environ)
    if plan.certificates is None:
        return await serve()
    if not machine().has_certificates():
        await make()
        return await serve()
    try:
        return await serve()
    except StackFailed as failed:
        if failed.code != EXIT_REFUSED:
            raise
    await make()
    return await serve()


def check_given(plan: Plan, environ: Mapping[str, str]) -> None:
    """Raise ConfigError, naming the setting, for keys and certificates of workers that cannot do.

    That this machine has no certificates yet is no error: those are made.
    """
    own = str(plan.certificates)
    for config in worker_configs(plan, environ):
        try:
            check_trust(config)
            if config.certificates not in ("", own):
                check_certificates(config)
        except BadSetting as error:
            raise ConfigError(f"{config.service}.{error}") from None
        except CertificateRefused as refused:
            raise ConfigError(f"{config.service}.certificates: {refused}") from None
    place = plan.certificates
    if place is not None and place.exists() and not place.is_dir():
        raise ConfigError(f"{own} is no directory; move it away: certificates are kept there")


def _make_key() -> None:
    try:
        machine().make_key()
    except BadKey as error:
        raise StackFailed("certify", str(error)) from error


async def make_smoke(plan: Plan, report: Report) -> None:
    """Run the smoke battery for both groups of a stack. Raises StackFailed if one is not signed."""
    # A stack that cannot start afterwards is told of now, and not after the battery.
    check_memory(plan)
    check_ports(plan)
    demands = demands_of(plan)
    if demands.level is not Level.SMOKE and not demands.allow_uncertified:
        why = f"no {demands.level} certificate fits this stack, and its router demands one"
        raise StackFailed("certify", f"{why}; {FIX[RefusedGroup.LEVEL]}")
    here = machine()
    _make_key()
    report("certify", "no certificate fits this stack; making smoke ones, once a machine")
    try:
        battery = smoke(plan, plan.run_dir / "certify", here.key, here.certificates)
    except ConfigError as error:
        raise StackFailed("certify", str(error)) from error
    code, told = await run_battery(battery, report)
    for subject in told:
        words = f"signed {subject['certificate']}" if subject["certificate"] else "not signed"
        report("certify", f"{subject['mode']}: {words}, {subject['cpu_s']:.0f} CPU seconds")
    if code:
        why = "; ".join(s["not_signed_for"] for s in told if s["not_signed_for"])
        log = battery.out / "battery.log"
        raise StackFailed(
            "certify",
            f"{why or 'the battery did not end'}; its log is {log}; `--certify off` serves"
            " without certificates",
        )
