"""The commands of docs/clients.md, and how they are run as they stand there."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.clients.environments import ROOT, client

PAGE = ROOT / "docs/clients.md"
BLOCK = re.compile(r"<!-- (run|serve): ([\w-]+) -->\n```(\w+)\n(.*?)```", re.S)


@dataclass(frozen=True, slots=True)
class Target:
    """The stack that a command is pointed at, in place of the page's addresses."""

    http: str
    grpc: str
    model: str
    model_dir: Path
    smg: str = ""
    smg_metrics_port: int = 0

    def point(self, text: str) -> str:
        """Replace the page's addresses by those of the stack."""
        host, _, port = self.smg.rpartition(":")
        replaced = {
            "127.0.0.1:8080": self.http,
            "127.0.0.1:8090": self.grpc,
            "127.0.0.1:30000": self.smg,
            "--port 30000": f"--port {port}",
            "--prometheus-port 30001": f"--prometheus-port {self.smg_metrics_port}",
            ".venv/bin/python": sys.executable,
        }
        assert host in ("", "127.0.0.1")
        return re.sub("|".join(map(re.escape, replaced)), lambda m: replaced[m[0]], text)


def blocks() -> Mapping[tuple[str, str], tuple[str, str]]:
    """Language and text of each block that is run, by its kind (run, serve) and name."""
    found = BLOCK.findall(PAGE.read_text())
    return {(kind, name): (language, text) for kind, name, language, text in found}


def command(name: str, target: Target, kind: str = "run") -> tuple[list[str], dict[str, str]]:
    """Argument vector and environment of a documented block."""
    language, text = blocks()[kind, name]
    text = target.point(text)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "MODEL": target.model,
        "MODEL_DIR": str(target.model_dir),
    }
    if name != "vllm-bench":  # That one comes with the CPU stack.
        own = client(name)
        environment["PATH"] = f"{own}:{environment['PATH']}"
    if language == "python":
        return [str(own / "python"), "-c", text], environment
    return ["bash", "-euo", "pipefail", "-c", text], environment


def run(name: str, target: Target, timeout_s: float = 240.0) -> str:
    """Run a documented block and return what it printed; AssertionError if it failed."""
    argv, environment = command(name, target)
    done = subprocess.run(
        argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout
