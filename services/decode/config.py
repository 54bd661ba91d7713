"""Settings of a decode worker."""

from dataclasses import dataclass
from typing import ClassVar

from splitwave.core.grant import DeskSettings
from splitwave.runtime.config import require, setting
from splitwave.runtime.worker import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """One decode worker."""

    service: ClassVar[str] = "decode"

    reattach_s: float = setting(2.0, "how long a broken session is kept")
    kept_max: int = setting(
        4096, "messages that a router may leave unacknowledged before its session ends"
    )
    frame_wait_s: float = setting(
        0.001, "how long a frame waits for the ranks that are late in a lock-step"
    )
    sweep_s: float = setting(0.25, "how often deadlines, stalls and broken sessions are checked")
    confirm_timeout_s: float = setting(2.0, "how long prefill may take to confirm a handoff")
    release_timeout_s: float = setting(2.0, "how long prefill may take to release one")
    abort_wait_s: float = setting(
        1.0, "after this an aborted request's pull counts as ended though the engine did not say so"
    )
    grant_ttl_s: float = setting(2.0, "how long an unspent grant lives")
    grant_float_max: int = setting(4, "grants that one session is given before it asks")
    grant_float_share: float = setting(0.25, "share of the free room that all such grants may have")
    grant_blocks: int = setting(16, "KV blocks of such a grant")
    asks_max: int = setting(1024, "asks for room that may wait")

    def __post_init__(self) -> None:
        WorkerConfig.__post_init__(self)
        for name in ("reattach_s", "frame_wait_s", "abort_wait_s"):
            require(self, name, getattr(self, name) >= 0, "set it to 0 or more seconds")
        for name in ("sweep_s", "confirm_timeout_s", "release_timeout_s", "grant_ttl_s"):
            require(self, name, getattr(self, name) > 0, "set it above 0 seconds")
        for name in ("kept_max", "grant_blocks", "asks_max"):
            require(self, name, getattr(self, name) >= 1, "set it to at least 1")
        require(self, "grant_float_max", self.grant_float_max >= 0, "set it to 0 or more")
        in_range = 0.0 <= self.grant_float_share <= 1.0
        require(self, "grant_float_share", in_range, "set it to a share from 0 to 1")

    def desk(self) -> DeskSettings:
        """How grants are handed out."""
        return DeskSettings(
            ttl_s=self.grant_ttl_s,
            float_max=self.grant_float_max,
            float_share=self.grant_float_share,
            grant_blocks=self.grant_blocks,
            asks_max=self.asks_max,
        )
