"""`splitwave demo-model`."""

import argparse
import sys
from pathlib import Path

from splitwave.demo_model.build import GGUF_NAME, GGUF_PACKAGE, build
from splitwave.demo_model.recipe import (
    DemoModelError,
    DemoModelOptions,
    Dtype,
    Variant,
    default_dir,
)

DESCRIPTION = (
    "Build a small mixture-of-experts model that vLLM serves. The weights are SmolLM2-135M-Instruct"
    f" from the package {GGUF_PACKAGE}; the tiny variant is random and needs nothing."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    defaults = DemoModelOptions()
    parser.description = DESCRIPTION
    parser.add_argument(
        "--variant",
        type=Variant,
        choices=list(Variant),
        default=defaults.variant,
        help="identical: experts equal the dense layer, so text equals the dense model's;"
        " distinct: experts differ a little, so logprobs show a mis-routed token;"
        " dense: no experts; tiny: random and fast (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help=f"directory (default: {default_dir('VARIANT')})")
    parser.add_argument("--experts", type=int, help="experts a layer (default: 4; tiny: 8)")
    parser.add_argument(
        "--dtype",
        type=Dtype,
        choices=list(Dtype),
        default=defaults.dtype,
        help="format of the weights (default: %(default)s)",
    )
    parser.add_argument("--gguf", type=Path, help=f"{GGUF_NAME}, if the package is not installed")
    parser.add_argument(
        "--force", action="store_true", help="build again, also over a demo model of other options"
    )


def run(args: argparse.Namespace) -> int:
    """Build as the arguments say; print progress to stderr and the directory to stdout."""
    try:
        options = DemoModelOptions(variant=args.variant, experts=args.experts, dtype=args.dtype)
        out = args.out or default_dir(args.variant)
        result = build(out, options, _print_progress, gguf=args.gguf, force=args.force)
    except DemoModelError as error:
        sys.stderr.write(f"splitwave demo-model: {error}\n")
        return 1
    sys.stdout.write(f"{result.path}\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command by itself."""
    parser = argparse.ArgumentParser(prog="splitwave demo-model")
    add_arguments(parser)
    return run(parser.parse_args(argv))


def _print_progress(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
