"""How much of everything the battery does: by level, and by how fast the model steps."""

from dataclasses import dataclass, replace
from typing import Any  # keywords of `replace`

from splitwave.core.evidence import Level
from splitwave.core.mode import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Counts are of requests, steps or tokens. Two certificates of one scale mean the same."""

    seed: int = 6
    oracle_cases: int = 8
    oracle_tokens: int = 24
    alone_cases: int = 64
    """Of the oracle's cases, how many run alone on each rank; all of them run at once."""
    prompt_max_tokens: int = 257
    """Longest prompt of the oracle's cases; the envelope may end earlier."""
    batch_cases: int = 8
    """Requests at once, a rank, where rows must not touch each other."""
    batch_tokens: int = 16
    grid_sizes_max: int = 256
    """Sizes that are walked through; above it, so many of them evenly spread."""
    hammer_steps: int = 192
    hammer_size_max: int = 256
    """Largest batch of a mode without a grid that the hammer lets a rank run."""
    pause_s: float = 0.4
    """Within this a group without work votes and pauses, on a busy machine too; what comes after
    an abort has come."""
    storm_requests: int = 48
    storm_tokens: int = 3
    storm_limit_s: float = 6.0
    """A request of a few tokens that takes longer waited on a rank that slept."""
    abort_requests: int = 64
    abort_tokens: int = 24
    soak_s: float = 120.0
    soak_control_s: float = 24.0
    soak_steps_min: int = 400
    """Steps of each rank below which the soak goes on."""
    drift_share: float = 0.1
    """Of these, at either end, what is compared: the last tenth with the first."""
    soak_share: float = 0.5
    """Share of the seats that are kept busy."""
    soak_prompt_tokens: int = 16
    soak_tokens: int = 24
    repeats: int = 20
    repeat_prompt_tokens: int = 960
    """So long that the noise of a step's cost is small beside it."""
    repeat_tokens: int = 12
    repeat_control: int = 12
    drift_max: float = 1.25
    memory_growth_max: float = 0.02
    """Of what a rank's process holds; allocators round, so `memory_slack_bytes` are always free."""
    memory_slack_bytes: int = 24 * 2**20
    crowd_share: float = 2.0
    """Requests at once where some must wait, in seats."""
    crowd_tokens: int = 6
    accuracy_items: int = 126
    gsm8k_items: int = 100
    """Word problems, where the data set is there."""
    agreement_min: float = 0.99


def scale_for(level: Level, device: Device, *, weights_bytes: int) -> Scale:
    """The scale of a level on a device; with large weights on a CPU there are fewer tokens."""
    scale = Scale()
    if device is Device.GPU:
        # Nothing else is on a GPU; and a GPU makes in minutes what a CPU makes in a day.
        scale = replace(
            scale, drift_max=1.05, hammer_steps=4096, soak_s=1800.0, soak_control_s=120.0,
            storm_requests=512, abort_requests=1024, accuracy_items=1000,
        )  # fmt: skip
    is_heavy = device is Device.CPU and weights_bytes >= HEAVY_BYTES
    if is_heavy:
        scale = replace(scale, **_HEAVY)
    if level is Level.SMOKE:
        scale = replace(scale, **_SMOKE | (_SMOKE_HEAVY if is_heavy else {}))
    return scale


HEAVY_BYTES = 256 * 2**20
"""Weights from which on a CPU prefills tens of tokens a second, not thousands."""

_HEAVY: dict[str, Any] = {
    "oracle_cases": 4,
    "oracle_tokens": 6,
    "alone_cases": 2,
    "prompt_max_tokens": 65,
    "batch_cases": 4,
    "batch_tokens": 6,
    "hammer_steps": 24,
    "hammer_size_max": 4,
    "pause_s": 1.2,
    "storm_requests": 12,
    "abort_requests": 8,
    "abort_tokens": 5,
    "soak_s": 25.0,
    "soak_control_s": 15.0,
    "soak_steps_min": 140,
    "drift_share": 0.2,
    "soak_share": 0.125,
    "soak_prompt_tokens": 4,
    "repeat_prompt_tokens": 32,
    "repeat_tokens": 3,
    "repeat_control": 10,
    "crowd_share": 1.1,
    "crowd_tokens": 3,
    "gsm8k_items": 4,
}
_SMOKE: dict[str, Any] = {
    "oracle_cases": 3,
    "oracle_tokens": 6,
    "prompt_max_tokens": 33,
    "grid_sizes_max": 4,
    "abort_requests": 8,
    "abort_tokens": 6,
}
_SMOKE_HEAVY: dict[str, Any] = {
    "oracle_cases": 2,
    "oracle_tokens": 3,
    "alone_cases": 1,
    "abort_requests": 4,
    "abort_tokens": 3,
    "crowd_tokens": 2,
}
