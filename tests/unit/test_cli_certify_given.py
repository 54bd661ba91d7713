"""What `splitwave certify` is given and cannot use is told in one line, before anything runs."""

import contextlib
import fcntl
import json
import socket
from pathlib import Path

import psutil
import pytest

from services.cli import battery_ports, certify
from services.cli.battery import Battery
from splitwave.certify.battery import __main__ as battery
from splitwave.certify.fingerprint import RanksDiffer
from splitwave.core.fingerprint import Difference
from splitwave.demo_model import DemoModelOptions, Variant, build
from tests.unit.test_cli_certify import ENVELOPE, made_of, parsed

COMPILED = ("--mode", "decode_cpu_compiled", "--envelope")
HARNESS = ("--level", "full", "--lm-eval-python", "text")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    build(path, DemoModelOptions(variant=Variant.TINY), lambda line: None)
    return path


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--mode", "decode_cpu_eager", "--mode", "decode_cpu_compiled"), "are of one role"),
        (("--envelope", "x.json"), "give one for each --mode"),
        (("--decode-setting", "seats_max"), "NAME=VALUE"),
        (("--decode-setting", "seats_max=0"), "seats_max: is 0; set it to 1 or more"),
        (("--prefill-setting", "nope=3"), "prefill.engine_settings: nope: unknown"),
        (("--decode-ranks", "3"), "ranks: 3 does not divide the model's 8 experts"),
        (("--prefill-setting", "ranks=50000"), "ranks: is 50000; 50000 KV caches of 64 MiB are"),
        (("--decode-ranks", "60000"), "ranks: 60000 does not divide the model's 8 experts"),
        (("--decode-ranks", "70000"), "ranks: is 70000; set it to 1 or more, 65536 at most"),
        (("--output-max-tokens", "1024"), "is 1024; the groups can run 1023 at most"),
        (
            ("--output-max-tokens", "99", "--decode-setting", "model_len_max_tokens=99"),
            "--output-max-tokens: is 99; the groups can run 98 at most",
        ),
        ((*COMPILED, "good.json", "--output-max-tokens", "9"), "the --envelope says it; leave one"),
        (("--model", "/nowhere"), "no config.json"),
        (("--model", "list"), "config.json holds no JSON object"),
        ((*COMPILED, "gone.json"), "--envelope: gone.json cannot be read: No such file"),
        ((*COMPILED, "text"), "--envelope: text is not JSON"),
        ((*COMPILED, "deep"), "--envelope: deep is not JSON"),
        ((*COMPILED, "list/config.json"), "list/config.json: is no object"),
        ((*COMPILED, "empty"), "empty.traffic: is missing"),
        (("--key", "gone.pem"), "--key: gone.pem cannot be read"),
        (("--key", "text"), "--key: text can be read by others than its owner"),
        (("--out", "text"), "--out: cannot write into text"),
        (("--certificates", "text"), "--certificates: cannot write into text"),
        (("--level", "full", "--lm-eval-python", "gone"), "--lm-eval-python: gone is no file"),
        ((*HARNESS, "--gsm8k", "list"), "--gsm8k: list has no train.jsonl and test.jsonl"),
        ((*HARNESS, "--gsm8k", "bad"), "--gsm8k: bad does not hold GSM8K"),
    ],
)
def test_wrong_usage_is_told(
    words: tuple[str, ...],
    why: str,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(model.parent)
    for name in ("list", "bad"):
        Path(name).mkdir()
    for name, text in {
        "text": "no JSON", "good.json": json.dumps(ENVELOPE), "empty": "{}",
        "deep": '{"a":' * 100_000, "list/config.json": "[]",
        "bad/train.jsonl": '{"question": "?"}', "bad/test.jsonl": "{}",
    }.items():  # fmt: skip
        Path(name).write_text(text)
    Path("text").chmod(0o644)
    given = words if "--model" in words else ("--model", str(model), *words)

    assert certify.run(parsed("--level", "smoke", *given)) == 2
    assert why in capsys.readouterr().err


def asked_of(model: Path, *words: str) -> Battery:
    return made_of(parsed("--model", str(model), "--level", "smoke", *words))


def test_a_battery_beside_another_one_has_other_ports(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = asked_of(model).plan
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first.metrics_port))
        taken.listen()

        second = asked_of(model).plan

        assert not set(first.listening().values()) & set(second.listening().values())
        assert first.run_dir != second.run_dir
        monkeypatch.setattr(battery_ports, "FIRST_PORTS", (first.grpc_port,))
        with pytest.raises(ValueError, match=f"behind each of {first.grpc_port} there is one"):
            asked_of(model)


def test_batteries_that_begin_at_once_have_ports_apart(model: Path) -> None:
    asked = parsed("--model", str(model), "--level", "smoke")

    with contextlib.ExitStack() as claims:
        plans = [certify.battery_of(asked, lambda who, what: None, claims).plan for _ in range(3)]

    ports = [port for plan in plans for port in plan.listening().values()]
    assert len(set(ports)) == len(ports)


def test_the_ports_that_must_be_free_are_those_of_the_engines_to_come(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "envelope.json"
    path.write_text(json.dumps(ENVELOPE | {"ranks": 4}))
    words = ("--mode", "decode_cpu_eager", "--envelope", str(path))
    first = asked_of(model, *words).plan
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first.side_channel_port + 4))  # Prefill's, and decode's last.
        taken.listen()

        assert asked_of(model, *words).plan.side_channel_port != first.side_channel_port


def test_two_batteries_do_not_write_into_one_directory(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        words = ("--model", str(model), "--level", "smoke", "--out", str(tmp_path))

        assert certify.run(parsed(*words)) == 2

    assert f"--out: another battery runs in {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [None, 256])
def test_the_longest_output_that_is_asked_for_reaches_the_battery(
    asked: int | None, model: Path
) -> None:
    flags = ("--output-max-tokens", str(asked)) if asked else ()
    arguments = parsed("--model", str(model), "--level", "smoke", *flags)

    made = made_of(arguments)

    assert battery.read_order(made.to_json()).output_max_tokens == asked


def test_what_is_signed_is_told_with_what_routers_will_refuse() -> None:
    envelope = ENVELOPE | {"traffic": {"output_max_tokens": 256, "sampling": []}}
    subject = {
        "mode": "m", "level": "full", "certificate": "c", "report": "r", "cpu_s": 1.0,
        "envelope": envelope,
    }  # fmt: skip

    assert certify.lines_of(subject)[1] == (
        "  within: prompts of 100 tokens, outputs of 256, 128 together; routers refuse longer ones"
    )
    unsigned = certify.lines_of(subject | {"certificate": "", "not_signed_for": "a reason"})
    assert unsigned == ["m: not signed: a reason", "  report: r; 1 CPU seconds"]


def test_a_stack_that_the_memory_does_not_hold_is_told_of(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    total = psutil.virtual_memory().total  # Room for as many caches, and not for their processes.
    ranks = f"ranks={total // 2**27}"

    assert certify.run(parsed("--model", str(model), "--prefill-setting", ranks)) == 2
    assert "memory: about" in capsys.readouterr().err


@pytest.mark.parametrize("length", ["0", "-1", "nan", "inf", "soon"])
def test_a_soak_lasts_some_seconds(length: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(f"--soak-s={length}")
    assert "--soak-s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RanksDiffer(1, Difference("env.X", "1", "2")),
            "rank 1 does not run as rank 0 does: env.X",
        ),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_a_battery_that_cannot_go_on_says_why(
    tmp_path: Path,
    error: Exception,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def read_order(_: object) -> None:
        raise error

    monkeypatch.setattr(battery, "read_order", read_order)

    order = tmp_path / "order.json"
    order.write_text("{}")

    assert battery.main([str(order)]) == 1
    assert f"the battery could not go on: {words}" in capsys.readouterr().err.replace(
        "[Errno 28] ", ""
    )
