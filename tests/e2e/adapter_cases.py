"""What the adapter's e2e tests generate: prompts and sampling features, the same on both sides."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # a test's keywords

from splitwave.core.generation import Sampling
from splitwave.engine.port import Role
from splitwave.engine.vllm.config import VllmGroupSettings

BLOCK = 32
EOS = 259
VOCABULARY = 256
"""Ids below are bytes; the tiny model's special ids follow."""
LENGTHS = (
    1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 77, 100, 127,
    128, 129, 160, 191, 192, 193, 255, 256, 257, 300, 400, 511,
)  # fmt: skip
NEW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One generation, named for what it shows."""

    name: str
    token_ids: list[int]
    sampling: Sampling


def prompt(length: int, seed: int = 1) -> list[int]:
    """Return a fixed random prompt."""
    source = random.Random(1000 * seed + length)
    return [source.randrange(VOCABULARY) for _ in range(length)]


def greedy(max_tokens: int = NEW_TOKENS, **changes: Any) -> Sampling:
    """Return greedy sampling that runs to its length, with changes."""
    fields = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | changes
    return Sampling(**fields)


def cases() -> list[Case]:
    """List every generation that must equal the aggregated run."""
    lengths = [Case(f"length {n}", prompt(n), greedy()) for n in LENGTHS]
    stops: dict[str, Any] = {"ignore_eos": False, "eos_token_ids": (EOS,)}
    to_eos: dict[str, Any] = {"logit_bias": {EOS: 100.0}}
    features = {
        "logprobs": greedy(logprobs=5),
        "logprobs of the sampled token alone": greedy(logprobs=0),
        "logit bias": greedy(logit_bias={7: 100.0, 9: 99.0}),
        "top_k 1 with a temperature": greedy(temperature=0.7, top_k=1),
        "min_p 1": greedy(temperature=1.0, min_p=1.0),
        "eos at the first token": greedy(**stops, **to_eos),
        "eos ignored": greedy(eos_token_ids=(EOS,), **to_eos),
        "stop token at the first token": greedy(logit_bias={7: 100.0}, stop_token_ids=(7,)),
        "stop token among the first bytes": greedy(64, stop_token_ids=tuple(range(0, 256, 16))),
        "max_tokens 1": greedy(1),
        "seeded temperature": greedy(temperature=0.8, seed=11),
        "seeded temperature, top_p and top_k": greedy(
            temperature=1.1, seed=12, top_p=0.9, top_k=20
        ),
        "presence penalty": greedy(presence_penalty=1.5),
        "frequency penalty": greedy(frequency_penalty=1.5),
        "repetition penalty": greedy(repetition_penalty=1.8),
        "min_tokens holds eos back": greedy(min_tokens=4, **stops, **to_eos),
        "min_tokens holds a stop token back": greedy(
            min_tokens=3, logit_bias={7: 100.0}, stop_token_ids=(7,)
        ),
        "seeded, eos at the first token": greedy(temperature=0.8, seed=13, **stops, **to_eos),
        "seeded, max_tokens 1": greedy(1, temperature=0.8, seed=14),
    }
    return lengths + [Case(name, prompt(70, 2), sampling) for name, sampling in features.items()]


def routing_cases() -> list[Case]:
    """List few and short generations with log probabilities, for a model of full size."""
    lengths = (2, BLOCK - 1, BLOCK, BLOCK + 1, 70)
    return [Case(f"length {n}", prompt(n, 3), greedy(6, logprobs=5)) for n in lengths]


def settings(
    role: Role, model: Path, log_dir: Path, port: int, **changes: Any
) -> VllmGroupSettings:
    """Return settings of a small group on the CPU."""
    fields: dict[str, Any] = {
        "role": role,
        "mode": f"{role}_cpu_eager",
        "model_path": model,
        "served_model": "tiny",
        "group_id": f"{role}-0",
        "epoch": 1,
        "log_dir": log_dir,
        "side_channel_port": port,
        "start_timeout_s": 120.0,
    }
    return VllmGroupSettings(**fields | changes)
