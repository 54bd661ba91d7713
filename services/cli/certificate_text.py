"""Certificates as lines of text."""

from collections.abc import Iterator
from datetime import UTC, datetime

from splitwave.core.certificate import Certificate, SignedCertificate
from splitwave.core.envelope import Envelope
from splitwave.core.evidence import Evidence
from splitwave.core.fingerprint import Fingerprint
from splitwave.core.strict_json import flatten


def described(certificate: Certificate, *, with_fingerprint: bool) -> Iterator[str]:
    """What a certificate says, one thing a line."""
    yield f"  {certificate.level} certificate {certificate.certificate_id}"
    yield f"  mode         {certificate.mode} ({certificate.role})"
    yield f"  signed by    key {certificate.key_id}"
    yield f"  valid        {_time(certificate.issued_at_s)} to {_time(certificate.expires_at_s)}"
    yield from _envelope(certificate.envelope)
    values = certificate.fingerprint.values
    yield f"  fingerprint  {certificate.fingerprint.digest[:16]} ({len(values)} values)"
    if with_fingerprint:
        yield from (f"    {name} = {values[name]!r}" for name in sorted(values))
    yield "  evidence"
    yield from map(_evidence, certificate.evidence)


def _envelope(envelope: Envelope) -> Iterator[str]:
    grid = envelope.capture_grid
    sizes = f"{len(grid)} sizes to {grid[-1]}" if grid else "any size (eager)"
    yield (
        f"  envelope     {envelope.ranks} ranks x {envelope.tensor_parallel}; a rank: "
        f"{envelope.seats_max} seats, steps of {envelope.step_min_tokens} to "
        f"{envelope.step_max_tokens} tokens, grid: {sizes}"
    )
    yield (
        f"               prompts to {envelope.prompt_max_tokens} tokens, outputs to "
        f"{envelope.traffic.output_max_tokens}, together to {envelope.sequence_max_tokens}"
    )
    yield f"               sampling: {', '.join(envelope.traffic.sampling) or 'greedy only'}"


def _evidence(item: Evidence) -> str:
    verdict = "passed" if item.passed else "FAILED"
    if item.control is None:
        control = "NO CONTROL"
    else:
        caught = "caught" if item.control.was_caught else "NOT CAUGHT"
        control = f"control {caught}: {item.control.broken}"
    return (
        f"    {item.check:<15} {verdict}  {item.seconds:8.1f} s  {item.replays:>8} steps  {control}"
    )


def _time(at_s: int) -> str:
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (OSError, OverflowError, ValueError):  # A file that nobody has judged may say anything.
        return f"{at_s} s since 1970"


def differing(
    first: SignedCertificate | Fingerprint, second: SignedCertificate | Fingerprint
) -> Iterator[str]:
    """By what two certificates, or a certificate and a fingerprint, differ; evidence left out."""
    if isinstance(first, SignedCertificate) and isinstance(second, SignedCertificate):
        yield from _bodies(first.certificate, second.certificate)
    for difference in _fingerprint(first).differences(_fingerprint(second)):
        one = repr(difference.certified) if difference.is_certified else "not there"
        other = repr(difference.found) if difference.is_found else "not there"
        yield f"{difference.name}: {one} | {other}"


def _bodies(first: Certificate, second: Certificate) -> Iterator[str]:
    one, other = (flatten(_compared(body)) for body in (first, second))
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name):
            yield f"{name}: {one.get(name, 'not there')} | {other.get(name, 'not there')}"


def _compared(body: Certificate) -> dict[str, object]:
    return {
        "mode": body.mode,
        "role": body.role,
        "level": body.level.value,
        "envelope": body.envelope.to_json(),
    }


def _fingerprint(of: SignedCertificate | Fingerprint) -> Fingerprint:
    return of if isinstance(of, Fingerprint) else of.certificate.fingerprint
