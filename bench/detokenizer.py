"""CPU time of text at the router, per token, as JSON on stdout.

    python -m bench.detokenizer > bench/results/detokenizer.json

Each case feeds the same completion to many streams in turn, a push at a time, as
a router's frame loop does, and counts the process's CPU time in its best of
several rounds. `decode_stream` is the tokenizers package's own streaming decoder
called from Python, for comparison.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from tokenizers.decoders import DecodeStream

from services.cli.up import build_model
from splitwave.text import Detokenizer, TextOptions, TextStream, Tokenizer

STREAMS = 64
ROUNDS = 7
TEXT = (
    "The capital of France is Paris, and it has been since 987. "
    "def f(x: int) -> int:\n    return x * 2  # naïve\n"
    "東京は日本の首都です。 🎉 Ελλάδα — «déjà vu» …\n"
) * 3
STOPS = ["\n\nUser:", "</answer>", "###", "<|end|>"]

Push = Callable[[Sequence[int]], object]


def us_per_token(open_stream: Callable[[], Push], token_ids: Sequence[int], step: int) -> float:
    """Best CPU microseconds a token over the rounds, `step` tokens a push."""
    pushes = [token_ids[start : start + step] for start in range(0, len(token_ids), step)]
    best_s = float("inf")
    for _ in range(ROUNDS):
        streams = [open_stream() for _ in range(STREAMS)]
        started_s = time.process_time()
        for pushed in pushes:
            for push in streams:
                push(pushed)
        best_s = min(best_s, time.process_time() - started_s)
    return best_s / (STREAMS * len(token_ids)) * 1e6


def cases(tokenizer: Tokenizer) -> dict[str, tuple[Callable[[], Push], int]]:
    """Name to what opens a stream, and tokens a push."""

    def text_stream(stops: Sequence[str]) -> Callable[[], Push]:
        return lambda: TextStream(tokenizer, TextOptions(stop=stops)).push

    def decode_stream() -> Push:
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token_ids: stream.step(tokenizer.backend, token_ids[0])

    return {
        "detokenizer": (lambda: Detokenizer(tokenizer).push, 1),
        "detokenizer_8_tokens_a_push": (lambda: Detokenizer(tokenizer).push, 8),
        "text_stream": (text_stream([]), 1),
        "text_stream_4_stops": (text_stream(STOPS), 1),
        "text_stream_16_stops": (
            text_stream([f"{stop}{i}" for i in range(4) for stop in STOPS]),
            1,
        ),
        "decode_stream": (decode_stream, 1),
    }


def encode_us_per_char(tokenizer: Tokenizer) -> float:
    """Best CPU microseconds a character of a prompt."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        started_s = time.process_time()
        tokenizer.encode(TEXT)
        best_s = min(best_s, time.process_time() - started_s)
    return best_s / len(TEXT) * 1e6


def git(*arguments: str) -> str:
    """Output of a git command in this checkout; empty outside of one."""
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parents[1]), *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip()


def cpu_model() -> str:
    """Name of the processor, where the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="its directory; default: the demo's, built")
    args = parser.parse_args()
    model = args.model or build_model("demo", lambda who, what: None)
    tokenizer = Tokenizer.load(model)
    token_ids = tokenizer.encode(TEXT)
    report = {
        "command": "python -m bench.detokenizer",
        "model": model.name,
        "git_sha": git("rev-parse", "HEAD"),
        "git_dirty": bool(git("status", "--porcelain", "--", "splitwave/text", __file__)),
        "python": platform.python_version(),
        "tokenizers": version("tokenizers"),
        "cpu": cpu_model(),
        "streams": STREAMS,
        "rounds": ROUNDS,
        "tokens_a_stream": len(token_ids),
        "cpu_us_per_token": {
            name: round(us_per_token(open_stream, token_ids, step), 3)
            for name, (open_stream, step) in cases(tokenizer).items()
        },
        "encode_cpu_us_per_char": round(encode_us_per_char(tokenizer), 3),
    }
    json.dump(report, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
