"""A whole battery: boots the groups, runs every check of every subject, signs what was proved."""

import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from splitwave.certify.battery import limits, repeats, rig, sizes, soak, storms, tokens
from splitwave.certify.battery.bench import Bench, Check, Subject
from splitwave.certify.battery.cases import certified_features
from splitwave.certify.battery.plain import PlainOracle
from splitwave.certify.battery.report import Report, write
from splitwave.certify.battery.run import (
    Result,
    Say,
    State,
    run_checks,
    subject_digest,
    with_failed_runs,
)
from splitwave.certify.battery.scale import Scale, scale_for
from splitwave.certify.battery.verdict import CheckBroken
from splitwave.certify.fingerprint import read_fingerprint, shape_of
from splitwave.certify.keys import SigningKey, sign_certificate
from splitwave.certify.store import write_file
from splitwave.certify.weights import WeightsCache, default_cache_path
from splitwave.core.certificate import Certificate, CertificateRefused
from splitwave.core.envelope import Envelope, Traffic
from splitwave.core.evidence import Check as CheckName
from splitwave.core.evidence import Level, required_checks
from splitwave.core.fingerprint import Fingerprint
from splitwave.core.mode import lookup
from splitwave.core.worker import Role
from splitwave.engine.port import GroupDescription
from splitwave.engine.vllm.check import check as check_settings
from splitwave.engine.vllm.config import VllmGroupSettings
from splitwave.engine.vllm.launch import check_build
from splitwave.engine.vllm.switches import PROBE

CHECKS: Mapping[CheckName, Check] = {
    check.name: check
    for check in (
        tokens.Oracle(), tokens.TwoBoots(), tokens.PaddingPoison(), sizes.Grid(),
        sizes.RaggedHammer(), storms.WaveStorm(), storms.AbortStorm(), soak.Soak(),
        repeats.RepeatedLarge(), limits.OverEnvelope(),
    )
}  # fmt: skip
"""Checks on a rig. `accuracy` is the one that is not: it goes through a gateway."""

VALID_DAYS = 90
CONTROL_SHARE = 0.2
"""Of a soak's length that was asked for, the longest that its control takes."""
LONG_SOAK_S = 300.0
"""A soak from this length on has steps enough to compare tenths of it, whatever the model."""

Accuracy = Callable[[Subject, Fingerprint, Scale, Say], Awaitable[Result]]


class EnvelopeRefused(Exception):
    """The group cannot run what it is to be certified for. The message names the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be certified, and how."""

    level: Level
    settings: Mapping[Role, VllmGroupSettings]
    """Of both groups; a role that is not certified is there for the other's sake."""
    targets: Sequence[Role]
    envelopes: Mapping[Role, Envelope] = field(default_factory=dict)
    """By role; one that is left out is all that the group can run."""
    output_max_tokens: int | None = None
    """Longest output of envelopes that are left out; None: as long as a sequence lets it be. A
    full battery runs it to its end."""
    out: Path
    """State, reports and logs, a directory a mode."""
    certificates: Path
    """Where certificates are written."""
    key: SigningKey
    accuracy: Accuracy | None = None
    """Runs the accuracy check; None: it cannot be run here."""
    rescale: Callable[[Scale], Scale] = lambda scale: scale
    """Changes a scale that was asked for by hand, such as a longer soak."""
    leave_out: Sequence[CheckName] = ()
    """Checks that are not run; nothing is signed then."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One subject, and what has been found of it so far."""

    subject: Subject
    fingerprint: Fingerprint
    scale: Scale
    state: State
    results: list[Result] = field(default_factory=list)
    soak_min_s: float = 0.0
    """How long a certificate's soak lasts at least: as the level has it, whatever was asked for."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one subject."""

    report: Report
    html: Path
    certificate: Path | None


async def run(order: Order, say: Say) -> list[Outcome]:
    """Run the battery for each target. Raises SettingsError, EngineDied and CheckBroken.

    `splitwave.engine.vllm.start.preload` must have run, and gRPC must not have.
    """
    os.environ[PROBE] = "1"
    for settings in order.settings.values():
        check_build(check_settings(settings, os.environ))  # Both, before the first starts.
    trials = await _on_the_rig(order, say)
    for trial in trials:
        await _accuracy(order, trial, say)
    used_cpu_s = cpu_s()
    return [finish(order, trial, used_cpu_s) for trial in trials]


async def _on_the_rig(order: Order, say: Say) -> list[Trial]:
    """Boot both groups, and run every check of every target that needs no gateway."""
    standing, plain = await rig.boot(order.targets[0], dict(order.settings), say), PlainOracle()
    try:
        trials = []
        for role in order.targets:
            standing.role = role
            trials.append(await _checks(order, standing, plain, say))
        return trials
    finally:
        await standing.close()


async def _checks(order: Order, standing: rig.Rig, plain: PlainOracle, say: Say) -> Trial:
    settings = order.settings[standing.role]
    fingerprint = await fingerprint_of(standing, settings)
    weights_bytes = sum(f.stat().st_size for f in settings.model_path.glob("*.safetensors"))
    whole = scale_for(order.level, lookup(settings.mode).device, weights_bytes=weights_bytes)
    scale = order.rescale(whole)
    subject = subject_of(order, standing.target.description, settings)
    state = State(
        order.out / subject.mode.name / order.level, subject_digest(fingerprint, subject, scale)
    )
    bench = Bench(
        subject=subject,
        scale=scale,
        rig=standing,
        plain=plain.of(settings) if order.level is Level.FULL else None,
        reboot=lambda: _reboot(standing, settings, fingerprint, say),
    )
    checks = [CHECKS[name] for name in _names(order, subject, fingerprint) if name in CHECKS]
    results = await run_checks(checks, bench, state, say)
    return Trial(subject, fingerprint, scale, state, results, whole.soak_s)


def _names(order: Order, subject: Subject, fingerprint: Fingerprint) -> list[CheckName]:
    required = required_checks(
        subject.mode,
        order.level,
        ranks=subject.envelope.ranks,
        steps_together=fingerprint.steps_together,
    )
    return [name for name in required if name not in order.leave_out]


async def fingerprint_of(standing: rig.Rig, settings: VllmGroupSettings) -> Fingerprint:
    """The fingerprint of the group under test, as it will be when nobody may look into it.

    A group that serves with probing allowed has one more value, and does not match.
    """
    found = await read_fingerprint(
        standing.target.engine, settings.model_path, WeightsCache(default_cache_path())
    )
    return Fingerprint({k: v for k, v in found.values.items() if k != f"env.{PROBE}"})


def subject_of(order: Order, group: GroupDescription, settings: VllmGroupSettings) -> Subject:
    """What is certified of a started group. Raises EnvelopeRefused for what it cannot run."""
    shape, mode = shape_of(group), lookup(settings.mode)
    longest = shape.sequence_max_tokens - 1
    envelope = order.envelopes.get(group.role) or Envelope(
        ranks=shape.ranks,
        tensor_parallel=shape.tensor_parallel,
        capture_grid=shape.capture_grid,
        step_min_tokens=min(mode.step_min_tokens, shape.step_max_tokens),
        step_max_tokens=shape.step_max_tokens,
        seats_max=shape.seats_per_rank,
        prompt_max_tokens=longest,
        sequence_max_tokens=shape.sequence_max_tokens,
        traffic=Traffic(
            output_max_tokens=min(longest, order.output_max_tokens or longest),
            sampling=certified_features(),
        ),
    )
    if (outside := envelope.refuse_group(shape)) is not None:
        raise EnvelopeRefused(str(outside))
    if unproved := sorted(set(envelope.traffic.sampling) - set(certified_features())):
        words = f"traffic.sampling: no check runs {unproved[0]}; those that run: "
        raise EnvelopeRefused(words + ", ".join(certified_features()))
    return Subject(
        mode=mode,
        level=order.level,
        envelope=envelope,
        dtype=settings.dtype,
        block_size_tokens=settings.block_size_tokens,
    )


async def _reboot(
    standing: rig.Rig, settings: VllmGroupSettings, fingerprint: Fingerprint, say: Say
) -> None:
    """Start the group under test anew; CheckBroken if it is not the same any more."""
    await standing.reboot(settings, say)
    again = await fingerprint_of(standing, settings)
    if differences := fingerprint.differences(again):
        raise CheckBroken(f"the second boot runs otherwise: {differences[0]}")


async def _accuracy(order: Order, trial: Trial, say: Say) -> None:
    """The accuracy check, if the level has it and it can be run here."""
    names = _names(order, trial.subject, trial.fingerprint)
    if CheckName.ACCURACY not in names or order.accuracy is None:
        return
    if (result := trial.state.load(CheckName.ACCURACY)) is None:
        failed = trial.state.failed_runs(CheckName.ACCURACY)
        result = await order.accuracy(trial.subject, trial.fingerprint, trial.scale, say)
        result = with_failed_runs(result, failed)
        trial.state.save(result)
    trial.results.append(result)


def finish(order: Order, trial: Trial, used_cpu_s: float) -> Outcome:
    """Sign what was proved, if it was, and write the report either way."""
    now_s, mode = int(time.time()), trial.subject.mode
    body = Certificate(
        level=order.level,
        mode=mode.name,
        role=mode.role,
        envelope=trial.subject.envelope,
        fingerprint=trial.fingerprint,
        evidence=tuple(result.evidence for result in trial.results),
        issued_at_s=now_s,
        expires_at_s=now_s + VALID_DAYS * 86400,
        key_id=order.key.public.key_id,
    )
    path = None
    try:
        signed = sign_certificate(body, order.key)
        why = _short_soak(trial)
        if not why:
            path = write_file(signed, order.certificates)
            trial.state.clear()
    except CertificateRefused as refused:
        why = str(refused)
    report = Report(
        subject=trial.subject,
        fingerprint=trial.fingerprint,
        scale=trial.scale,
        results=trial.results,
        not_signed_for=why,
        certificate_id="" if path is None else body.certificate_id,
        cpu_s=used_cpu_s,
        made_at_s=float(now_s),
    )
    _, as_html = write(report, order.out / mode.name / order.level)
    return Outcome(report, as_html, path)


def _short_soak(trial: Trial) -> str:
    """Why a soak proves less than certificates of the level promise; empty if it does not."""
    ran = any(result.evidence.check == CheckName.SOAK for result in trial.results)
    if not ran or trial.scale.soak_s >= trial.soak_min_s:
        return ""
    return (
        f"the soak was to last {trial.scale.soak_s:g} s; a {trial.subject.level} certificate's "
        f"lasts {trial.soak_min_s:g} s at least"
    )


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def with_soak(seconds: float | None) -> Callable[[Scale], Scale]:
    """A change of scale: a soak of this length, its control much shorter; None: no change."""

    def rescale(scale: Scale) -> Scale:
        if seconds is None:
            return scale
        control_s = min(scale.soak_control_s, CONTROL_SHARE * seconds)
        share = Scale().drift_share if seconds >= LONG_SOAK_S else scale.drift_share
        return replace(scale, soak_s=seconds, soak_control_s=control_s, drift_share=share)

    return rescale
