"""`splitwave`: the command line. Each command's module is imported when it is asked for."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

COMMANDS = {
    "up": ("services.cli.up", "start a local stack: prefill, decode and router"),
    "generate": ("services.cli.generate", "ask a running router for a completion, over gRPC"),
    "trace": ("services.cli.trace", "print where the time of a request went, from its trace"),
    "demo": ("services.cli.demo", "start the local stack, ask it, stop it"),
    "demo-model": ("splitwave.demo_model.command", "build the embedded default model"),
    "router": ("services.cli.service", "run one router"),
    "prefill": ("services.cli.service", "run one prefill worker"),
    "decode": ("services.cli.service", "run one decode worker"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0 well, 1 failed, 2 wrong usage, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = next((word for word in words if not word.startswith("-")), "")
    parser = argparse.ArgumentParser(
        prog="splitwave",
        description="Serve a model with prefill and decode on separate pools of vLLM engines.",
    )
    parser.add_argument("--version", action="version", version=f"splitwave {version('splitwave')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, (module_name, what) in COMMANDS.items():
        subparser = subparsers.add_parser(command, help=what, description=f"{what}.", add_help=True)
        if command == name:
            module = importlib.import_module(module_name)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    parsed = parser.parse_args(words)
    try:
        code: int = parsed.run(parsed)
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
