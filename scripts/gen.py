"""Generate splitwave/v1alpha1 from the .proto files, into the folder given.

`gen.py splitwave/v1alpha1` renews what is checked in; a contract test generates into an empty
folder and compares. Only asyncio stubs are typed, since no program here serves or calls otherwise.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROTO = ROOT / "proto"
PACKAGE = Path("splitwave/v1alpha1")


def protoc(files: list[str], out: Path, *plugins: str) -> None:
    """Run protoc over some files; `plugins` are its output options without their folder."""
    if not files:
        return
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO}"]
    command += [f"{plugin}{out}" for plugin in plugins] + files
    tools = Path(sys.executable).parent  # protoc finds its plugins by name, on PATH
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, check=True, cwd=PROTO, env=environment)


def generate(target: Path) -> list[Path]:
    """Write the package's generated files to `target`, remove stale ones, return what is there."""
    sources = sorted((PROTO / PACKAGE).glob("*.proto"))
    services = [path for path in sources if re.search(r"^service ", path.read_text(), re.M)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        names = [str(path.relative_to(PROTO)) for path in sources]
        protoc(names, out, "--python_out=", "--mypy_out=quiet:")
        names = [str(path.relative_to(PROTO)) for path in services]
        protoc(names, out, "--grpc_python_out=", "--mypy_grpc_out=quiet,only_async:")
        for stale in target.glob("*_pb2*.py*"):
            stale.unlink()
        target.mkdir(parents=True, exist_ok=True)
        made = sorted((out / PACKAGE).glob("*"))
        return [Path(shutil.copy(path, target)) for path in made]


if __name__ == "__main__":
    print(f"{len(generate(Path(sys.argv[1])))} files in {sys.argv[1]}")
