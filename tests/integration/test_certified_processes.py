"""A worker's process serves by its certificate, or ends with 3 and names what is otherwise."""

import asyncio
import json
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from splitwave.certify.keys import sign_certificate
from splitwave.certify.store import write_file
from splitwave.core.envelope import Envelope, Traffic
from splitwave.core.evidence import Level, required_checks
from splitwave.core.fingerprint import Fingerprint
from splitwave.core.mode import lookup
from tests.integration.test_workers_processes import exit_of, started, until_serving
from tests.integration.worker_stack import free_port
from tests.unit.certificates import DAY_S, KEY, certificate, evidence

MODE = "decode_cpu_eager"
MUCH = 10**6
EVERYTHING = Envelope(
    ranks=2, step_max_tokens=MUCH, seats_max=MUCH, prompt_max_tokens=MUCH,
    sequence_max_tokens=MUCH, traffic=Traffic(output_max_tokens=MUCH),
)  # fmt: skip


def worker(
    address: str, *flags: str, **variables: str
) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """A simulated decode worker of two ranks that serves only if it is certified."""
    told = ("--engine-settings=ranks=2", f"--listen={address}", "--allow-uncertified=false")
    return started("decode", *told, *flags, **variables)


def sign(told: Path, place: Path) -> None:
    """Write a certificate for a group that told that it runs so, and trust its key."""
    now_s = int(time.time())
    body = certificate(
        level=Level.SMOKE,
        mode=MODE,
        envelope=EVERYTHING,
        fingerprint=Fingerprint(json.loads(told.read_text())),
        evidence=evidence(*required_checks(lookup(MODE), Level.SMOKE, ranks=2)),
        issued_at_s=now_s - 1,
        expires_at_s=now_s + DAY_S,
    )
    write_file(sign_certificate(body, KEY), place)
    (place / "key.pem").write_bytes(KEY.public.to_pem())


@pytest.fixture
async def flags(tmp_path: Path) -> list[str]:
    """What a worker is given that has a certificate, made of what such a worker says it runs."""
    told = tmp_path / "fingerprint.json"
    address = f"127.0.0.1:{free_port()}"
    async with worker(address, "--allow-uncertified=true", f"--fingerprint-file={told}"):
        await until_serving(address)
    await asyncio.to_thread(sign, told, tmp_path)
    return [f"--certificates={tmp_path}", f"--trust={tmp_path}"]


async def test_a_worker_that_runs_what_was_certified_serves(flags: list[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with worker(address, *flags):
        await until_serving(address)


async def test_one_variable_more_ends_it_with_3_and_is_named(flags: list[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with worker(address, *flags, NCCL_OF_NEXT_YEAR="7") as process:
        code, log = await exit_of(process)

    assert code == 3
    said = "(wrong_fingerprint): "
    named = "env.NCCL_OF_NEXT_YEAR: certified not there, found '7'"
    assert said in log
    assert named in log.splitlines()[-1]


async def test_without_a_certificate_it_ends_with_3_and_says_what_to_give() -> None:
    async with worker(f"127.0.0.1:{free_port()}") as process:
        code, log = await exit_of(process)

    assert code == 3
    assert "no certificate is given: give --certificates and --trust" in log.splitlines()[-1]
