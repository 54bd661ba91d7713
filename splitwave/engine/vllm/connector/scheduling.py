"""The connector's scheduler half: leases, releases, and how much a pull has to bring."""

import time
from collections.abc import Iterable
from typing import Any  # vLLM's objects are untyped here

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)

from splitwave.engine.vllm.connector.messages import HandoffMetadata, PulledBytes
from splitwave.engine.vllm.progress import POLL_S
from splitwave.engine.vllm.seams import require_attributes
from splitwave.engine.vllm.switches import Fault, fault, nixl_progress_thread_wanted

EXPIRES_AT = "splitwave_expires_at_s"
"""Key in a finished prefill's kv_transfer_params: the lease's end on CLOCK_MONOTONIC, seconds."""


class HandoffScheduler(NixlPullConnectorScheduler):
    """Knows the leases of finished prefills and the pulls of waiting decodes.

    Invariants:
      a lease is here from the step its request finished in until a worker's report that it was
      pulled, released or expired has come back;
      a pull is here from the step that posts it until its request ends or makes its first step.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:  # vLLM's
        super().__init__(vllm_config, engine_id, kv_cache_config)
        require_attributes(self, ("_reqs_need_send", "_reqs_need_recv"))
        _assert_one_clock()
        self._counts_remote = not fault(Fault.NO_REMOTE_COUNT)
        self._expires_at_s: dict[str, float] = {}
        self._to_release: set[str] = set()
        self._pulled_bytes: dict[str, int] = {}
        role = vllm_config.kv_transfer_config.kv_role
        self.polls = role != "kv_consumer" and not nixl_progress_thread_wanted()
        """True if others can read from here only while this engine steps."""
        self._stepped_at_s = 0.0
        self.pulls = 0
        self.bytes_pulled = 0

    @property
    def leases_live(self) -> int:
        """Finished prefills whose blocks are held now."""
        return len(self._expires_at_s)

    def poll_is_due(self, now_s: float) -> bool:
        """True if no step has polled NIXL for POLL_S, and somebody may be reading."""
        return self.polls and now_s >= self._stepped_at_s + POLL_S

    def release(self, request_ids: Iterable[str]) -> None:
        """End these leases with the next step. Ids that hold nothing are ignored.

        A lease that is pulled or expires meanwhile ends so: a worker reports it once, whichever
        comes first.
        """
        self._to_release.update(x for x in request_ids if x in self._expires_at_s)

    def pulled_bytes(self, request_id: str) -> int | None:
        """Bytes that a finished pull moved; None if this request had nothing to pull."""
        return self._pulled_bytes.get(request_id)

    def get_num_new_matched_tokens(
        self,
        request: Any,
        num_computed_tokens: int,  # vLLM's Request
    ) -> tuple[int, bool]:
        """Count the prompt tokens that prefill holds, which may be one fewer than there are.

        vLLM counts all of them, so a token sampled by prefill would need KV that nobody has.
        """
        params = request.kv_transfer_params or {}
        remote_tokens = params.get("remote_num_tokens")
        if not (params.get("do_remote_prefill") and remote_tokens and self._counts_remote):
            matched: tuple[int, bool] = super().get_num_new_matched_tokens(
                request, num_computed_tokens
            )
            return matched
        missing = remote_tokens - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: Any,
        num_external_tokens: int,  # vLLM's
    ) -> None:
        """Note a pull that will be posted with this step."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and num_external_tokens > 0:
            self._pulled_bytes[request.request_id] = 0
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(
        self,
        request: Any,
        block_ids: Any,  # vLLM's
    ) -> tuple[bool, dict[str, Any] | None]:
        """Begin a lease if blocks stay behind, and say in the parameters when it ends.

        The figure is the one that workers are given. They count it from when they are told,
        never sooner, and a heartbeat only prolongs it: the true end is not before it.
        """
        self._pulled_bytes.pop(request.request_id, None)
        holds, params = super().request_finished(request, block_ids)
        if holds:
            assert params is not None
            expires_at_s = self._reqs_need_send[request.request_id]
            self._expires_at_s[request.request_id] = expires_at_s
            params[EXPIRES_AT] = expires_at_s
        return holds, params

    def build_connector_meta(self, scheduler_output: Any) -> HandoffMetadata:  # vLLM's
        """Add the releases to what this step tells the workers."""
        self._stepped_at_s = time.monotonic()
        stock = super().build_connector_meta(scheduler_output)
        released, self._to_release = frozenset(self._to_release), set()
        return HandoffMetadata(stock, released)

    def update_connector_output(self, connector_output: Any) -> None:  # vLLM's
        """Take in which leases ended and what pulls moved."""
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_sending or ():
            self._expires_at_s.pop(request_id, None)
            self._to_release.discard(request_id)
        received = connector_output.finished_recving or set()
        self.pulls += len(received - connector_output.failed_recving)
        pulled = connector_output.kv_connector_worker_meta
        if pulled is None:
            return
        assert isinstance(pulled, PulledBytes)
        for request_id, count in pulled.by_request.items():
            self.bytes_pulled += count
            if request_id in self._pulled_bytes:
                self._pulled_bytes[request_id] += count


def _assert_one_clock() -> None:
    """vLLM stamps leases by perf_counter; a worker compares them with time.monotonic."""
    clocks = {time.get_clock_info(name).implementation for name in ("perf_counter", "monotonic")}
    assert len(clocks) == 1, f"perf_counter and monotonic are different clocks here: {clocks}"
