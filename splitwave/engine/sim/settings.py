"""Everything that a simulated group can be told, with units, checked when it is made."""

import hashlib
from dataclasses import dataclass, field, fields

from splitwave.core.mode import MODES
from splitwave.engine.port import GroupDescription, Role

_MODE = {Role.PREFILL: "prefill_cpu_eager", Role.DECODE: "decode_cpu_eager"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPause:
    """One rank stands still once. In lock-step its whole group waits for it."""

    rank: int
    at_step: int
    """The rank's executed step, dummy steps included, counted from 1."""
    pause_s: float

    def __post_init__(self) -> None:
        _require(self, "rank", self.rank >= 0, "set it to a rank of the group, 0 or more")
        _require(self, "at_step", self.at_step >= 1, "steps count from 1")
        _require(self, "pause_s", self.pause_s > 0, "set it to seconds above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDeath:
    """One rank's process ends in the middle of a step, and its group with it."""

    rank: int
    at_step: int
    """The rank's executed step, dummy steps included, counted from 1."""

    def __post_init__(self) -> None:
        _require(self, "rank", self.rank >= 0, "set it to a rank of the group, 0 or more")
        _require(self, "at_step", self.at_step >= 1, "steps count from 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimFaults:
    """What goes wrong, and how often. Each draw depends on `seed` and on what it strikes alone.

    So a fault hits the same step or request whatever else runs. Preemption is no
    fault to ask for: it comes of too few blocks.
    """

    seed: int = 0
    slow_step_rate: float = 0.0
    """Share of a rank's steps that take `slow_step_factor` times as long, 0 to 1."""
    slow_step_factor: float = 10.0
    pause_rate: float = 0.0
    """Share of a rank's steps before which it stands still for `pause_s`, 0 to 1."""
    pause_s: float = 1.0
    """Seconds of one such pause."""
    pauses: tuple[RankPause, ...] = ()
    """Pauses at steps known beforehand."""
    death: RankDeath | None = None
    pull_failure_rate: float = 0.0
    """Decode: share of pulls that fail once the time they take has passed, 0 to 1."""
    pull_delay_rate: float = 0.0
    """Decode: share of pulls that take `pull_delay_s` longer, 0 to 1."""
    pull_delay_s: float = 1.0
    """Seconds added to such a pull. Longer than the lease: it reads what may be reused."""
    stale_pull_rate: float = 0.0
    """Decode: share of pulls that read reused blocks and say nothing, 0 to 1."""
    out_of_mode_step: int = 0
    """Step of rank 0, from 1, that runs as `odd`, which is of no mode; 0: none. Not after the
    worker has started over."""
    release_ignored: bool = False
    """Prefill: `release` does nothing. The mutant that tests of clean-up must catch."""

    def __post_init__(self) -> None:
        for name in ("slow_step", "pause", "pull_failure", "pull_delay", "stale_pull"):
            rate = getattr(self, f"{name}_rate")
            _require(self, f"{name}_rate", 0.0 <= rate <= 1.0, "set it to a share from 0 to 1")
        for name in ("slow_step_factor", "pause_s", "pull_delay_s"):
            _require(self, name, getattr(self, name) > 0, "set it above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """One simulated group. Seconds are simulated; `time_scale` turns them into the loop's."""

    role: Role
    group_id: str = "sim"
    epoch: int = 1
    """Start of the group that this is, from 1."""
    model: str = "sim"
    """Served model name."""
    model_seed: int = 0
    """Seed of the simulated model: prefill and decode must agree, as they must on weights."""
    mode: str = ""
    """Execution mode to show in the description; empty: the role's eager CPU mode."""
    step_kind: str = "eager"
    """Step kind under which every step is counted."""
    ranks: int = 1
    """Data-parallel ranks of the group."""
    lockstep: bool = True
    """All ranks step together, at the pace of the slowest; else each on its own."""
    seats_per_rank: int = 64
    """Requests that one rank steps or pulls for at once."""
    blocks_per_rank: int = 1024
    """KV blocks of one rank."""
    block_size_tokens: int = 16
    """Tokens of one block."""
    block_bytes: int = 65_536
    """Bytes of one block: what a pull moves for each."""
    model_len_max_tokens: int = 4096
    """Longest prompt and generation together."""
    batch_max_tokens: int = 2048
    """Tokens that one rank computes in one step; longer prompts are chunked."""
    step_fixed_s: float = 0.001
    """Seconds of any step, a dummy step included."""
    step_per_token_s: float = 0.0
    """Seconds added for each token of the step."""
    step_per_prefill_token_s: float = 0.0
    """Seconds added for each token beyond one a request."""
    pull_fixed_s: float = 0.001
    """Seconds of any pull."""
    pull_bytes_per_s: float = 1e10
    """Rate at which a pull moves bytes."""
    lease_ttl_s: float = 30.0
    """Prefill: seconds that a finished prompt's blocks are held."""
    eos_rate: float = 0.0
    """Share of positions at which the model samples its end-of-sequence token, 0 to 1."""
    recites: bytes = b""
    """What the model says over and over, by position: text that spans tokens. Empty: made up."""
    time_scale: float = 1.0
    """Seconds of the loop's clock for one simulated second, the lease's included."""
    faults: SimFaults = field(default_factory=SimFaults)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type is int and item.name != "model_seed":
                _require(self, item.name, value >= 1, "set it to at least 1")
            if item.type is str and item.name != "mode":
                _require(self, item.name, value != "", "give it a name")
        for name in ("step_fixed_s", "pull_bytes_per_s", "lease_ttl_s", "time_scale"):
            _require(self, name, getattr(self, name) > 0, "set it above 0")
        for name in ("step_per_token_s", "step_per_prefill_token_s", "pull_fixed_s"):
            _require(self, name, getattr(self, name) >= 0, "set it to 0 or more")
        _require(self, "eos_rate", 0.0 <= self.eos_rate <= 1.0, "set it to a share from 0 to 1")
        self._check_sizes()

    def _check_sizes(self) -> None:
        capacity_tokens = self.blocks_per_rank * self.block_size_tokens
        _require(
            self,
            "model_len_max_tokens",
            self.model_len_max_tokens <= capacity_tokens,
            f"one request must fit a rank's {capacity_tokens} tokens of KV: "
            "lower it or raise blocks_per_rank",
        )
        _require(
            self,
            "batch_max_tokens",
            self.batch_max_tokens >= self.seats_per_rank,
            f"each of the {self.seats_per_rank} seats needs a token a step: "
            "raise it or lower seats_per_rank",
        )
        for fault in (*self.faults.pauses, self.faults.death):
            if fault is not None:
                fix = f"the group has ranks 0 to {self.ranks - 1}"
                _require(fault, "rank", fault.rank < self.ranks, fix)

    @property
    def engine_id(self) -> str:
        """Names this start of the group to peers that pull from it."""
        return f"{self.group_id}#{self.epoch}"

    @property
    def kv_layout(self) -> str:
        """Digest of what two caches must agree on: model, its seed, block size in tokens, bytes."""
        parts = (self.model, self.model_seed, self.block_size_tokens, self.block_bytes)
        return "sim-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def description(self) -> GroupDescription:
        """What the started group is, in the loop's seconds."""
        mode = MODES.get(self.mode)
        return GroupDescription(
            group_id=self.group_id,
            epoch=self.epoch,
            role=self.role,
            mode=self.mode or _MODE[self.role],
            model=self.model,
            ranks=self.ranks,
            block_size_tokens=self.block_size_tokens,
            blocks_per_rank=self.blocks_per_rank,
            seats_per_rank=self.seats_per_rank,
            model_len_max_tokens=self.model_len_max_tokens,
            batch_max_tokens=self.batch_max_tokens,
            block_bytes=self.block_bytes,
            kv_layout=self.kv_layout,
            lease_ttl_s=self.lease_ttl_s * self.time_scale if self.role is Role.PREFILL else 0.0,
            capture_grid=mode.dense_grid(self.seats_per_rank) if mode else (),
            versions={"sim": "1"},
        )


def _require(owner: object, name: str, holds: bool, fix: str) -> None:
    if not holds:
        raise ValueError(f"{type(owner).__name__}.{name} is {getattr(owner, name)!r}: {fix}")
