"""A prompt of token ids that ends inside a character, under echo: its text is one with the rest."""

import codecs
from collections.abc import AsyncIterator
from typing import Any  # JSON

import pytest

from tests.integration.router_stack import MODEL, Model, RouterStack, router_stack


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def stack(model: Model) -> AsyncIterator[RouterStack]:
    async with router_stack(model) as started:
        yield started


@pytest.mark.parametrize("prompt", [[240, 159], [97, 226, 130], [97, 98]])
@pytest.mark.parametrize("max_tokens", [0, 6])
async def test_the_text_and_the_places_of_tokens_are_those_of_all_tokens_together(
    stack: RouterStack, prompt: list[int], max_tokens: int
) -> None:
    body: dict[str, Any] = {
        "model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 0,
        "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    async with stack.http.post("/v1/completions", json=body) as response:
        (choice,) = (await response.json())["choices"]

    pieces = stack.door.tokenizer.pieces(skip_special_tokens=False)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    whole, places = "", []
    for token_id in [*prompt, *choice["token_ids"]]:
        piece = pieces[token_id]
        octets = piece.encode() if isinstance(piece, str) else piece or b""
        begun, came = decoder.getstate()[0], decoder.decode(octets)
        places.append(len(whole) + (bool(begun) and came.startswith("\ufffd")))
        whole += came
    whole += decoder.decode(b"", final=True)
    assert choice["text"] == whole
    assert choice["logprobs"]["text_offset"] == places
    assert choice["text"].count("\ufffd") <= 1 or max_tokens
