"""The class that vLLM instantiates, once beside the scheduler and once in each worker."""

import time
from typing import Any  # vLLM's objects are untyped here

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from splitwave.engine.vllm.connector.messages import PulledBytes
from splitwave.engine.vllm.connector.scheduling import HandoffScheduler
from splitwave.engine.vllm.connector.transfer import HandoffWorker


class SplitwaveNixlConnector(NixlPullConnector):
    """vLLM's NIXL pull connector with our scheduler and worker halves in place of its own."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        # Past NixlPullConnector, whose constructor would open a second NIXL agent.
        super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
        args = (vllm_config, self.engine_id, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = HandoffScheduler(*args)
        else:
            self.connector_worker = HandoffWorker(*args)

    @property
    def handoffs(self) -> HandoffScheduler:
        """The scheduler half; only in the scheduler's process."""
        half = self.connector_scheduler
        assert isinstance(half, HandoffScheduler), "asked for in a worker"
        return half

    def has_pending_push_work(self) -> bool:
        """True if an idle engine has to step, so that those who read from it can go on."""
        return self.handoffs.poll_is_due(time.monotonic())

    def build_connector_worker_meta(self) -> PulledBytes | None:
        """What this worker's pulls have moved since the last step."""
        half = self.connector_worker
        assert isinstance(half, HandoffWorker), "asked for beside the scheduler"
        return half.take_pulled_bytes()
