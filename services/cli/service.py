"""`splitwave router|prefill|decode`: one service in the foreground, with its own flags."""

import argparse
import importlib


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything behind the service's name is the service's: `splitwave prefill -- --help`."""
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the service's own flags")


def run(arguments: argparse.Namespace) -> int:
    """Run it and return its exit code."""
    flags = [flag for flag in arguments.flags if flag != "--"]
    code: int = importlib.import_module(f"services.{arguments.command}.main").main(flags)
    return code
