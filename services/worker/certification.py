"""May this group serve: its fingerprint as it runs, and a certificate that says so."""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from splitwave.certify.fingerprint import RanksDiffer, read_fingerprint, shape_of
from splitwave.certify.keys import BadKey, TrustStore, load_trust_store
from splitwave.certify.store import choose, foresee_any
from splitwave.certify.weights import WeightsCache, default_cache_path
from splitwave.core.certificate import CertificateRefused, SignedCertificate, Sought, Wanted
from splitwave.core.evidence import Level
from splitwave.core.fingerprint import Fingerprint
from splitwave.core.mode import lookup
from splitwave.core.worker import Certification, RankCounters
from splitwave.engine.port import Engine
from splitwave.runtime.config import BadSetting
from splitwave.runtime.serve import Uncertified
from splitwave.runtime.worker import WorkerConfig

log = logging.getLogger(__name__)

NONE_GIVEN = "no certificate is given"
REMEDY = "give --certificates and --trust, or --allow-uncertified true to serve without"
"""For whom it stops; a group that serves without one needs none."""


class NoFingerprint(Exception):
    """It cannot be said what the group runs with, so no certificate fits it."""


async def certify(engine: Engine, config: WorkerConfig) -> Certification:
    """What the group is certified for.

    Raises Uncertified with the first difference, unless the config allows to serve without: then
    the certification says why it has none. The boot self-check has no such leave.
    """
    check_steps(engine.description.mode, await engine.counters())
    if config.fingerprint_file:
        await _tell(engine, config)
    refusal = NONE_GIVEN
    if config.certificates:
        try:
            return _certification(await _choose(engine, config))
        except (CertificateRefused, NoFingerprint) as refused:
            refusal = str(refused)
    if not config.allow_uncertified:
        raise Uncertified(f"{refusal}: {REMEDY}" if refusal is NONE_GIVEN else refusal)
    log.warning("serving uncertified: %s", refusal)
    return Certification(refusal=refusal)


def foresee(config: WorkerConfig) -> None:
    """Tell before the engines start, which takes minutes, what will be wrong however they run.

    Raises BadSetting for a path that cannot be used, and Uncertified if no certificate can fit.
    """
    check_trust(config)
    _check_place(config)
    if config.allow_uncertified:
        return
    if not config.certificates:
        raise Uncertified(f"{NONE_GIVEN}: {REMEDY}")
    try:
        check_certificates(config)
    except CertificateRefused as refused:
        raise Uncertified(str(refused)) from refused


def check_trust(config: WorkerConfig) -> TrustStore | None:
    """The keys that count, or None if nobody named any. Raises BadSetting for what is no store."""
    if not config.trust:
        return None
    try:
        return load_trust_store(Path(config.trust))
    except BadKey as error:
        raise BadSetting("trust", str(error)) from error


def check_certificates(config: WorkerConfig) -> None:
    """Raise CertificateRefused if none of the given certificates can fit, whatever the engines."""
    trust = check_trust(config)
    assert trust is not None, "asked with a trust store only"
    mode = config.mode or f"{config.service}_cpu_eager"
    sought = Sought(mode=mode, role=config.service, level=Level.SMOKE)
    foresee_any(Path(config.certificates), sought, trust, time.time())


def _check_place(config: WorkerConfig) -> None:
    """Raise BadSetting if there can be no such file of the fingerprint."""
    path = Path(config.fingerprint_file)
    try:
        fits = not path.is_dir() and path.absolute().parent.is_dir()
    except OSError as error:
        raise BadSetting("fingerprint_file", f"{path}: {error.strerror}") from error
    if config.fingerprint_file and not fits:
        fix = "name a file in a directory that is there"
        raise BadSetting("fingerprint_file", f"{path} cannot be written; {fix}")


def check_steps(mode: str, counted: Sequence[RankCounters]) -> None:
    """The boot self-check: what has run so far, warm steps above all, is of the mode's kinds."""
    kinds = lookup(mode).step_kinds
    for rank in counted:
        if strange := sorted(set(rank.steps_by_kind) - set(kinds)):
            raise Uncertified(
                f"boot self-check: rank {rank.rank} has run {rank.steps_by_kind[strange[0]]} steps"
                f" as {strange[0]}; mode {mode} has {', '.join(sorted(kinds))}"
            )


async def _tell(engine: Engine, config: WorkerConfig) -> None:
    """Write what the engines are, so that somebody can compare it with what was certified."""
    try:
        found = await _fingerprint(engine, config)
    except NoFingerprint as error:
        raise Uncertified(str(error)) from error
    text = json.dumps(dict(found.values), indent=1, sort_keys=True)
    try:
        await asyncio.to_thread(Path(config.fingerprint_file).write_text, text)
    except OSError as error:
        raise BadSetting("fingerprint_file", str(error)) from error


async def _fingerprint(engine: Engine, config: WorkerConfig) -> Fingerprint:
    """Raises NoFingerprint."""
    model_path = Path(config.model_path) if config.engine == "vllm" else None
    try:
        return await read_fingerprint(engine, model_path, WeightsCache(default_cache_path()))
    except RanksDiffer as error:
        raise NoFingerprint(str(error)) from error
    except OSError as error:
        raise NoFingerprint(f"the model's files cannot be read: {error}") from error


async def _choose(engine: Engine, config: WorkerConfig) -> SignedCertificate:
    group = engine.description
    trust = check_trust(config)
    assert trust is not None, "asked with a trust store only"
    wanted = Wanted(
        mode=group.mode,
        role=group.role.value,
        fingerprint=await _fingerprint(engine, config),
        shape=shape_of(group),
        level=Level.SMOKE,  # Which level is enough for what is the routers' to say.
    )
    path, signed = choose(Path(config.certificates), wanted, trust, time.time())
    log.info("certified", extra={"certificate": str(path), "level": signed.certificate.level})
    return signed


def _certification(signed: SignedCertificate) -> Certification:
    body = signed.certificate
    return Certification(
        certificate_id=body.certificate_id, level=body.level.value, envelope=body.envelope
    )
