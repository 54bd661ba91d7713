"""A session of the openai package, run by that package's own environment; tells as JSON.

.clients/openai/bin/python tests/clients/openai_session.py http://127.0.0.1:8080/v1 MODEL STREAMS
"""

import asyncio
import json
import sys
from collections.abc import Iterable

import openai

PROMPT = "The capital of France is"
CHAT = [{"role": "user", "content": "Tell me of the sea."}]


def texts(client: openai.OpenAI, model: str) -> dict[str, object]:
    """Completions: whole, as a stream, several, with log probabilities."""
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    usage_last = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(**asked, **usage_last))
    several = client.completions.create(**asked, n=3, logprobs=2)
    return {
        "whole": whole.choices[0].text,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "streamed": "".join(c.text for chunk in chunks for c in chunk.choices),
        "finish_reasons": [c.finish_reason for chunk in chunks for c in chunk.choices],
        "stream_usage": chunks[-1].usage.completion_tokens,
        "several": [choice.text for choice in several.choices],
        "logprobs": [len(c.logprobs.tokens) for c in several.choices if c.logprobs],
    }


def chats(client: openai.OpenAI, model: str) -> dict[str, object]:
    """Chat completions: whole, and n of them interleaved in one stream."""
    asked = {"model": model, "messages": CHAT, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=1)
    chunks = list(client.chat.completions.create(**asked, n=2, stream=True))
    first = [chunk.choices[0].delta.role for chunk in chunks if chunk.choices]
    stop = whole.choices[0].message.content[4:7]
    stopped = client.chat.completions.create(**asked, stop=[stop])
    return {
        "whole": whole.choices[0].message.content,
        "logprobs": len(whole.choices[0].logprobs.content),
        "streamed": [_joined(chunks, index) for index in (0, 1)],
        "roles": [role for role in first if role],
        "stop": stop,
        "stopped": stopped.choices[0].message.content,
        "stopped_by": stopped.choices[0].finish_reason,
    }


def refusals(client: openai.OpenAI, model: str) -> list[list[object]]:
    """Type, code and field of errors, as the package raises them."""
    asks: Iterable[dict[str, object]] = (
        {"model": "another", "prompt": "x"},
        {"model": model, "prompt": "x", "temperature": -1},
        {"model": model, "prompt": ""},
        {"model": model, "prompt": "x", "max_tokens": 0},
        {"model": model, "prompt": "x", "extra_body": {"no_such_field": 1}},
    )
    told: list[list[object]] = []
    for ask in asks:
        try:
            client.completions.create(**ask)
        except openai.APIStatusError as error:
            told.append([type(error).__name__, error.code, error.param])
    return told


async def many(address: str, model: str, streams: int) -> dict[str, object]:
    """Streams at once over the asynchronous client; one more is left in its midst."""
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:

        async def one(number: int) -> str:
            stream = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": f"{number}"}],
                max_tokens=16,
                stream=True,
            )
            return "".join([c.delta.content or "" async for x in stream for c in x.choices])

        left = await client.completions.create(
            model=model, prompt=PROMPT, max_tokens=1000, stream=True
        )
        await anext(aiter(left))
        await left.close()
        got = await asyncio.gather(*(one(number) for number in range(streams)))
        again = await asyncio.gather(*(one(number) for number in range(streams)))
        return {"lengths": [len(text) for text in got + again]}


def _joined(chunks: list[object], index: int) -> str:
    return "".join(
        choice.delta.content or ""
        for chunk in chunks
        for choice in chunk.choices  # type: ignore[attr-defined]  # the package is not here
        if choice.index == index
    )


def main() -> None:
    """Print what the session saw."""
    address, model, streams = sys.argv[1:]
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        told = {
            "models": [each.id for each in client.models.list()],
            "texts": texts(client, model),
            "chats": chats(client, model),
            "refusals": refusals(client, model),
            "many": asyncio.run(many(address, model, int(streams))),
        }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
