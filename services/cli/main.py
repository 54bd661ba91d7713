"""`splitwave`: the command line. Each command's module is imported when it is asked for."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

COMMANDS = {
    "up": ("services.cli.up", "start a local stack: prefill, decode and router"),
    "status": ("services.cli.status", "show a running stack: pools, groups, ranks"),
    "waves": ("services.cli.waves", "show how the ranks of each group step together"),
    "chat": ("services.cli.chat", "talk to a running router, over HTTP"),
    "generate": ("services.cli.generate", "ask a running router for a completion, over gRPC"),
    "trace": ("services.cli.trace", "print where the time of a request went, from its trace"),
    "drain": ("services.cli.drain", "stop a worker's intake and let it finish"),
    "certify": ("services.cli.certify", "prove execution modes on this machine, and sign it"),
    "certificate": ("services.cli.certificate", "make keys; show, verify and compare certificates"),
    "demo": ("services.cli.demo", "start the local stack, ask it, stop it"),
    "demo-model": ("splitwave.demo_model.command", "build the embedded default model"),
    "router": ("services.router.main", "run one router"),
    "prefill": ("services.prefill.main", "run one prefill worker"),
    "decode": ("services.decode.main", "run one decode worker"),
}

READ_THEIR_OWN = frozenset({"up", "demo", "router", "prefill", "decode"})
"""Commands with settings from flags, environment and file: their `main` takes the words."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0 well, 1 failed, 2 wrong usage, 130 interrupted.

    141 is a shell's code for a command whose reader went away, as in `splitwave waves | head`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and words[0] in READ_THEIR_OWN:
            module_name, _ = COMMANDS[words[0]]
            code: int = importlib.import_module(module_name).main(words[1:])
        else:
            code = _run_and_flush(words)
    except KeyboardInterrupt:
        return 130
    return code


def _run_and_flush(words: list[str]) -> int:
    try:
        code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered has no reader either, and Python writes it once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _run(words: list[str]) -> int:
    name = next((word for word in words if not word.startswith("-")), "")
    parser = argparse.ArgumentParser(
        prog="splitwave",
        description="Serve a model with prefill and decode on separate pools of vLLM engines.",
    )
    parser.add_argument("--version", action="version", version=f"splitwave {version('splitwave')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, (module_name, what) in COMMANDS.items():
        subparser = subparsers.add_parser(command, help=what, description=f"{what}.")
        if command == name and command not in READ_THEIR_OWN:
            module = importlib.import_module(module_name)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    parsed = parser.parse_args(words)
    if parsed.command in READ_THEIR_OWN:
        parser.error(f"write the command first: splitwave {parsed.command} ...")
    code: int = parsed.run(parsed)
    return code


if __name__ == "__main__":
    sys.exit(main())
