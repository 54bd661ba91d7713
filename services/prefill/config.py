"""Settings of a prefill worker."""

from dataclasses import dataclass
from typing import ClassVar

from splitwave.runtime.config import require, setting
from splitwave.runtime.worker import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """One prefill worker."""

    service: ClassVar[str] = "prefill"

    lease_margin_s: float = setting(
        1.0, "the worker's lease ends so much before the engine's, which proves the fence"
    )
    sweep_s: float = setting(0.1, "how often leases are checked for their end")
    queue_batches: int = setting(2, "batches of prompt tokens that one rank may have queued")

    def __post_init__(self) -> None:
        WorkerConfig.__post_init__(self)
        require(self, "lease_margin_s", self.lease_margin_s >= 0, "set it to 0 or more seconds")
        require(self, "sweep_s", self.sweep_s > 0, "set it above 0 seconds")
        require(self, "queue_batches", self.queue_batches >= 1, "set it to at least 1")
