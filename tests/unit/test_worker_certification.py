"""What a worker does at its start with its group's fingerprint, certificates and self-check."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest

from services.decode.config import DecodeConfig
from services.worker import start as worker_start
from services.worker.certification import certify, check_steps, foresee
from services.worker.start import start_certified
from splitwave.certify.fingerprint import read_fingerprint, shape_of
from splitwave.certify.keys import sign_certificate
from splitwave.certify.store import write_file
from splitwave.certify.weights import WeightsCache
from splitwave.core.envelope import Envelope, Traffic
from splitwave.core.evidence import Level, required_checks
from splitwave.core.fingerprint import Fingerprint
from splitwave.core.mode import lookup
from splitwave.core.strict_json import Scalar
from splitwave.core.worker import RankCounters, Role
from splitwave.engine.sim import SimEngine, SimSettings, start_sim_group
from splitwave.runtime.config import BadSetting
from splitwave.runtime.serve import Uncertified
from tests.unit.certificates import DAY_S, KEY, certificate, evidence

MODE = "decode_cpu_eager"
SETTINGS = SimSettings(role=Role.DECODE, group_id="d", ranks=2)
T = TypeVar("T")


def sim(coroutine: Coroutine[None, None, T]) -> T:
    return asyncio.run(coroutine)


def envelope(engine: SimEngine) -> Envelope:
    shape = shape_of(engine.description)
    return Envelope(
        ranks=shape.ranks, step_max_tokens=shape.step_max_tokens, seats_max=shape.seats_per_rank,
        prompt_max_tokens=100, sequence_max_tokens=shape.sequence_max_tokens,
        traffic=Traffic(output_max_tokens=50),
    )  # fmt: skip


async def fingerprint_of(engine: SimEngine, tmp_path: Path) -> Fingerprint:
    return await read_fingerprint(engine, None, WeightsCache(tmp_path / "weights.json"))


def config_with(tmp_path: Path, **changes: object) -> DecodeConfig:
    """A decode worker that trusts KEY and looks for certificates in the directory."""
    trust = tmp_path / "trust"
    trust.mkdir(exist_ok=True)
    (trust / "key.pub.pem").write_bytes(KEY.public.to_pem())
    config = DecodeConfig(engine="sim", certificates=str(tmp_path), trust=str(trust))
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]  # settings by name


async def certified(
    engine: SimEngine, tmp_path: Path, values: dict[str, Scalar] | None = None
) -> None:
    """Write a smoke certificate: of this group, or of one with these values."""
    found = await fingerprint_of(engine, tmp_path)
    now_s = int(time.time())
    body = certificate(
        level=Level.SMOKE,
        mode=MODE,
        envelope=envelope(engine),
        fingerprint=found if values is None else Fingerprint(values),
        evidence=evidence(*required_checks(lookup(MODE), Level.SMOKE, ranks=2)),
        issued_at_s=now_s - 1,
        expires_at_s=now_s + DAY_S,
    )
    write_file(sign_certificate(body, KEY), tmp_path)


def test_a_group_with_a_certificate_that_fits_serves_within_its_envelope(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = await start_sim_group(SETTINGS)
        await certified(engine, tmp_path)
        found = await certify(engine, config_with(tmp_path))
        assert (found.level, found.refusal) == ("smoke", "")
        assert len(found.certificate_id) == 16
        assert found.envelope == envelope(engine)
        await engine.close()

    sim(scenario())


def test_a_group_tells_what_it_is_where_it_is_asked_to(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = await start_sim_group(SETTINGS)
        file = tmp_path / "fingerprint.json"
        asked = {"fingerprint_file": str(file), "allow_uncertified": True}
        await certify(engine, config_with(tmp_path, **asked))
        assert Fingerprint(json.loads(file.read_text())) == await fingerprint_of(engine, tmp_path)
        nowhere = {"fingerprint_file": str(tmp_path / "none" / "there")}
        with pytest.raises(BadSetting, match="fingerprint_file"):
            await certify(engine, config_with(tmp_path, **nowhere))
        await engine.close()

    sim(scenario())


def changed(value: Scalar) -> Scalar:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return "another"


def test_a_change_of_any_one_field_of_the_fingerprint_is_refused_by_its_name(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = await start_sim_group(SETTINGS)
        values = dict((await fingerprint_of(engine, tmp_path)).values)
        assert len(values) > 30
        for number, (name, value) in enumerate(values.items()):
            place = tmp_path / str(number)
            place.mkdir()
            await certified(engine, place, values | {name: changed(value)})
            with pytest.raises(Uncertified) as refused:
                await certify(engine, config_with(place))
            assert f"{name}: certified {changed(value)!r}, found {value!r}" in str(refused.value)
            assert refused.value.exit_code == 3
        await engine.close()

    sim(scenario())


def test_a_variable_that_nobody_knows_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = await start_sim_group(SETTINGS)
        await certified(engine, tmp_path)
        monkeypatch.setenv("NCCL_OF_NEXT_YEAR", "7")
        with pytest.raises(Uncertified, match=r"env\.NCCL_OF_NEXT_YEAR: certified not there"):
            await certify(engine, config_with(tmp_path))
        await engine.close()

    sim(scenario())


def test_a_group_that_is_told_to_serves_uncertified_and_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = await start_sim_group(SETTINGS)
        values = dict((await fingerprint_of(engine, tmp_path)).values)
        await certified(engine, tmp_path, values | {"sim.seats_per_rank": 1})
        found = await certify(engine, config_with(tmp_path, allow_uncertified=True))
        assert (found.certificate_id, found.envelope) == ("", None)
        assert "sim.seats_per_rank: certified 1, found 64" in found.refusal
        await engine.close()

    sim(scenario())


def test_without_any_certificate_the_refusal_says_which_settings_to_give(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = await start_sim_group(SETTINGS)
        with pytest.raises(Uncertified, match="give --certificates and --trust"):
            await certify(engine, DecodeConfig(engine="sim"))
        served = await certify(engine, DecodeConfig(engine="sim", allow_uncertified=True))
        assert served.refusal == "no certificate is given", "who serves needs no advice"
        with pytest.raises(Uncertified, match="there is no certificate for decode_cpu_eager"):
            await certify(engine, config_with(tmp_path))
        await engine.close()

    sim(scenario())


def test_a_trust_store_that_cannot_be_read_is_a_bad_setting(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = await start_sim_group(SETTINGS)
        with pytest.raises(BadSetting, match=r"trust: .*no directory"):
            await certify(engine, config_with(tmp_path, trust=str(tmp_path / "nowhere")))
        await engine.close()

    sim(scenario())


@pytest.mark.parametrize(
    ("kinds", "strange"), [({"eager": 3}, ""), ({"eager": 3, "odd": 1}, "odd")]
)
def test_the_boot_self_check_looks_at_what_has_run(kinds: dict[str, int], strange: str) -> None:
    rank = RankCounters(
        rank=1, steps_by_kind=kinds, dummy_steps=1, prefill_tokens_computed=0, pulls=0,
        bytes_pulled=0, leases_live=0, blocks_used=0,
    )  # fmt: skip
    if not strange:
        check_steps(MODE, [rank])
        return
    with pytest.raises(Uncertified, match="rank 1 has run 1 steps as odd"):
        check_steps(MODE, [rank])


def test_no_leave_to_serve_uncertified_helps_against_the_self_check() -> None:
    async def scenario() -> None:
        engine = await start_sim_group(dataclasses.replace(SETTINGS, step_kind="odd"))
        with pytest.raises(Uncertified, match="boot self-check"):
            await certify(engine, DecodeConfig(engine="sim", allow_uncertified=True))
        await engine.close()

    sim(scenario())


@pytest.mark.parametrize("model", ["an empty folder", "a file that cannot be read"])
def test_weights_that_cannot_be_read_leave_a_group_uncertified(tmp_path: Path, model: str) -> None:
    path = tmp_path / "model"
    path.mkdir()
    if model == "a file that cannot be read":
        (path / "model.safetensors").symlink_to("/proc/self/mem")  # Reading it fails for anybody.

    async def scenario() -> None:
        engine = await start_sim_group(SETTINGS)
        await certified(engine, tmp_path)
        config = config_with(tmp_path, engine="vllm", model_path=str(path))
        with pytest.raises(Uncertified, match="the model's files cannot be read"):
            await certify(engine, config)
        told = dataclasses.replace(config, fingerprint_file=str(tmp_path / "told.json"))
        with pytest.raises(Uncertified, match="the model's files cannot be read"):
            await certify(engine, told)
        found = await certify(engine, dataclasses.replace(config, allow_uncertified=True))
        assert found.certificate_id == ""
        assert found.refusal.startswith("the model's files cannot be read: ")
        await engine.close()

    sim(scenario())


EXPIRED_S = 10
UNSEEN = "x" * 300
"""A name that no file system takes: neither there nor not there, as what one may not see."""


def prepared(tmp_path: Path) -> None:
    """Everything that may be named wrongly, below the directory that `config_with` names."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "private").mkdir()
    KEY.save(tmp_path / "private" / "key.pem")
    (tmp_path / "no-key").mkdir()
    (tmp_path / "no-key" / "a.pem").write_text("a shopping list")
    (tmp_path / "list.txt").write_text("a shopping list")
    now_s = int(time.time())
    for name, mode, expires_at_s in (
        ("late", MODE, EXPIRED_S), ("other", "decode_cpu_compiled", now_s + DAY_S),
    ):  # fmt: skip
        body = certificate(
            level=Level.SMOKE, mode=mode, issued_at_s=1, expires_at_s=expires_at_s,
            evidence=evidence(*required_checks(lookup(mode), Level.SMOKE, ranks=2)),
        )  # fmt: skip
        write_file(sign_certificate(body, KEY), tmp_path / name)


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        ({"trust": "gone"}, 2, r"^trust: .*gone is no directory; put the public keys"),
        ({"trust": "list.txt"}, 2, "^trust: .*list.txt is no directory"),
        ({"trust": "empty"}, 2, r"^trust: .*empty holds no \*.pem"),
        ({"trust": "private"}, 2, "^trust: .*key.pem is a private key; take it out"),
        ({"trust": "no-key"}, 2, "^trust: .*a.pem holds no public key"),
        ({"trust": "gone", "certificates": ""}, 2, "^trust: .*gone is no directory"),
        ({"trust": UNSEEN}, 2, "^trust: .*x cannot be read: File name too long"),
        ({"certificates": UNSEEN}, 3, "none_found.*x: File name too long; name a certificate"),
        ({"fingerprint_file": UNSEEN}, 2, "^fingerprint_file: .*x: File name too long"),
        ({"certificates": "gone"}, 3, "none_found.*gone: No such file.*name a certificate"),
        ({"certificates": "empty"}, 3, "none_found.*there is no certificate for decode_cpu_eager"),
        ({"certificates": "list.txt"}, 3, "malformed.*list.txt"),
        ({"certificates": "private/key.pem"}, 3, "malformed.*key.pem"),
        ({"certificates": "late"}, 3, "expired"),
        ({"certificates": "other"}, 3, "wrong_mode.*for mode decode_cpu_compiled; this group"),
        ({"certificates": ""}, 3, "no certificate is given: give --certificates and --trust"),
        ({"fingerprint_file": "empty"}, 2, "^fingerprint_file: .*empty cannot be written; name"),
        ({"fingerprint_file": "gone/f.json"}, 2, "^fingerprint_file: .*gone/f.json cannot be"),
    ],
)
def test_a_path_that_cannot_do_is_told_before_the_engines_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str], code: int, said: str
) -> None:
    async def start(*_: object) -> NoReturn:
        raise AssertionError("the engines were started")

    monkeypatch.setattr(worker_start, "start_engine", start)
    prepared(tmp_path)
    named = {name: str(tmp_path / path) if path else "" for name, path in wrong.items()}

    with pytest.raises(BadSetting if code == 2 else Uncertified, match=said) as refused:
        sim(start_certified(config_with(tmp_path, **named), Role.DECODE))

    assert getattr(refused.value, "exit_code", 2) == code


def test_who_serves_uncertified_is_not_asked_for_certificates_that_are_there(
    tmp_path: Path,
) -> None:
    asked = {"certificates": str(tmp_path / "gone"), "allow_uncertified": True}

    foresee(config_with(tmp_path, **asked))
    foresee(DecodeConfig(engine="sim", allow_uncertified=True))
