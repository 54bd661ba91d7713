"""The port's requests in vLLM's words, or refused before an engine sees them."""

import time
from typing import Any  # vLLM's requests and parameters are untyped here

from splitwave.core.errors import Reason
from splitwave.engine.port import EngineRequest, GroupDescription, Role
from splitwave.engine.vllm.outputs import decode_params
from splitwave.engine.vllm.sampling import build, first_token_only

HOLD_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}
"""What makes vLLM's connector keep a finished prompt's blocks."""


class RefusedRequest(Exception):
    """A request that must not reach the engine; it ends with this reason instead."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Preparation:
    """Turns requests to one group into what its engine cores take."""

    def __init__(self, description: GroupDescription, model_config: Any) -> None:
        self._description = description
        self._model_config = model_config
        self._vocabulary: int = model_config.get_vocab_size()
        self._decodes = description.role is Role.DECODE

    def __call__(self, request: EngineRequest) -> Any:
        """Return vLLM's EngineCoreRequest; RefusedRequest if the engine must not see it."""
        from vllm.v1.engine import EngineCoreRequest

        self._check_contract(request)
        self._check_tokens(request)
        return EngineCoreRequest(
            request_id=request.engine_request_id,
            prompt_token_ids=list(request.token_ids),
            mm_features=None,
            sampling_params=self._params(request),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=request.rank if self._description.ranks > 1 else None,
            # Trace headers stay here: the core would only send them back with every token.
            priority=request.priority,
        )

    def _check_contract(self, request: EngineRequest) -> None:
        """Refuse what our own side must not send."""
        if not 0 <= request.rank < self._description.ranks:
            raise RefusedRequest(Reason.INTERNAL, f"rank {request.rank} is not in the group")
        if self._decodes and (request.pull is None or request.hold):
            raise RefusedRequest(Reason.INTERNAL, "a decode request has a pull and holds nothing")
        if self._decodes and request.prompt_logprobs is not None:
            # A decode engine computes no prompt: vLLM would send what its memory happens to hold.
            raise RefusedRequest(Reason.INTERNAL, "prompt_logprobs are asked of prefill alone")
        if not self._decodes and request.pull is not None:
            raise RefusedRequest(Reason.INTERNAL, "a prefill request has no pull")

    def _check_tokens(self, request: EngineRequest) -> None:
        """Refuse a prompt on which an engine process would fail."""
        tokens = request.token_ids
        if not tokens:
            raise RefusedRequest(Reason.INVALID_REQUEST, "the prompt has no token")
        if len(tokens) >= self._description.model_len_max_tokens:
            raise RefusedRequest(
                Reason.INVALID_REQUEST,
                f"the prompt has {len(tokens)} tokens; with at least one more generated, "
                f"{self._description.model_len_max_tokens} is the longest sequence",
            )
        if min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise RefusedRequest(
                Reason.INVALID_REQUEST, f"a token id is outside 0 to {self._vocabulary - 1}"
            )

    def _params(self, request: EngineRequest) -> Any:
        """Make vLLM's sampling parameters, with what its connector is to do."""
        sampling = first_token_only(request.sampling) if request.hold else request.sampling
        try:
            return build(
                sampling, self._transfer(request), self._model_config, request.prompt_logprobs
            )
        except ValueError as error:
            raise RefusedRequest(Reason.INVALID_REQUEST, f"sampling: {error}") from error

    def _transfer(self, request: EngineRequest) -> dict[str, Any] | None:
        """Return the connector's parameters: what to hold, or what to pull."""
        if request.hold:
            return dict(HOLD_PARAMS)
        if request.pull is None:
            return None
        if not 0 < request.pull.remote_tokens <= len(request.token_ids):
            raise RefusedRequest(
                Reason.INTERNAL, "remote_tokens is not within 1 to the prompt's length"
            )
        try:
            params = decode_params(request.pull.connector_params)
        except ValueError as error:
            raise RefusedRequest(Reason.HANDOFF_FAILED, f"connector_params: {error}") from error
        return params | {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_num_tokens": request.pull.remote_tokens,
        }
