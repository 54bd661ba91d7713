"""The openai package, sync and async, against a stack of simulated engines."""

from splitwave.core.generation import Sampling
from splitwave.engine.sim import SimModel
from tests.clients.documented import Target
from tests.clients.openai_session import PROMPT
from tests.clients.sessions import check_texts


def test_streams_choices_and_chats_agree(told: dict[str, object], target: Target) -> None:
    check_texts(told, target.model)


def test_the_text_is_that_of_one_engine(told: dict[str, dict[str, object]]) -> None:
    sampling = Sampling(max_tokens=24, temperature=0.0, eos_token_ids=(259,))
    complete = SimModel().complete(list(PROMPT.encode()), sampling)

    assert told["texts"]["whole"] == bytes(complete.token_ids).decode()
    assert told["texts"]["logprobs"] == [24] * 3


def test_refusals_are_the_packages_own_errors(told: dict[str, object]) -> None:
    assert told["refusals"] == [
        ["NotFoundError", "model_not_found", "model"],
        ["BadRequestError", "invalid_request", "temperature"],
        ["BadRequestError", "invalid_request", "prompt"],
        ["BadRequestError", "invalid_request", "max_tokens"],
        ["BadRequestError", "invalid_request", "no_such_field"],
    ]
