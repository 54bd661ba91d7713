"""What a caller of the engine service is told: token ids, and how they ended."""

from collections.abc import Iterator, Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from services.router.order import Ending, Order
from services.router.parts import News
from splitwave.core.generation import TokenLogprob

ABORTED = "abort"
"""Finish reason of a request that Abort ended, as vLLM has it."""


class Answers:
    """Makes the messages of one call. Every choice gets its end exactly once."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._open = set(range(order.choices))

    def stream(self, choice: int, news: News) -> Iterator[pb.GenerateResponse]:
        """New tokens of a choice, and its end; a chunk counts its own tokens only."""
        if news.parts or news.prompt:
            yield self._chunk(choice, news)
        if news.ending is not None:
            yield self._complete(choice, News(), news.ending)

    def whole(self, choice: int, news: News) -> pb.GenerateResponse:
        """All of a choice at once."""
        return self._complete(choice, news, news.ending)

    def rest(self, taken: dict[int, News]) -> Iterator[pb.GenerateResponse]:
        """An end for each choice that an abort has left without, and what it had made."""
        for choice in sorted(self._open):
            yield self._complete(choice, taken.get(choice, News()), None)

    def _chunk(self, choice: int, news: News) -> pb.GenerateResponse:
        token_ids = _token_ids(news)
        return pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                index=choice,
                token_ids=token_ids,
                prompt_tokens=len(self._order.token_ids),
                completion_tokens=len(token_ids),
                output_logprobs=_output_logprobs(news),
                input_logprobs=_input_logprobs(self._order, news.prompt),
            )
        )

    def _complete(self, choice: int, news: News, ending: Ending | None) -> pb.GenerateResponse:
        self._open.discard(choice)
        token_ids = _token_ids(news)
        message = pb.GenerateComplete(
            index=choice,
            output_ids=token_ids,
            finish_reason=ABORTED if ending is None else ending.finish_reason.value,
            prompt_tokens=len(self._order.token_ids),
            completion_tokens=len(token_ids),
            cached_tokens=0 if ending is None else ending.trail.cached_tokens,
            output_logprobs=_output_logprobs(news),
            input_logprobs=_input_logprobs(self._order, news.prompt),
        )
        if ending is not None and ending.stop_string is not None:
            message.matched_stop_str = ending.stop_string
        elif ending is not None and ending.stop_token_id is not None:
            message.matched_token_id = ending.stop_token_id
        return pb.GenerateResponse(complete=message)


def _token_ids(news: News) -> list[int]:
    return [token_id for part in news.parts for token_id in part.token_ids]


def _output_logprobs(news: News) -> pb.OutputLogProbs | None:
    rows = [row for part in news.parts for row in part.logprobs]
    if not rows:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[row.logprob for row in rows],
        token_ids=[row.token_id for row in rows],
        top_logprobs=[_top(row) for row in rows],
    )


def _input_logprobs(order: Order, rows: Sequence[TokenLogprob]) -> pb.InputLogProbs | None:
    """Nothing comes before a prompt's first token, so that one has no log probability."""
    if not rows:
        return None
    return pb.InputLogProbs(
        token_logprobs=[
            pb.InputTokenLogProb(),
            *(pb.InputTokenLogProb(value=row.logprob) for row in rows),
        ],
        token_ids=order.token_ids,
        top_logprobs=[pb.TopLogProbs(), *(_top(row) for row in rows)],
    )


def _top(row: TokenLogprob) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        values=[logprob for _, logprob in row.top],
        token_ids=[token_id for token_id, _ in row.top],
    )
