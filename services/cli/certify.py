"""`splitwave certify`: prove execution modes on this machine, and sign what was proved."""

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any  # JSON

from services.cli.battery import (
    Battery,
    Report,
    as_workers_read_it,
    check_groups,
    gateway,
    run_battery,
)
from services.cli.battery_ports import free_plan
from services.cli.given import count, seconds
from services.cli.machine import Machine, default_home
from services.cli.plan import ROLES, Plan, read_experts
from services.cli.stack import StackFailed, check_memory
from services.cli.up import BUILT_IN, build_model, reporter
from splitwave import demo_model
from splitwave.certify.accuracy.task import gsm8k
from splitwave.certify.keys import BadKey, load_signing_key
from splitwave.core.envelope import read_envelope
from splitwave.core.evidence import Check, Level
from splitwave.core.mode import MODES, lookup
from splitwave.core.strict_json import JsonError, parse
from splitwave.engine.vllm.config import SettingsError, VllmGroupSettings, read_shape
from splitwave.runtime.config import ConfigError

EXIT_NOT_SIGNED, EXIT_USAGE = 1, 2
LENGTH = "model_len_max_tokens"
ENVELOPE_BYTES_MAX = 2**20
LM_EVAL_HOME = Path(".clients/lm-eval")
LM_EVAL_WORDS = (
    "no lm-evaluation-harness: make its environment with `python -m tests.clients.environments "
    "lm-eval` (one minute, 1 GB), or name a Python that has lm_eval with --lm-eval-python; "
    "without it the accuracy check does not run, and a full certificate is not signed"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    _add_what(parser.add_argument)
    _add_how(parser.add_argument)


def _add_what(add: Callable[..., object]) -> None:
    """Flags that say what is certified."""
    add(
        "--mode",
        action="append",
        choices=sorted(MODES),
        metavar="MODE",
        help="mode to certify; may be repeated, once a role (default: both eager CPU modes)",
    )
    add("--model", default="demo", help="demo, tiny or a model directory (default: %(default)s)")
    add(
        "--level",
        choices=[level.value for level in Level],
        default=Level.FULL.value,
        help="how much to prove (default: %(default)s)",
    )
    add(
        "--envelope",
        action="append",
        type=Path,
        metavar="FILE",
        default=[],
        help="JSON of the envelope to certify, once a --mode in their order "
        "(default: all that the groups can run)",
    )
    add(
        "--output-max-tokens",
        type=count,
        metavar="N",
        help="longest output to certify where no --envelope says it; routers refuse longer ones, "
        "and a full battery runs it to its end (default: all that the groups can run)",
    )
    add("--prefill-ranks", type=count, default=1, help="(default: %(default)s)")
    add("--decode-ranks", type=count, default=2, help="(default: %(default)s)")
    for role in ROLES:
        add(f"--{role}-setting", action="append", default=[], metavar="NAME=VALUE",
            help=f"a setting of the {role} engines; may be repeated")  # fmt: skip


def _add_how(add: Callable[..., object]) -> None:
    """Flags that say how it is done, and where things go."""
    add("--out", type=Path, help="state, logs and reports (default: below the user's state)")
    add("--certificates", type=Path, help="where certificates go (default: this user's)")
    add("--key", type=Path, help="private key to sign with (default: this machine's, made if new)")
    add(
        "--soak-s",
        type=seconds,
        help="length of the soak in seconds; nothing is signed for one shorter than the default, "
        "which goes by level and model",
    )
    add(
        "--leave-out",
        action="append",
        default=[],
        choices=[check.value for check in Check],
        metavar="CHECK",
        help="run without this check; nothing is signed then",
    )
    add("--lm-eval-python", type=Path, help="Python that has lm_eval (default: .clients/lm-eval)")
    add(
        "--gsm8k",
        type=Path,
        metavar="DIR",
        help="train.jsonl and test.jsonl of GSM8K, asked too (default: below the user's state)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the battery. 0 if every certificate was signed, 1 if not, 2 for wrong usage."""
    with contextlib.ExitStack() as claims:
        return _run(arguments, claims)


def _run(arguments: argparse.Namespace, claims: contextlib.ExitStack) -> int:
    report = reporter()
    try:
        battery = battery_of(arguments, report, claims)
    except (
        BadKey, ConfigError, JsonError, OSError, StackFailed, ValueError, demo_model.DemoModelError
    ) as error:  # fmt: skip
        print(f"splitwave certify: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        with _alone(battery.out):
            code, told = asyncio.run(run_battery(battery, report))
    except ValueError as error:
        print(f"splitwave certify: {error}", file=sys.stderr)
        return EXIT_USAGE
    for subject in told:
        print("\n".join(lines_of(subject)))
    if not told:
        print(f"splitwave certify: nothing was proved; see {battery.out}/battery.log")
    return code


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold a battery's directory, in which two would write over one another's results.

    Raises ValueError if another one holds it. A battery that is killed holds it no longer.
    """
    with (out / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            words = f"another battery runs in {out}; wait for it, or give another directory"
            raise ValueError(f"--out: {words}") from None
        yield


def lines_of(subject: Mapping[str, Any]) -> list[str]:
    """What became of one subject, for people."""
    if subject["certificate"]:
        lines = [
            f"{subject['mode']}: signed, {subject['level']}: {subject['certificate']}",
            f"  within: {_within(subject['envelope'])}",
        ]
    else:
        lines = [f"{subject['mode']}: not signed: {subject['not_signed_for']}"]
    return [*lines, f"  report: {subject['report']}; {subject['cpu_s']:.0f} CPU seconds"]


def _within(envelope: Mapping[str, Any]) -> str:
    """What requests a certificate lets in, and that routers refuse the others."""
    return (
        f"prompts of {envelope['prompt_max_tokens']} tokens, outputs of "
        f"{envelope['traffic']['output_max_tokens']}, {envelope['sequence_max_tokens']} together; "
        "routers refuse longer ones"
    )


def battery_of(
    arguments: argparse.Namespace, report: Report, claims: contextlib.ExitStack
) -> Battery:
    """What the flags ask for; `claims` holds its ports from other commands as this one.

    Raises ValueError, OSError, JsonError, BadKey and ConfigError.
    """
    modes = _modes(arguments.mode)
    envelopes = _envelopes(modes, arguments)
    model_path = _model(arguments.model, report)

    def plan_from(first: int) -> Plan:
        plan = _plan(arguments, modes, model_path, first)
        plan = as_workers_read_it(plan, os.environ, envelopes)
        check_groups(plan, os.environ)
        return plan

    plan = free_plan(plan_from, claims)
    check_memory(plan)
    _check_output(arguments, plan)
    machine = Machine(default_home())
    if arguments.key is None:
        machine.make_key()
    else:
        _check_key(arguments.key)  # Not after hours of checks.
    return Battery(
        plan=plan,
        level=arguments.level,
        targets=list(_targets(arguments.mode)),
        out=_writable("--out", arguments.out or machine.home / "batteries" / model_path.name),
        certificates=_writable("--certificates", arguments.certificates or machine.certificates),
        key=arguments.key or machine.key,
        envelopes=envelopes,
        output_max_tokens=arguments.output_max_tokens,
        soak_s=arguments.soak_s,
        leave_out=arguments.leave_out,
        gateway=_gateway(arguments, plan, report),
    )


def _check_output(arguments: argparse.Namespace, plan: Plan) -> None:
    """Raise ValueError for a longest output that no certificate could have."""
    if (asked := arguments.output_max_tokens) is None:
        return
    if arguments.envelope:
        raise ValueError("--output-max-tokens: the --envelope says it; leave one of them out")
    usual = next(x.default for x in fields(VllmGroupSettings) if x.name == LENGTH)
    assert isinstance(usual, int), "a sequence has a default length"
    longest = min(int(plan.engine_settings(role).get(LENGTH) or usual) for role in ROLES) - 1
    if asked > longest:
        raise ValueError(f"--output-max-tokens: is {asked}; the groups can run {longest} at most")


def _targets(given: Sequence[str] | None) -> Sequence[str]:
    return [lookup(name).role for name in given] if given else ROLES


def _modes(given: Sequence[str] | None) -> dict[str, str]:
    """Mode by role. Raises ValueError for two of one role."""
    modes: dict[str, str] = {}
    for name in given or ():
        if lookup(name).role in modes:
            raise ValueError(f"--mode: {name} and {modes[lookup(name).role]} are of one role")
        modes[lookup(name).role] = name
    return modes


def _envelopes(
    modes: Mapping[str, str], arguments: argparse.Namespace
) -> dict[str, Mapping[str, Any]]:
    if arguments.envelope and len(arguments.envelope) != len(modes):
        raise ValueError("--envelope: give one for each --mode, in their order")
    return {
        role: read_envelope(_read(path), str(path)).to_json()
        for role, path in zip(modes, arguments.envelope, strict=False)
    }


def _read(path: Path) -> object:
    """What an envelope's file holds. Raises JsonError."""
    try:
        return parse(path.read_bytes(), bytes_max=ENVELOPE_BYTES_MAX)
    except JsonError as error:
        raise JsonError(f"--envelope: {path} {error}") from None
    except OSError as error:
        raise JsonError(f"--envelope: {path} cannot be read: {error.strerror}") from None


def _writable(which: str, path: Path) -> Path:
    """A directory that can be written to, made if it is not there. Raises ValueError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise ValueError(f"{which}: cannot write into {path}: {error.strerror}") from None


def _model(name: str, report: Report) -> Path:
    """The model's directory; an embedded one is built if it is not there."""
    if name in BUILT_IN:
        return build_model(name, report)
    path = Path(name).resolve()
    if not (path / "config.json").is_file():
        raise ValueError(f"--model: {path} has no config.json; give a model directory")
    try:
        read_shape(path)
    except SettingsError as error:
        raise ValueError(f"--model: {str(error).removeprefix('model_path: ')}") from None
    return path


def _plan(
    arguments: argparse.Namespace, modes: Mapping[str, str], model_path: Path, first: int
) -> Plan:
    """A stack as `splitwave up` has it, on ports of its own from `first` on."""
    return Plan(
        model_path=model_path,
        served_model=model_path.name,
        # A user's own: nobody else can write into it.
        run_dir=Path(tempfile.gettempdir()) / f"splitwave-certify-{os.getuid()}" / str(first),
        prefill_ranks=arguments.prefill_ranks,
        decode_ranks=arguments.decode_ranks,
        experts=read_experts(model_path),
        grpc_port=first,
        http_port=first + 1,
        prefill_port=first + 2,
        decode_port=first + 3,
        metrics_port=first + 4,
        side_channel_port=first + 10,
        prefill_settings=_pairs(arguments.prefill_setting),
        decode_settings=_pairs(arguments.decode_setting),
        modes=modes,
    )


def _pairs(words: Sequence[str]) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            raise ValueError(f"{word}: write a setting as NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def _gateway(arguments: argparse.Namespace, plan: Plan, report: Report) -> dict[str, Any] | None:
    if arguments.level != Level.FULL or Check.ACCURACY in arguments.leave_out:
        return None
    python = arguments.lm_eval_python or LM_EVAL_HOME / "bin/python"
    if arguments.lm_eval_python is not None and not python.is_file():
        raise ValueError(f"--lm-eval-python: {python} is no file; name a Python that has lm_eval")
    if not python.is_file():
        report("certify", LM_EVAL_WORDS)
        return None
    problems = _word_problems(arguments.gsm8k)
    return gateway(plan, _control_model(plan, report), python.absolute(), problems)


def _check_key(path: Path) -> None:
    try:
        load_signing_key(path)
    except BadKey as error:
        raise ValueError(f"--key: {error}") from None


def _word_problems(given: Path | None) -> Path:
    """Where GSM8K lies, or would. Raises ValueError if it was given and cannot be read there."""
    directory = given or default_home() / "gsm8k"
    try:
        found = gsm8k(directory, 1)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--gsm8k: {directory} does not hold GSM8K: {error!r}") from None
    if found is None and given is not None:
        raise ValueError(f"--gsm8k: {directory} has no train.jsonl and test.jsonl")
    return directory


def _control_model(plan: Plan, report: Report) -> Path:
    """A model on which a token that goes to a wrong expert changes the text."""
    stamp = plan.model_path / "demo_model.json"
    variant = json.loads(stamp.read_text())["options"]["variant"] if stamp.is_file() else ""
    plain = variant in (demo_model.Variant.IDENTICAL, demo_model.Variant.DENSE)
    if plan.experts and not plain:
        return plan.model_path
    options = demo_model.DemoModelOptions(variant=demo_model.Variant.DISTINCT)
    path = demo_model.default_dir(options.variant)
    demo_model.build(path, options, progress=lambda text: report("model", text))
    return path
