"""Choices in OpenAI's two forms, streamed and whole."""

import json
from pathlib import Path
from typing import Any  # JSON

import pytest

from services.router.attempts import Trail
from services.router.openai.answers import Form, Head, Streamed, Telling, Usage, Whole
from services.router.openai.chat_form import ChatForm, ChatFormOptions
from services.router.openai.completion_form import CompletionForm, CompletionOptions
from services.router.order import Ending
from services.router.sink import Part
from splitwave.core.generation import FinishReason, TokenLogprob
from splitwave.engine.sim import write_vocabulary
from splitwave.text import Tokenizer

EURO = tuple("€".encode())
HEAD = Head(answer_id="id", created_s=0, model="50%d")
HI = TokenLogprob(72, -1.0, 1, ((72, -1.0), (65, -2.0)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("model")
    write_vocabulary(directory)
    return Tokenizer.load(directory)


def ending(text: str = "", *, tokens: int = 1, **changes: Any) -> Ending:
    fields: dict[str, Any] = {
        "finish_reason": FinishReason.STOP,
        "stop_string": None,
        "stop_token_id": None,
        "prompt_tokens": 2,
        "trail": Trail(),
        "first_token_s": 0.1,
        "total_s": 0.2,
    }
    return Ending(text=text, completion_tokens=tokens, **{**fields, **changes})


def streamed(form: Form, telling: Telling | None = None) -> tuple[Streamed, list[bytes]]:
    events: list[bytes] = []
    usage = Usage([2], 2)
    return Streamed(HEAD, form, telling or Telling(), usage, events.append), events


def plain(tokenizer: Tokenizer, **options: Any) -> CompletionForm:
    given = {"prompts": [("", [1, 2])], "choices": 2, **options}
    return CompletionForm(tokenizer, CompletionOptions(**given))


def chat(tokenizer: Tokenizer, **options: Any) -> ChatForm:
    return ChatForm(tokenizer, ChatFormOptions(**options))


def choices(events: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(event)["choices"][0] for event in events]


def test_text_is_escaped_as_json_and_a_model_may_be_called_anything(tokenizer: Tokenizer) -> None:
    viewer, events = streamed(plain(tokenizer))

    viewer.part(1, Part('a"\n%d', (1,), 0, ()))

    (event,) = events
    assert json.loads(event)["model"] == "50%d"
    assert json.loads(event)["choices"] == [
        {"index": 1, "text": 'a"\n%d', "logprobs": None, "finish_reason": None}
    ]


def test_a_token_without_text_needs_no_event_unless_its_id_is_shown(tokenizer: Tokenizer) -> None:
    silent, no_events = streamed(plain(tokenizer))
    telling = Telling(every_token=True)
    loud, events = streamed(plain(tokenizer, token_ids=True), telling)

    for viewer in (silent, loud):
        viewer.part(0, Part("", (226,), 0, ()))

    assert no_events == []
    opening, token = choices(events)
    assert (opening["prompt_token_ids"], token["token_ids"]) == ([1, 2], [226])


def test_the_role_comes_first_and_once_for_each_choice(tokenizer: Tokenizer) -> None:
    viewer, events = streamed(chat(tokenizer))

    for choice in (1, 0, 1):
        viewer.part(choice, Part("x", (120,), 0, ()))
    viewer.end(1, ending("y"))
    viewer.end(0, ending())

    said = [(choice["index"], choice["delta"]) for choice in choices(events)]
    role, text = {"role": "assistant", "content": ""}, {"content": "x"}
    assert said == [
        (1, role),
        (1, text),
        (0, role),
        (0, text),
        (1, text),
        (1, {"content": "y"}),
        (0, {}),
    ]


def test_a_choice_that_ends_without_a_part_still_has_its_role(tokenizer: Tokenizer) -> None:
    viewer, events = streamed(chat(tokenizer))

    viewer.end(0, ending())

    assert [sorted(choice["delta"]) for choice in choices(events)] == [["content", "role"], []]


def test_usage_counts_a_prompt_once_and_all_of_its_choices(tokenizer: Tokenizer) -> None:
    viewer, events = streamed(plain(tokenizer), Telling(usage=True))

    viewer.part(0, Part("x", (120,), 0, ()))
    for choice, tokens in ((0, 3), (1, 4)):
        viewer.end(choice, ending(tokens=tokens, trail=Trail(cached_tokens=1)))
    viewer.finish()

    *chunks, last = [json.loads(event) for event in events]
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 7,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_usage_may_be_counted_at_each_event(tokenizer: Tokenizer) -> None:
    viewer, events = streamed(chat(tokenizer), Telling(usage_always=True))

    for offset in range(3):
        viewer.part(0, Part("x", (120,), offset, ()))
    viewer.end(0, ending(tokens=3))

    counted = [json.loads(event)["usage"]["completion_tokens"] for event in events]
    assert counted == [0, 1, 2, 3, 3], "the role comes before the first token"


def test_a_part_of_a_character_has_its_bytes_as_its_token(tokenizer: Tokenizer) -> None:
    rows = [TokenLogprob(x, -1.0, 1, ((x, -1.0), (65, -2.0))) for x in (*EURO, 66)]
    viewer, events = streamed(plain(tokenizer, logprobs=True))

    viewer.part(0, Part("€B", (*EURO, 66), 0, rows))

    columns = choices(events)[0]["logprobs"]
    assert columns["tokens"] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "B"]
    assert columns["text_offset"] == [0, 0, 0, 1]
    assert columns["top_logprobs"][3] == {"B": -1.0, "A": -2.0}


def test_an_echo_puts_the_prompt_before_the_text_and_into_the_columns(
    tokenizer: Tokenizer,
) -> None:
    form = plain(tokenizer, echo=True, logprobs=True, prompts=[("Hi", [72, 105])])
    viewer, events = streamed(form)
    again = plain(tokenizer, echo=True, logprobs=True, prompts=[("Hi", [72, 105])])
    whole = Whole(HEAD, again, Usage([2], 2))

    for each in (viewer, whole):
        each.prompt(0, [TokenLogprob(105, -3.0, 2, ((65, -2.0),))])
        each.part(0, Part("H", (72,), 0, [HI]))
        each.end(0, ending())

    opening, piece, _ = choices(events)
    (choice,) = json.loads(whole.body())["choices"]
    assert opening["text"] + piece["text"] == choice["text"] == "HiH"
    columns = choice["logprobs"]
    assert columns == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [None, -3.0, -1.0],
        "tokens": ["H", "i", "H"],
        "top_logprobs": [None, {"A": -2.0, "i": -3.0}, {"H": -1.0, "A": -2.0}],
    }
    joined = {name: opening["logprobs"][name] + piece["logprobs"][name] for name in columns}
    assert joined == columns


def test_the_last_chunk_names_what_stopped_it(tokenizer: Tokenizer) -> None:
    viewer, events = streamed(plain(tokenizer))

    viewer.end(0, ending("x", stop_token_id=7))
    viewer.end(1, ending("", stop_string="END"))

    told = [(x["text"], x["finish_reason"], x["stop_reason"]) for x in choices(events)]
    assert told == [("x", "stop", 7), ("", "stop", "END")]


def test_a_chats_log_probabilities_have_text_and_bytes(tokenizer: Tokenizer) -> None:
    whole = Whole(HEAD, chat(tokenizer, logprobs=True), Usage([2], 1))

    whole.part(0, Part("H", (72,), 0, [HI]))
    whole.end(0, ending())

    (choice,) = json.loads(whole.body())["choices"]
    assert choice["message"] == {"role": "assistant", "content": "H", "refusal": None}
    (row,) = choice["logprobs"]["content"]
    assert (row["token"], row["bytes"], row["logprob"]) == ("H", [72], -1.0)
    assert [(top["token"], top["logprob"]) for top in row["top_logprobs"]] == [
        ("H", -1.0),
        ("A", -2.0),
    ]


def test_minus_infinity_is_a_number_in_json(tokenizer: Tokenizer) -> None:
    viewer, events = streamed(plain(tokenizer, logprobs=True))

    viewer.part(0, Part("H", (72,), 0, [TokenLogprob(72, float("-inf"), 1)]))

    assert choices(events)[0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_tokens_may_be_named_by_their_ids(tokenizer: Tokenizer) -> None:
    viewer, events = streamed(plain(tokenizer, logprobs=True, tokens_as_ids=True))

    viewer.part(0, Part("H", (72,), 0, [HI]))

    columns = choices(events)[0]["logprobs"]
    assert columns["tokens"] == ["token_id:72"]
    assert columns["top_logprobs"] == [{"token_id:72": -1.0, "token_id:65": -2.0}]
