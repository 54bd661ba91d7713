"""What the operators' commands make of addresses, times and token ids that are given to them."""

from pathlib import Path

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from services.cli.generate import logprob_lines
from services.cli.given import why_no_worker
from services.cli.main import main
from splitwave.core.generation import TokenLogprob
from splitwave.wire.errors import from_rpc_error

WRONG = [
    (("waves", "--watch", "nan"), "--watch: is nan; set it above 0"),
    (("waves", "--watch", "0"), "--watch: is 0; set it above 0"),
    (("waves", "--workers", ""), "--workers: names nobody; write HOST:PORT"),
    (("waves", "--workers", "127.0.0.1"), "--workers: is '127.0.0.1'; write HOST:PORT"),
    (("status", "--watch", "nan"), "--watch: is nan; set it above 0"),
    (("status", "--watch", "inf"), "--watch: is inf; set it above 0"),
    (("status", "--watch", "soon"), "--watch: is 'soon'; write seconds"),
    (("status", "--prefill", " , "), "--prefill: names nobody"),
    (("status", "--router", "https://localhost:1"), "'https://localhost:1'; there is no TLS here"),
    (("chat", "x", "--timeout", "0"), "--timeout: is 0; set it above 0"),
    (("chat", "x", "--timeout", "1e300"), "--timeout: is 1e300; set it above 0, to 1000000"),
    (("chat", "x", "--address", "here"), "--address: is 'here'; write HOST:PORT"),
    (("generate", "x", "--timeout", "nan"), "--timeout: is nan; set it above 0"),
    (("generate", "--token-ids", "1,x"), "--token-ids: is '1,x'; give whole numbers"),
    (("generate", "--token-ids", ""), "--token-ids: is ''; give whole numbers"),
    (("generate", "--token-ids", f"1,{2**64}"), f"--token-ids: has {2**64}, which no model has"),
    (("certify", "--prefill-ranks", "0"), "--prefill-ranks: is 0; set it to 1 or more"),
    (("certify", "--decode-ranks", "-3"), "--decode-ranks: is -3; set it to 1 or more"),
    (("certify", "--decode-ranks", str(2**40)), "set it to 1 or more, 2147483647 at most"),
    (("certify", "--output-max-tokens", "0"), "--output-max-tokens: is 0; set it to 1 or more"),
    (("certify", "--decode-ranks", "two"), "--decode-ranks: is 'two'; write a whole number"),
    (("drain", "x:1", "--timeout", "-1"), "--timeout: is -1; set it above 0"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=lambda x: " ".join(x)[:40])
def test_what_cannot_work_is_named_and_ends_with_2(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
    assert said in capsys.readouterr().err.replace("argument ", "")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--max-tokens=-1", "max_tokens: -1 is below 1"),
        (f"--max-tokens={2**40}", "does not fit in 32 bits"),
        ("--temperature=nan", "temperature: nan is not 0 or more"),
        ("--top-p=7", "top_p: 7.0 is not in (0, 1]"),
        (f"--seed={2**80}", "does not fit in 64 bits"),
        ("--top-k=-5", "top_k: -5 is not in [0"),
        ("--min-tokens=-1", "min_tokens: -1 is not in"),
        ("--logprobs=1000", "logprobs: 1000 is not in [0, 20]"),
    ],
)
def test_a_number_that_no_router_takes_is_told_before_one_is_asked(
    flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = ("--max-tokens", "--temperature", "--top-p", "--seed")
    commands = ["generate", "chat"] if flag.startswith(chats) else ["generate"]
    for command in commands:
        assert main([command, "hi", flag]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"splitwave {command}: ")
        assert said in told


def test_a_prompt_in_two_ways_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--token-ids", "1,2", "hi"]) == 2

    assert "as text or with --token-ids, not both" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["run-dir", "trace-dir"])
def test_a_directory_that_cannot_be_made_is_named_with_its_flag(
    which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    wrong = str(tmp_path / "file/x")

    assert main(["up", "--model", "tiny", "--engine", "sim", f"--{which}", wrong]) == 1

    assert f"splitwave up: --{which}: cannot write into {wrong}: Not a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "details", "said"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", "answers, but is no worker"),
        (grpc.StatusCode.UNAVAILABLE, "Trying to connect an http1.x server", "is no worker"),
        (grpc.StatusCode.UNAVAILABLE, "refused", "no worker answers at h:1"),
    ],
)
def test_who_answers_but_is_no_worker_is_told_apart(
    code: grpc.StatusCode, details: str, said: str
) -> None:
    cause = AioRpcError(code, Metadata(), Metadata(), details)
    error = from_rpc_error(cause)
    error.__cause__ = cause

    assert said in why_no_worker("h:1", error)


def test_log_probabilities_have_a_line_a_token() -> None:
    rows = [TokenLogprob(65, -0.25, 2, ((66, -0.125), (65, -0.25))), TokenLogprob(7, -1.0, 1, ())]

    lines = [line.split() for line in logprob_lines(rows)]

    assert lines[1:] == [
        ["65", "-0.2500", "2", "66", "-0.1250,", "65", "-0.2500"],
        ["7", "-1.0000", "1"],
    ]
    assert list(logprob_lines([])) == []
