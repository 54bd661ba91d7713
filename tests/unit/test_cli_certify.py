"""`splitwave certify`: its order to the battery; and when `splitwave up` has certificates made."""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any  # JSON

import pytest

from services.cli import certified, certify, up
from services.cli.battery import Battery, Report, gateway, run_battery, smoke
from services.cli.machine import Machine
from services.cli.plan import Plan
from services.cli.stack import StackFailed
from services.cli.stack_config import StackConfig
from services.cli.up import plan_of
from services.decode.config import DecodeConfig
from services.prefill.config import PrefillConfig
from splitwave.certify.battery.__main__ import read_order
from splitwave.certify.keys import BadKey, load_trust_store
from splitwave.core.evidence import Level
from splitwave.core.mode import lookup
from splitwave.core.worker import Role
from splitwave.demo_model import DemoModelOptions, Variant, build
from splitwave.engine.vllm.config import batch_grid
from splitwave.runtime.config import ConfigError, load

ENVELOPE = {
    "ranks": 2, "tensor_parallel": 1, "capture_grid": [], "step_min_tokens": 0,
    "step_max_tokens": 8, "seats_max": 8, "prompt_max_tokens": 100, "sequence_max_tokens": 128,
    "traffic": {"output_max_tokens": 27, "sampling": []},
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    build(path, DemoModelOptions(variant=Variant.TINY), lambda line: None)
    return path


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    certify.add_arguments(parser)
    return parser.parse_args(words)


def battery_of(tmp_path: Path, *words: str) -> Battery:
    out = ("--out", str(tmp_path / "out"), "--certificates", str(tmp_path / "certificates"))
    return made_of(parsed("--level", "smoke", *out, *words))


def made_of(arguments: argparse.Namespace, report: Report = lambda who, what: None) -> Battery:
    """The battery of a command that has ended, and holds no ports."""
    with contextlib.ExitStack() as claims:
        return certify.battery_of(arguments, report, claims)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "splitwave"


def test_the_order_is_what_the_battery_reads(tmp_path: Path, model: Path) -> None:
    battery = battery_of(tmp_path, "--model", str(model), "--decode-setting", "seats_max=4")

    order = read_order(json.loads(json.dumps(battery.to_json())))

    assert order.level is Level.SMOKE
    assert order.targets == [Role.PREFILL, Role.DECODE]
    decode = order.settings[Role.DECODE]
    assert (decode.mode, decode.ranks, decode.seats_max) == ("decode_cpu_eager", 2, 4)
    assert decode.expert_parallel
    assert decode.model_path == model
    assert order.settings[Role.PREFILL].ranks == 1


def test_one_mode_is_certified_beside_the_other_roles_default(tmp_path: Path, model: Path) -> None:
    words = ("--model", str(model), "--mode", "decode_cpu_compiled")

    order = read_order(battery_of(tmp_path, *words).to_json())

    assert order.targets == [Role.DECODE]
    assert order.settings[Role.DECODE].mode == "decode_cpu_compiled"
    assert order.settings[Role.PREFILL].mode == "prefill_cpu_eager"


def test_engines_are_started_to_fit_the_envelope(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "envelope.json"
    path.write_text(json.dumps(ENVELOPE))
    words = ("--model", str(model), "--mode", "decode_cpu_eager", "--envelope", str(path))

    order = read_order(battery_of(tmp_path, *words).to_json())

    decode = order.settings[Role.DECODE]
    assert (decode.seats_max, decode.model_len_max_tokens, decode.batch_max_tokens) == (8, 128, 8)
    assert order.envelopes[Role.DECODE].prompt_max_tokens == 100


def test_a_grid_and_parallel_sizes_of_an_envelope_are_the_engines(
    tmp_path: Path, model: Path
) -> None:
    path = tmp_path / "envelope.json"
    sizes = {"capture_grid": [8, 16, 64], "seats_max": 64, "tensor_parallel": 2}
    path.write_text(json.dumps(ENVELOPE | sizes | {"step_max_tokens": 64}))
    words = ("--model", str(model), "--mode", "decode_graph_ag", "--envelope", str(path))

    decode = read_order(battery_of(tmp_path, *words).to_json()).settings[Role.DECODE]

    assert batch_grid(decode, lookup(decode.mode)) == (8, 16, 64)
    assert (decode.tensor_parallel, decode.seats_max) == (2, 64)


def test_what_a_battery_says_may_be_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = tmp_path / "says"
    told = json.dumps({"mode": "m", "checks": "y" * 200_000})
    says.write_text(f"#!/bin/sh\necho '[   0.1s] {'x' * 200_000}' >&2\necho '{told}'\n")
    says.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(says))
    battery = Battery(
        plan=plan(tmp_path), level="smoke", targets=(), out=tmp_path / "out",
        certificates=tmp_path, key=tmp_path,
    )  # fmt: skip
    said: list[int] = []

    code, subjects = asyncio.run(run_battery(battery, lambda who, what: said.append(len(what))))

    assert (code, [len(subject["checks"]) for subject in subjects]) == (0, [200_000])
    assert said == [200_000]


def test_a_full_battery_without_the_harness_says_how_to_get_it(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    arguments = parsed("--model", str(model), "--out", str(tmp_path / "out"))

    battery = made_of(arguments, lambda who, what: said.append(what))

    assert battery.gateway is None
    assert any("--lm-eval-python" in words and "not signed" in words for words in said)


def test_the_control_runs_on_a_model_whose_experts_differ(tmp_path: Path, model: Path) -> None:
    plan = Plan(model_path=model, served_model="tiny", run_dir=tmp_path, experts=8, metrics_port=9)

    found = gateway(plan, tmp_path / "distinct", tmp_path / "python", tmp_path)

    assert found["main"]["model_path"] == str(model)
    assert found["control"]["model_path"] == str(tmp_path / "distinct")
    assert found["main"]["words"][1:3] == ["-m", "services.cli.tether"]
    assert found["main"]["metrics"] == ["127.0.0.1:9", "127.0.0.1:10"]


def test_the_gateway_stands_before_engines_that_are_sized_for_the_envelope(
    tmp_path: Path, model: Path
) -> None:
    path = tmp_path / "envelope.json"
    path.write_text(json.dumps(ENVELOPE))
    words = ("--model", str(model), "--mode", "decode_cpu_eager", "--envelope", str(path))
    battery = battery_of(tmp_path, *words)

    main = gateway(battery.plan, tmp_path / "distinct", tmp_path / "python", tmp_path)["main"]
    flags = main["words"][main["words"].index("up") + 1 :]
    started = plan_of(load(StackConfig, "up", flags, {})[0], tmp_path)

    for role, kind in (("prefill", PrefillConfig), ("decode", DecodeConfig)):
        worker, _ = load(kind, role, started.program_flags(role), {})
        certified_group = battery.to_json()["groups"][role]
        assert worker.engine_settings == certified_group["engine_settings"]
        assert worker.mode == certified_group["mode"]
        assert worker.fingerprint_file == main["fingerprints"][role]
    assert started.decode_settings["seats_max"] == "8"


def test_up_starts_the_stack_that_was_certified(tmp_path: Path, model: Path) -> None:
    plan = Plan(
        model_path=model, served_model="tiny", run_dir=tmp_path, experts=8, decode_ranks=2,
        decode_settings={"seats_max": "4"}, modes={"decode": "decode_cpu_compiled"},
    )  # fmt: skip

    config, _ = load(StackConfig, "up", plan.up_flags(), {})
    started = plan_of(config, tmp_path)

    assert started.certificates is None
    for role in ("prefill", "decode"):
        assert started.engine_settings(role) == plan.engine_settings(role)
        assert started.mode(role) == plan.mode(role)


def test_smoke_certificates_are_of_what_the_workers_will_run(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--decode", "engine_settings.seats_max=4", "--decode-ranks=3")
    config, _ = load(StackConfig, "up", ["--model", str(model), *words], {})
    monkeypatch.setenv("SPLITWAVE_DECODE_MODE", "decode_cpu_compiled")
    file = tmp_path / "prefill.toml"
    file.write_text('[engine_settings]\nbatch_max_tokens = "512"\n')
    monkeypatch.setenv("SPLITWAVE_PREFILL_CONFIG", str(file))
    key = Machine(tmp_path / "home")
    key.make_key()

    made = smoke(plan_of(config, tmp_path), tmp_path, key.key, tmp_path)
    settings = read_order(json.loads(json.dumps(made.to_json()))).settings

    decode, prefill = settings[Role.DECODE], settings[Role.PREFILL]
    assert (decode.mode, decode.seats_max, decode.ranks) == ("decode_cpu_compiled", 4, 3)
    assert (prefill.mode, prefill.batch_max_tokens) == ("prefill_cpu_eager", 512)


def test_workers_that_cannot_start_are_told_of_before_a_battery_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certified, "check_ports", lambda plan: None)
    monkeypatch.setattr(certified, "check_memory", lambda plan: None)
    bad = dataclasses.replace(plan(tmp_path), worker_flags={"decode": ("--epoch=-1",)})

    with pytest.raises(StackFailed, match="epoch"):
        asyncio.run(certified.make_smoke(bad, lambda who, what: None))


def test_a_port_that_is_taken_is_told_of_before_a_battery_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certified, "check_memory", lambda plan: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        wanted = dataclasses.replace(plan(tmp_path), grpc_port=port)
        with pytest.raises(StackFailed, match=f"cannot listen on 127.0.0.1:{port}"):
            asyncio.run(certified.make_smoke(wanted, lambda who, what: None))


def test_up_demands_certificates_unless_told_otherwise(tmp_path: Path, model: Path) -> None:
    def flags(*words: str) -> dict[str, tuple[str, ...]]:
        config, _ = load(StackConfig, "up", ["--model", str(model), *words], {})
        plan = plan_of(config, tmp_path)
        return {name: plan.certification_flags(name) for name in ("router", "decode")}

    certified_stack = flags()
    assert certified_stack["router"] == ("--certificate-level", "smoke")
    assert certified_stack["decode"][0] == "--certificates"
    off = ("--allow-uncertified", "true")
    assert flags("--certify", "off") == {"router": off, "decode": off}
    assert flags("--engine", "sim") == {"router": off, "decode": off}


def test_a_machine_makes_its_key_once_and_trusts_it(home: Path) -> None:
    machine = Machine(home)

    first, second = machine.make_key(), machine.make_key()

    assert first.public.key_id == second.public.key_id
    assert load_trust_store(machine.trust)(first.public.key_id) is not None
    assert os.stat(machine.key).st_mode & 0o077 == 0


@pytest.mark.parametrize("taken", ["keys", "trust"])
def test_a_home_that_cannot_hold_keys_is_told(home: Path, taken: str) -> None:
    home.mkdir(parents=True)
    (home / taken).write_text("a file")

    with pytest.raises(BadKey, match=f"{taken} cannot be made a directory"):
        Machine(home).make_key()


def test_a_public_key_that_cannot_be_written_is_told(home: Path) -> None:
    key = Machine(home).make_key().public.key_id
    file = Machine(home).trust / f"{key}.pem"
    file.unlink()
    file.symlink_to(home / "no" / "such")

    with pytest.raises(BadKey, match="cannot be written"):
        Machine(home).make_key()


def plan(tmp_path: Path, *, with_certificates: bool = True) -> Plan:
    here = certified.machine()
    where, trust = (here.certificates, here.trust) if with_certificates else (None, None)
    return Plan(
        model_path=tmp_path, served_model="m", run_dir=tmp_path, certificates=where, trust=trust
    )


def served(plan: Plan, *ends: int | None) -> tuple[list[str], Any]:
    """What `serve_certified` did if starts end so: None well, a number is a worker's exit code."""
    did: list[str] = []
    left = list(ends)

    async def serve() -> str:
        did.append("serve")
        if (code := left.pop(0)) is not None:
            raise StackFailed("decode", "ended", "", code)
        return "served"

    async def make() -> None:
        did.append("make")

    try:
        return did, asyncio.run(certified.serve_certified(plan, serve, make))
    except StackFailed as failed:
        return did, failed.code


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("trust={home}/gone", "decode.trust: {home}/gone is no directory; put the public keys"),
        ("certificates={home}/gone", "decode.certificates: .*gone: No such file"),
        ("certificates={home}/text,trust={home}/trust", "decode.certificates: .*malformed"),
    ],
)
@pytest.mark.parametrize("certify", ["smoke", "off"])
def test_a_stack_s_wrong_paths_are_told_with_their_settings_before_anything_starts(
    home: Path, given: str, said: str, certify: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Machine(home).make_key()
    (home / "text").write_text("a shopping list")
    model, more = home / "model", given.format(home=home)
    build(model, DemoModelOptions(variant=Variant.TINY), lambda line: None)
    if certify == "off" and "trust" not in more:
        more += f",trust={home}/trust"

    assert up.main(["--model", str(model), "--certify", certify, "--decode", more]) == 2

    told = capsys.readouterr().err
    assert re.search(f"splitwave up: {said.format(home=home)}", told), told
    assert "importing" not in told
    assert "forked" not in told


def test_certificates_cannot_be_kept_in_a_file(home: Path, tmp_path: Path) -> None:
    home.mkdir(parents=True)
    (home / "certificates").write_text("")

    with pytest.raises(ConfigError, match="certificates is no directory; move it away"):
        served(plan(tmp_path), None)


def keep_one(home: Path) -> None:
    (home / "certificates").mkdir(parents=True)
    (home / "certificates" / "m.smoke.1.cert.json").write_text("{}")


def test_smoke_certificates_are_made_where_there_are_none(tmp_path: Path) -> None:
    assert served(plan(tmp_path), None) == (["make", "serve"], "served")


def test_a_key_is_trusted_before_certificates_of_another_key_are_looked_at(
    tmp_path: Path, home: Path
) -> None:
    keep_one(home)
    seen: list[int] = []

    async def serve() -> None:
        seen.append(len(load_trust_store(Machine(home).trust).keys))

    async def make() -> None:
        pytest.fail("nothing was refused")

    asyncio.run(certified.serve_certified(plan(tmp_path), serve, make))

    assert seen == [1]


def test_a_certificate_that_fits_is_used(tmp_path: Path, home: Path) -> None:
    keep_one(home)

    assert served(plan(tmp_path), None) == (["serve"], "served")


def test_one_that_does_not_fit_is_replaced_once(tmp_path: Path, home: Path) -> None:
    keep_one(home)

    assert served(plan(tmp_path), 3, None) == (["serve", "make", "serve"], "served")
    assert served(plan(tmp_path), 3, 3) == (["serve", "make", "serve"], 3)


def test_another_failure_makes_no_certificate(tmp_path: Path, home: Path) -> None:
    keep_one(home)

    assert served(plan(tmp_path), 1) == (["serve"], 1)
    assert served(plan(tmp_path, with_certificates=False), 3) == (["serve"], 3)
