"""The connector's worker half: ends released leases, and counts the bytes of each pull."""

import logging
import time
from typing import Any  # vLLM's objects are untyped here

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from splitwave.engine.vllm.connector.messages import HandoffMetadata, PulledBytes
from splitwave.engine.vllm.polling import SharedAgent
from splitwave.engine.vllm.progress import POLL_S
from splitwave.engine.vllm.seams import require_attributes
from splitwave.engine.vllm.switches import Fault, fault, nixl_progress_thread_wanted

SLOW_PULL_S = 1.0
"""How late a transfer is reported under Fault.SLOW_PULLS."""

_log = logging.getLogger(__name__)

_WRAPPED_STATE = (
    "nixl_wrapper",
    "_reqs_to_send",
    "_reqs_to_process",
    "_recving_transfers",
    "consumer_notification_counts_by_req",
    "expected_consumer_notifications_by_req",
    "xfer_stats",
)


class HandoffWorker(NixlPullConnectorWorker):
    """Invariant: a lease that was sent here is reported as sent exactly once.

    Whoever takes it out of `_reqs_to_send` reports it: the pull's notification, the expiry
    sweep, or a release. The other two then find it gone.
    """

    nixl_wrapper: Any  # NIXL's agent, or ours around it

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:  # vLLM's
        super().__init__(vllm_config, engine_id, kv_cache_config)
        require_attributes(self, _WRAPPED_STATE)
        if not nixl_progress_thread_wanted():
            # Who reads has two threads too: handshakes run beside the steps.
            is_read = vllm_config.kv_transfer_config.kv_role != "kv_consumer"
            polls = is_read and not fault(Fault.NO_STEP_POLLS)
            # `_finish_shutdown` ends its polling; the process's end does too.
            self.nixl_wrapper = SharedAgent(self.nixl_wrapper, POLL_S if polls else None)
        self._released: set[str] = set()
        self._pulled_bytes: dict[str, int] = {}
        self._forgets_releases = fault(Fault.NO_RELEASE)
        self._counts_bytes = not fault(Fault.NO_BYTES)
        self._polled_since_s: dict[str, float] | None = {} if fault(Fault.SLOW_PULLS) else None

    def start_load_kv(self, metadata: HandoffMetadata) -> None:
        """Start this step's transfers and leases, then end those that are released."""
        super().start_load_kv(metadata)
        if self._forgets_releases:
            return
        for request_id in metadata.released:
            if self._reqs_to_send.pop(request_id, None) is None:
                continue
            self._reqs_to_process.discard(request_id)
            self.consumer_notification_counts_by_req.pop(request_id, None)
            self.expected_consumer_notifications_by_req.pop(request_id, None)
            self._released.add(request_id)

    def _finish_shutdown(self) -> None:
        if isinstance(self.nixl_wrapper, SharedAgent) and not self.nixl_wrapper.close():
            _log.warning("a poll of NIXL hangs: what it holds goes with the process")
            return
        super()._finish_shutdown()

    def get_transfer_results(self) -> Any:  # vLLM's KVConnectorTransferResults
        """Report released leases as sent, beside those that were pulled or have expired."""
        results = super().get_transfer_results()
        results.finished_sending |= self._released
        self._released = set()
        return results

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        """Poll each request's transfers on their own, to know whose bytes NIXL reports."""
        done: set[str] = set()
        failed: set[str] = set()
        for request_id in list(transfers):
            if self._is_slowed(request_id):
                continue
            moved = self.xfer_stats.data["bytes_transferred"]
            seen = len(moved)
            own = {request_id: transfers.pop(request_id)}
            own_done, own_failed = super()._pop_done_transfers(own)
            transfers.update(own)
            done |= own_done
            failed |= own_failed
            if self._counts_bytes and len(moved) > seen:
                count = sum(moved[seen:])
                self._pulled_bytes[request_id] = self._pulled_bytes.get(request_id, 0) + count
        return done, failed

    def _is_slowed(self, request_id: str) -> bool:
        if self._polled_since_s is None:
            return False
        now_s = time.monotonic()
        return now_s < self._polled_since_s.setdefault(request_id, now_s) + SLOW_PULL_S

    def take_pulled_bytes(self) -> PulledBytes | None:
        """Bytes moved since the last call, by request; None if none did."""
        if not self._pulled_bytes:
            return None
        taken, self._pulled_bytes = PulledBytes(self._pulled_bytes), {}
        return taken
