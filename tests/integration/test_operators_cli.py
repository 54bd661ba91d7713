"""The operators' commands against a stack of real processes on simulated engines."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.main import main
from splitwave.demo_model import DemoModelOptions, Variant, build
from tests.e2e.live_stack import LiveStack, free_ports, running

pytestmark = pytest.mark.timeout(120)

COMMAND = (sys.executable, "-m", "services.cli.main")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("model") / "tiny"
    build(model, DemoModelOptions(variant=Variant.TINY))
    return model


@pytest.fixture(scope="module")
def stack(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    slow = ("--decode-setting", "step_fixed_s=0.01")
    with running(tiny_model, tmp_path_factory.mktemp("run"), "--engine", "sim", *slow) as started:
        yield started


def splitwave(*words: str, stdin: str = "") -> tuple[int, str, str]:
    """Run a command to its end: exit code, output, errors."""
    done = subprocess.run(
        [*COMMAND, *words], input=stdin, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def test_status_shows_router_pools_and_ranks(stack: LiveStack) -> None:
    code, said, _ = splitwave("status", "--router", stack.address("http"))

    assert code == 0
    assert ": serving, model tiny" in said
    assert "prefill pool: 1 of 1 group(s) serving" in said
    assert "decode pool: 1 of 1 group(s) serving" in said
    assert "decode_cpu_eager" in said
    assert len([line for line in said.splitlines() if line.startswith("  decode-0  ")]) == 2


def test_status_asks_workers_without_a_router_and_names_the_one_that_is_not_there(
    stack: LiveStack,
) -> None:
    nobody = f"127.0.0.1:{free_ports(1)}"
    decode = f"{stack.address('decode')},{nobody}"
    code, said, _ = splitwave("status", "--prefill", stack.address("prefill"), "--decode", decode)

    assert code == 0
    assert "prefill pool: 1 of 1 group(s) serving" in said
    assert "decode pool: 1 of 2 group(s) serving" in said
    assert f"{nobody}  unreachable" in said


def test_status_as_json_is_what_the_router_says(stack: LiveStack) -> None:
    code, said, _ = splitwave("status", "--router", f"http://{stack.address('http')}", "--json")

    assert code == 0
    assert {group["role"] for group in json.loads(said)["groups"]} == {"prefill", "decode"}


@pytest.mark.parametrize(
    ("port", "words"),
    [("nobody", ["no router answers", "splitwave up"]), ("grpc", ["not in HTTP", "--router"])],
)
def test_status_says_what_is_wrong_where_no_router_is(
    stack: LiveStack, port: str, words: list[str]
) -> None:
    address = f"127.0.0.1:{free_ports(1)}" if port == "nobody" else stack.address(port)
    code, _, said = splitwave("status", "--router", address)

    assert code == 1
    assert [word for word in words if word not in said] == []


def test_a_watched_status_is_drawn_again_until_ctrl_c_which_ends_it_well(stack: LiveStack) -> None:
    words = ("status", "--router", stack.address("http"), "--watch", "0.2")
    with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        drawn = 0
        for line in watching.stdout:
            drawn += line.startswith("router ")
            if drawn == 3:
                break
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()
        assert watching.wait(10.0) == 0


def test_a_watched_status_ends_quietly_when_its_reader_goes_away(stack: LiveStack) -> None:
    words = ("status", "--router", stack.address("http"), "--watch", "0.05")
    with subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        watching.stdout.readline()
        watching.stdout.close()
        assert watching.stderr.read() == b""
        assert watching.wait(10.0) == 141


def test_chat_answers_a_piped_message_and_a_given_one_alike(stack: LiveStack) -> None:
    flags = ("--address", stack.address("http"), "--max-tokens", "8")
    given = splitwave("chat", "What is it?", *flags)
    piped = splitwave("chat", *flags, stdin="What is it?\n")

    assert given[0] == piped[0] == 0
    assert given[1] == piped[1]
    assert len(given[1].strip()) > 3


def test_chat_says_why_there_is_no_answer(stack: LiveStack) -> None:
    nobody = splitwave("chat", "x", "--address", f"127.0.0.1:{free_ports(1)}")
    wrong = splitwave("chat", "x", "--address", stack.address("http"), "--model", "other")
    empty = splitwave("chat", "--address", stack.address("http"), stdin="  \n")

    assert (nobody[0], wrong[0], empty[0]) == (1, 1, 2)
    assert "is `splitwave up` running?" in nobody[2]
    assert "model: 'other' is not served here" in wrong[2]
    assert "the message is empty" in empty[2]


class Terminal:
    """A command at a terminal of its own, as a person has it."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *words], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""
        self._at = 0

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, wanted: str, within_s: float = 20.0) -> None:
        """Read until that was seen, behind what the last call waited for."""
        deadline_s = time.monotonic() + within_s
        os.set_blocking(self._ours, False)
        while (found := self.seen.find(wanted, self._at)) < 0:
            assert time.monotonic() < deadline_s, f"no {wanted!r} in {self.seen[self._at :]!r}"
            try:
                self.seen += os.read(self._ours, 65536).decode(errors="replace")
            except (BlockingIOError, OSError):
                time.sleep(0.02)
        self._at = found + len(wanted)

    def end(self) -> int:
        code = self.process.wait(20.0)
        os.close(self._ours)
        return code


def _own_terminal() -> None:
    """Let Ctrl-C of the terminal reach the command."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_at_a_terminal_ctrl_c_ends_an_answer_and_ctrl_d_the_chat(stack: LiveStack) -> None:
    terminal = Terminal("chat", "--address", stack.address("http"), "--max-tokens", "1500")
    try:
        terminal.until("> ")
        terminal.type("Tell me all\n")
        terminal.until("\r\n")
        time.sleep(0.5)
        terminal.type("\x03")
        terminal.until("(ended)")
        terminal.until("> ")
        code, said, _ = splitwave("status", "--router", stack.address("http"), "--json")
        assert code == 0
        latest = max(json.loads(said)["requests"], key=lambda request: -request["age_s"])
        assert latest["outcome"] == "cancelled"
        assert latest["completion_tokens"] < 1500
        terminal.type("\x04")
        assert terminal.end() == 0
    finally:
        terminal.process.kill()
        terminal.process.wait(10.0)


def test_drain_stops_the_intake_and_waits_for_the_end(tiny_model: Path, tmp_path: Path) -> None:
    with running(tiny_model, tmp_path, "--engine", "sim") as stack:
        code, said, _ = splitwave("drain", stack.address("decode"), "--wait", "--timeout", "30")
        assert (code, said) == (0, "drained: nothing outstanding\n")

        _, status, _ = splitwave("status", "--decode", stack.address("decode"))
        assert "draining" in status
        _, status, _ = splitwave("status", "--router", stack.address("http"))
        assert "draining" in status.partition("decode pool")[2]
        refused = splitwave("chat", "x", "--address", stack.address("http"), "--timeout", "20")
        assert refused[0] == 1


@pytest.mark.parametrize("port", ["grpc", "http"])
def test_a_router_s_address_is_told_from_a_worker_s(stack: LiveStack, port: str) -> None:
    router = stack.address(port)
    for words in (
        ("drain", router),
        ("waves", "--workers", router),
        ("status", "--decode", router),
    ):
        code, out, said = splitwave(*words)
        assert code == 1
        assert f"{router} answers, but is no worker; give the gRPC address of" in out + said


def test_waves_shows_how_the_ranks_of_both_groups_step_together(stack: LiveStack) -> None:
    workers = f"{stack.address('prefill')},{stack.address('decode')}"
    assert splitwave("generate", "x", "--address", stack.address("grpc"))[0] == 0
    code, said, _ = splitwave("waves", "--workers", workers)

    assert code == 0
    assert said.count("waves started by") == 2
    assert "0 waves started" not in said
    assert len([line for line in said.splitlines() if line.split()[:2] == ["1", "sleeps"]]) == 1


def test_an_address_that_is_not_a_router_s_is_told_as_such(stack: LiveStack) -> None:
    worker = stack.address("prefill")

    assert (
        f"{worker} answers, but is no router" in splitwave("generate", "x", "--address", worker)[2]
    )
    assert "answers, but not in HTTP" in splitwave("chat", "x", "--address", worker)[2]


def test_generate_prints_log_probabilities_and_takes_an_address_with_http(
    stack: LiveStack,
) -> None:
    address = f"http://{stack.address('grpc')}/"
    flags = ("--address", address, "--max-tokens", "4", "--logprobs", "3")
    code, said, _ = splitwave("generate", "--token-ids", "65,66", *flags)

    rows = [line.split() for line in said.splitlines()[-4:]]
    assert code == 0
    assert said.splitlines()[-5].split() == ["token", "logprob", "rank", "most", "likely"]
    assert all(len(row) == 3 + 2 * 3 and float(row[1]) <= 0 for row in rows), said


def test_chat_takes_an_address_with_http(stack: LiveStack) -> None:
    code, said, _ = splitwave(
        "chat", "x", "--address", f"http://{stack.address('http')}", "--max-tokens", "4"
    )

    assert code == 0
    assert said.strip()


def test_drain_says_that_nobody_is_there() -> None:
    code, _, said = splitwave("drain", f"127.0.0.1:{free_ports(1)}")

    assert code == 1
    assert "no worker answers" in said


@pytest.mark.parametrize("command", ["up", "status", "chat", "drain", "router"])
def test_a_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], [command, "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
    everything, its_own = capsys.readouterr().out.split("usage: ")[1:]
    assert f"    {command} " in everything
    assert its_own.startswith(f"splitwave {command} ")
