"""Bodies to orders: what a request asks for, held against what the model and the pools can do."""

from collections.abc import Mapping, Sequence

from services.router.front_door import FrontDoor
from services.router.openai.chat_form import ChatForm, ChatFormOptions
from services.router.openai.completion_form import CompletionForm, CompletionOptions
from services.router.openai.fields import given_or, invalid
from services.router.openai.names import named
from services.router.openai.schema import (
    ChatBody,
    CompletionBody,
    TokenizeBody,
    chat_options,
    conversation,
)
from services.router.order import Order
from splitwave.core.generation import Sampling
from splitwave.core.sampling_limits import check_prompt_logprobs
from splitwave.text.detokenizer import unfinished_bytes

Headers = Mapping[str, str]


class OrderBook:
    """Takes orders in HTTP's words. Raises ServingError for what cannot be served."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door

    async def completion(
        self, body: CompletionBody, headers: Headers
    ) -> tuple[list[Order], CompletionForm]:
        """One order for each prompt."""
        door = self._door
        door.check_model(body.model)
        body.check_stream()
        special = given_or(body.add_special_tokens, True)
        prompts = body.prompts()
        ids = [await door.prompt_ids(x, add_special_tokens=special) for x in prompts]
        for token_ids in ids:
            check_prompt_logprobs(body.prompt_logprobs, len(token_ids))
            with named({"prompt_logprobs": "logprobs"}):  # Under echo they ask for the prompt's.
                check_prompt_logprobs(body.wanted_prompt_logprobs, len(token_ids))
        orders = [
            self._order(body, headers, token_ids, index) for index, token_ids in enumerate(ids)
        ]
        texts = [await self._echoed(body, prompt) for prompt in prompts]
        options = CompletionOptions(
            prompts=list(zip(texts, ids, strict=True)),
            choices=body.choices,
            echo=bool(body.echo),
            scored_only=body.scored_only,
            logprobs=body.logprobs is not None,
            prompt_logprobs=body.prompt_logprobs is not None,
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            skip_special_tokens=given_or(body.skip_special_tokens, True),
        )
        return orders, CompletionForm(door.tokenizer, options)

    async def chat(self, body: ChatBody, headers: Headers) -> tuple[Order, ChatForm]:
        """The order of a conversation."""
        door = self._door
        door.check_model(body.model)
        body.check_stream()
        text = await door.chat_prompt(conversation(body.messages), chat_options(body))
        special = bool(body.add_special_tokens)  # The template has written them.
        token_ids = await door.prompt_ids(text, add_special_tokens=special)
        check_prompt_logprobs(body.wanted_prompt_logprobs, len(token_ids))
        options = ChatFormOptions(
            role=body.messages[-1].role if body.continue_final_message else "assistant",
            logprobs=bool(body.logprobs),
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            prompt_token_ids=token_ids,
            prompt_logprobs=body.prompt_logprobs is not None,
        )
        return self._order(body, headers, token_ids, 0), ChatForm(door.tokenizer, options)

    async def tokens(self, body: TokenizeBody) -> list[int]:
        """Token ids of a text or of a conversation."""
        door = self._door
        door.check_model(body.model)
        if (body.prompt is None) is (body.messages is None):
            raise invalid("prompt: give either a prompt or messages")
        if body.messages is None:
            body.check_no_template()
            special = given_or(body.add_special_tokens, True)
            return await door.encode(body.prompt or "", special=special)
        text = await door.chat_prompt(conversation(body.messages), chat_options(body))
        return await door.encode(text, special=bool(body.add_special_tokens))

    async def _echoed(self, body: CompletionBody, prompt: str | Sequence[int]) -> str:
        if not body.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        skip = given_or(body.skip_special_tokens, True)
        tokenizer = self._door.tokenizer
        text = await tokenizer.decode_async(prompt, skip_special_tokens=skip)
        cut = unfinished_bytes(tokenizer.pieces(skip_special_tokens=skip), prompt)
        # The completion's text begins with the character that the prompt's tokens began.
        return text.removesuffix("\ufffd") if cut and not body.scored_only else text

    def _order(
        self,
        body: CompletionBody | ChatBody,
        headers: Headers,
        token_ids: Sequence[int],
        index: int,
    ) -> Order:
        door = self._door
        sampling = self._sampling(body, token_ids)
        return Order(
            request_id=door.request_id(body.request_id or headers.get("X-Request-Id", "")),
            token_ids=token_ids,
            sampling=sampling,
            text=body.text_options(sampling, door.ending_ids(sampling)),
            choices=body.choices,
            first_choice=index * body.choices,
            prompt_logprobs=body.wanted_prompt_logprobs,
            priority=body.checked_priority(),
            trace_headers=_trace_headers(headers),
        )

    def _sampling(self, body: CompletionBody | ChatBody, token_ids: Sequence[int]) -> Sampling:
        return body.sampling(self._door.eos_token_ids, self._door.sampling_limits(token_ids))


def _trace_headers(headers: Headers) -> dict[str, str]:
    return {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
