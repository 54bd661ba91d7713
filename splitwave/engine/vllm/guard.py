"""The decode pool's scheduler: it decodes, or ends the request with a reason; it never prefills.

`GuardScheduler` stands on vLLM's Scheduler, `AsyncGuardScheduler` on its AsyncScheduler (the GPU
default), one mixin for both. What it refuses ends with FinishReason.ABORT (a failed pull with
ERROR) and stop_reason `guard:WHY`, once, with the step at hand.
"""

import enum
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # vLLM's objects are untyped here

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from splitwave.engine.vllm.connector.nixl import SplitwaveNixlConnector

PULLED = "splitwave_pulled"
"""Key in the kv_transfer_params of a decode request's first output: bytes and first_position."""

PULL_ENDED = "splitwave_pull_ended"
"""Key in the kv_transfer_params of the only output of a request that was aborted before its first:
nothing of its handoff is read any more. Such an output has no finish_reason."""

_HANDOFF_KEYS = (
    "remote_block_ids",
    "remote_engine_id",
    "remote_host",
    "remote_port",
    "remote_request_id",
    "tp_size",
)


class Why(enum.StrEnum):
    """Why the guard ended a request; its stop_reason is `guard:` and this."""

    NEEDS_PREFILL = "needs_prefill"
    """It came without a handoff, or the handoff leaves more than one token to compute."""
    BAD_HANDOFF = "bad_handoff"
    """Its handoff lacks a field, or names fewer blocks than its tokens fill."""
    FIRST_POSITION = "first_position"
    """Its first step would start at position 0: a one-token prompt without a kept token."""
    PREEMPTED = "preempted"
    """Its KV was given up for others; only a prefill could restore it."""
    NO_BYTES = "no_bytes"
    """Its pull is done, yet nothing was moved."""
    PULL_FAILED = "pull_failed"
    """Its pull failed."""


@dataclass(frozen=True, slots=True)
class _First:
    """What the first output of a request will say."""

    bytes_moved: int
    position: int


def handoff_refusal(
    params: Mapping[str, Any] | None, *, tokens: int, block_size_tokens: int
) -> Why | None:
    """Why a decode engine must not take this request, or None.

    `params` are its kv_transfer_params, `tokens` its prompt's length, the token that prefill
    sampled included. Decode may compute the last token alone, and that from position 1 on: vLLM
    runs the step of a one-token prompt eagerly, and all ranks follow.
    """
    if params is None or not params.get("do_remote_prefill"):
        return Why.NEEDS_PREFILL
    if any(params.get(key) is None for key in _HANDOFF_KEYS):
        return Why.BAD_HANDOFF
    if tokens < 2:
        return Why.FIRST_POSITION
    remote_tokens = params.get("remote_num_tokens") or 0
    if remote_tokens > tokens:
        return Why.BAD_HANDOFF
    if remote_tokens < tokens - 1:
        return Why.NEEDS_PREFILL
    block_count = math.ceil(remote_tokens / block_size_tokens)
    if any(len(group) < block_count for group in params["remote_block_ids"]):
        return Why.BAD_HANDOFF
    return None


class GuardMixin(Scheduler if TYPE_CHECKING else object):  # type: ignore[misc]  # two bases, one mixin
    """Invariants of every step it schedules:

    G1  one token a request, speculated ones besides;
    G2  a request's first token has position >= 1;
    G3  a request that ends by the guard has one output, and no token after it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # vLLM's, passed through
        super().__init__(*args, **kwargs)
        if not isinstance(self.connector, SplitwaveNixlConnector):
            raise ValueError(
                "a guarded decode engine needs kv_transfer_config.kv_connector "
                "SplitwaveNixlConnector (kv_connector_module_path splitwave.engine.vllm.connector)"
            )
        if self.recompute_kv_load_failures:
            raise ValueError(
                "kv_load_failure_policy of a guarded decode engine must be 'fail': "
                "'recompute' would prefill here"
            )
        self.guard_refusals: Counter[str] = Counter()
        self._tokens_max = 1 + max(self.num_spec_tokens, self.num_lookahead_tokens)
        self._unsent: list[tuple[int, EngineCoreOutput]] = []
        self._blocked: dict[str, Why] = {}
        self._failed_pulls: set[str] = set()
        self._first: dict[str, _First] = {}
        self._pulling_aborted: set[str] = set()

    def add_request(self, request: Any) -> None:  # vLLM's Request
        """Queue a request that can decode here; end any other."""
        if request.abort_immediately or request.request_id in self.requests:
            # The first only tells prefill to free its blocks; the second is vLLM's to judge.
            super().add_request(request)
            return
        why = handoff_refusal(
            request.kv_transfer_params,
            tokens=request.num_tokens,
            block_size_tokens=self.block_size,
        )
        if why is None and request.skip_reading_prefix_cache:
            why = Why.NEEDS_PREFILL  # vLLM would not pull, and compute the whole prompt
        if why is None:
            super().add_request(request)
            return
        self._note_end(request, why)
        if self.finished_req_ids_dict is not None:
            self.finished_req_ids_dict[request.client_index].add(request.request_id)

    def schedule(self, throttle_prefills: bool = False) -> Any:  # vLLM's SchedulerOutput
        """Schedule one step, and end what only a prefill could bring further."""
        output = super().schedule(throttle_prefills)
        for request_id in tuple(output.preempted_req_ids or ()):
            self._end(request_id, Why.PREEMPTED)
        for request_id, why in self._blocked.items():
            self._end(request_id, why)
        self._blocked.clear()
        for new in output.scheduled_new_reqs:
            moved = self.connector.handoffs.pulled_bytes(new.req_id)
            self._first[new.req_id] = _First(moved or 0, new.num_computed_tokens)
            assert new.num_computed_tokens >= 1, "G2"
        assert max(output.num_scheduled_tokens.values(), default=0) <= self._tokens_max, "G1"
        return output

    def _handle_blocked_waiting_request(self, request: Any) -> bool:  # vLLM's Request
        """vLLM asks this of each waiting request before it plans a token of it."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        why = self._why_not_now(request)
        if why is not None:
            self._blocked[request.request_id] = why
        return why is None

    def _why_not_now(self, request: Any) -> Why | None:  # vLLM's Request
        """Why this waiting request must not be scheduled, or None."""
        if request.num_preemptions > 0:
            return Why.PREEMPTED
        if request.num_computed_tokens == 0:
            # Not pulled yet. Had it been, and come back empty, its handoff would be used up.
            return None if request.kv_transfer_params["do_remote_prefill"] else Why.PULL_FAILED
        if self.connector.handoffs.pulled_bytes(request.request_id) == 0:
            return Why.NO_BYTES
        if request.num_tokens - request.num_computed_tokens > 1:
            return Why.NEEDS_PREFILL
        return None

    def _handle_failed_recving(self, failed_req_ids: set[str]) -> set[str]:
        ended: set[str] = super()._handle_failed_recving(failed_req_ids)
        self._failed_pulls |= ended
        return ended

    def _handle_invalid_blocks(
        self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        ended: set[str] = super()._handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens)
        self._failed_pulls |= ended
        return ended

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:  # vLLM's
        """End requests from outside a step's outputs: no token of them is sent any more.

        For those aborted before their first output it is said when nothing is pulled any more:
        at once, or with `_free_blocks`, which vLLM puts off until a running transfer has ended.
        """
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._first.pop(request.request_id, None)
            if finished_status != RequestStatus.FINISHED_ABORTED or request.num_output_tokens:
                continue
            if request.request_id in self.requests:
                self._pulling_aborted.add(request.request_id)
            elif not self._is_told(request.request_id):
                self._note_pull_ended(request)
        return ended

    def _free_blocks(self, request: Any) -> None:  # vLLM's Request
        super()._free_blocks(request)
        if request.request_id in self._pulling_aborted:
            self._pulling_aborted.remove(request.request_id)
            self._note_pull_ended(request)

    def _is_told(self, request_id: str) -> bool:
        """True if the guard's end of this request is about to be sent."""
        return any(output.request_id == request_id for _, output in self._unsent)

    def has_requests(self) -> bool:
        """True while there is work, or an end to be sent: it goes out with the next step."""
        return bool(self._unsent) or bool(super().has_requests())

    def update_from_output(
        self,
        scheduler_output: Any,
        model_runner_output: Any,  # vLLM's
    ) -> dict[int, EngineCoreOutputs]:
        """Take in a step; name failed pulls, describe first outputs, send the guard's ends."""
        by_client: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        if self._failed_pulls or self._first:
            for batch in by_client.values():
                for output in batch.outputs:
                    self._complete(output)
        self._failed_pulls.clear()
        for client, output in self._unsent:
            by_client.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        self._unsent.clear()
        return by_client

    def _complete(self, output: EngineCoreOutput) -> None:
        first = self._first.pop(output.request_id, None)
        if first is not None:
            output.kv_transfer_params = {
                PULLED: {"bytes": first.bytes_moved, "first_position": first.position}
            }
        if output.request_id in self._failed_pulls and output.finish_reason == FinishReason.ERROR:
            output.stop_reason = f"guard:{Why.PULL_FAILED}"
            self.guard_refusals[Why.PULL_FAILED] += 1

    def _end(self, request_id: str, why: Why) -> None:
        """End a request that the scheduler knows. No effect if it has ended already."""
        request = self.requests.get(request_id)
        if request is None or request.is_finished():
            return
        self._note_end(request, why)
        self.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def _note_pull_ended(self, request: Any) -> None:  # vLLM's Request
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            kv_transfer_params={PULL_ENDED: True},
            trace_headers=request.trace_headers,
        )
        self._unsent.append((request.client_index, output))

    def _note_end(self, request: Any, why: Why) -> None:  # vLLM's Request
        self.guard_refusals[why] += 1
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=FinishReason.ABORT,
            stop_reason=f"guard:{why}",
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        self._unsent.append((request.client_index, output))


class GuardScheduler(GuardMixin, Scheduler):
    """The guard on vLLM's synchronous scheduler."""


class AsyncGuardScheduler(GuardMixin, AsyncScheduler):
    """The guard on vLLM's scheduler that runs a step ahead."""
