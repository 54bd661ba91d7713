"""Workloads as files: who asks when, for how much, and what counts as good service."""

import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("workloads")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a prompt in token ids, and how many tokens must come back."""

    stream: int
    prompt: tuple[int, ...]
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a file says. Lengths are tokens, lowest and highest."""

    name: str
    model: str
    seed: int
    rounds: int
    systems: tuple[str, ...]
    requests_per_stream: Mapping[int, int]
    """By how many streams there are at once."""
    prompt_tokens: tuple[int, int]
    completion_tokens: tuple[int, int]
    token_ids: tuple[int, int]
    ttft_max_ms: float
    tpot_max_ms: float
    step_ms: float
    """Pace of backends that compute nothing."""

    @classmethod
    def read(cls, name: str) -> "Workload":
        """Read `workloads/NAME.toml`. Raises ValueError for an arrival that nobody drives."""
        told = tomllib.loads((FOLDER / f"{name}.toml").read_text())
        arrival, lengths, slo = told["arrival"], told["lengths"], told["slo"]
        if arrival["kind"] != "closed":
            raise ValueError(f"arrival.kind: {arrival['kind']!r} is not driven here; use 'closed'")
        return cls(
            name=name,
            model=told["model"],
            seed=told["seed"],
            rounds=told["rounds"],
            systems=tuple(told["systems"]),
            requests_per_stream=dict(
                zip(arrival["streams"], arrival["requests_per_stream"], strict=True)
            ),
            prompt_tokens=tuple(lengths["prompt_tokens"]),
            completion_tokens=tuple(lengths["completion_tokens"]),
            token_ids=tuple(lengths["token_ids"]),
            ttft_max_ms=slo["ttft_ms"],
            tpot_max_ms=slo["tpot_ms"],
            step_ms=told.get("backends", {}).get("step_ms", 0.0),
        )

    def asks(self, streams: int, round_number: int) -> list[Ask]:
        """The requests of one round: the same for every system, new in every round."""
        draw = random.Random(f"{self.seed}/{streams}/{round_number}")
        return [
            Ask(stream, self._prompt(draw), draw.randint(*self.completion_tokens))
            for stream in range(streams)
            for _ in range(self.requests_per_stream[streams])
        ]

    def _prompt(self, draw: random.Random) -> tuple[int, ...]:
        length = draw.randint(*self.prompt_tokens)
        return tuple(draw.randint(*self.token_ids) for _ in range(length))
