"""One request inside a simulated rank."""

import enum
from dataclasses import dataclass, field

from splitwave.core.errors import Reason
from splitwave.engine.port import EngineRequest, Pulled, RequestOutput
from splitwave.engine.sim.fabric import Offer
from splitwave.engine.sim.tokens import Continuation, prompt_logprobs


class Phase(enum.Enum):
    """Where a request is. The rank keeps one collection for each."""

    WAITING = enum.auto()
    PULLING = enum.auto()
    PREFILLING = enum.auto()
    GENERATING = enum.auto()
    ENDED = enum.auto()


class Sequence:
    """Tokens, blocks and phase of one request."""

    __slots__ = (
        "aborted",
        "arrival",
        "blocks",
        "capacity_tokens",
        "computed_tokens",
        "continuation",
        "hold",
        "logprobs",
        "offer",
        "phase",
        "priority",
        "prompt_logprobs",
        "prompt_tokens",
        "pull_ends_at_s",
        "pulled",
        "request_id",
        "state_before_last",
    )

    def __init__(
        self,
        request: EngineRequest,
        continuation: Continuation,
        *,
        state_before_last: int = 0,
        offer: Offer | None = None,
    ) -> None:
        self.request_id = request.engine_request_id
        self.continuation = continuation
        self.state_before_last = state_before_last
        """Prefill: state before the prompt's last token."""
        self.offer = offer
        self.prompt_tokens = len(request.token_ids)
        self.priority = request.priority
        self.hold = request.hold
        self.logprobs = request.sampling.logprobs is not None
        asked = request.prompt_logprobs
        self.prompt_logprobs = None if asked is None else prompt_logprobs(request.token_ids, asked)
        self.arrival = 0
        """Counts the rank's requests from 1; names it as the writer of its blocks."""
        self.phase = Phase.WAITING
        self.aborted = False
        self.blocks: list[int] = []
        self.capacity_tokens = 0
        self.computed_tokens = 0
        """Prompt tokens computed in earlier steps."""
        self.pull_ends_at_s = 0.0
        self.pulled: Pulled | None = None

    def __lt__(self, other: "Sequence") -> bool:
        """Order of the queue: smaller priority first, then the order of arrival."""
        return (self.priority, self.arrival) < (other.priority, other.arrival)

    def advance(self) -> RequestOutput:
        """Sample one token and report it."""
        going = self.continuation
        output = RequestOutput(engine_request_id=self.request_id, token_ids=[going.advance()])
        if self.logprobs:
            output.logprobs = [going.logprob()]
        if going.finish is not None:
            output.finish = going.finish
            output.stop_token_id = going.stop_token_id
        if self.prompt_logprobs is not None:
            output.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        if self.pulled is not None:
            output.pulled = self.pulled
            self.pulled = None
        return output


@dataclass(slots=True)
class Step:
    """What one rank computes in one step."""

    generating: int
    """Requests that compute one token behind a token they sampled or pulled up to."""
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    """Prompts and how many of their tokens."""
    prompt_tokens: int = 0
    """Sum over the chunks."""

    @property
    def tokens(self) -> int:
        """Tokens of the step; 0 is a dummy step."""
        return self.generating + self.prompt_tokens


def failed(request_id: str, reason: Reason, message: str) -> RequestOutput:
    """The output that ends a request with a failure."""
    return RequestOutput(
        engine_request_id=request_id, token_ids=[], failure=reason, failure_message=message
    )
