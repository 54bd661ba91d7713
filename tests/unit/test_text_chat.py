"""Conversations to prompts: what templates may use, and what they may not do."""

import re
import time
from pathlib import Path
from typing import Any  # messages of any shape

import pytest

from splitwave.core.errors import Reason, ServingError
from splitwave.text import ChatOptions, ChatTemplate, ModelDirectoryError, Tokenizer, chat
from tests.unit.text_models import byte_level

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]


def rendered(source: str, messages: Any = HI, **options: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(messages, ChatOptions(**options))


def refusal(source: str, messages: Any = HI, **options: Any) -> str:
    with pytest.raises(ServingError) as refused:
        rendered(source, messages, **options)
    assert refused.value.reason is Reason.INVALID_REQUEST
    return refused.value.message


def test_a_conversation_ends_where_the_assistant_begins() -> None:
    assert rendered(CHATML) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}", "<s>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi"}]'),
        ("{{ {'a': 'é<'} | tojson(indent=1) }}", '{\n "a": "é<"\n}'),
        ("{% if tools %}t{% endif %}{% if documents %}d{% endif %}{{ enable }}", "yes"),
        ("{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}x{% endfor %}",
         ""),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
        ("{%- set ns = namespace(n=0) -%}\n  {%- set ns.n = ns.n + 2 -%}\n{{ ns.n }}", "2"),
        ("{{ messages[0].tool_calls is defined }}", "False"),
        ("{{ 'ab'.upper() }}{{ 'a' * 3 }}{{ 2 * 3 }}", "ABaaa6"),
    ],
)  # fmt: skip
def test_what_hugging_faces_templates_expect_is_there(source: str, text: str) -> None:
    assert rendered(source, template_arguments={"enable": "yes"}) == text


def test_the_date_is_todays() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", rendered("{{ strftime_now('%Y-%m-%d') }}"))


@pytest.mark.parametrize("content", ["So ", "So\n\n", "So 🎉"])
def test_a_final_message_is_continued_exactly_where_it_ends(content: str) -> None:
    messages = [*HI, {"role": "assistant", "content": content}]

    text = rendered(CHATML, messages, add_generation_prompt=False, continue_final_message=True)

    assert text.endswith(f"<|im_start|>assistant\n{content}")


def test_what_cannot_be_continued_is_refused() -> None:
    going = {"add_generation_prompt": False, "continue_final_message": True}

    assert refusal("{{ bos_token }}", **going).startswith("continue_final_message: the model's")
    both = refusal(CHATML, continue_final_message=True)
    assert both.startswith("continue_final_message: not with add_generation_prompt")
    silent = refusal(CHATML, [{"role": "user", "content": None}], **going)
    assert silent.startswith("continue_final_message: the final message has no text")


def test_a_templates_own_refusal_is_told() -> None:
    message = refusal("{{ raise_exception('roles must alternate') }}")

    assert message == "messages: the model's chat template refuses them: roles must alternate"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].clear() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self._TemplateReference__context.parent }}",
        "{% include 'x' %}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ range(100001) }}",
    ],
)
def test_what_a_template_may_not_do_refuses_the_request(source: str) -> None:
    assert "cannot render them" in refusal(source)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ 'a' * 99999999 }}", "multiplies too much"),
        ("{{ 9 ** 9 ** 9 }}", "multiplies too much"),
        ("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", "characters of them"),
    ],
)
def test_a_rendering_is_bounded_in_size(
    source: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "RENDERED_CHARS_MAX", 1_000_000)

    assert why in refusal(source, [{"role": "user", "content": "x" * 1000}])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% if messages[0].content == 'x' %}"
        "{% endif %}{% endfor %}{% endfor %}",
    ],
)
def test_a_rendering_is_bounded_in_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "RENDER_S_MAX", 0.1)
    began_s = time.monotonic()

    assert "takes longer than 0.1 s" in refusal(source)

    assert time.monotonic() - began_s < 2.0


def test_a_request_may_not_set_what_has_a_field_of_its_own() -> None:
    message = refusal(CHATML, template_arguments={"messages": []})

    assert message.startswith("chat_template_kwargs: messages has a field of its own")


def test_an_empty_conversation_is_refused() -> None:
    assert refusal(CHATML, []).startswith("messages: empty")


async def test_a_long_conversation_is_rendered_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []

    def noted(self: ChatTemplate, *_: object) -> str:
        threads.append("here")
        return ""

    async def elsewhere(work: Any, *given: object) -> str:
        threads.append("elsewhere")
        return str(work(*given))

    monkeypatch.setattr("asyncio.to_thread", elsewhere)
    monkeypatch.setattr(ChatTemplate, "render", noted)
    template = ChatTemplate(CHATML, {})

    await template.render_async(HI, ChatOptions())
    await template.render_async([{"role": "user", "content": "x" * 30_000}], ChatOptions())

    assert threads == ["here", "elsewhere", "here"]


def test_a_model_with_a_broken_template_is_refused_with_the_line(tmp_path: Path) -> None:
    model = byte_level(tmp_path / "m")
    (model / "chat_template.jinja").write_text("fine\n{% if %}")

    with pytest.raises(ModelDirectoryError, match=r"chat_template.jinja.*line 2"):
        Tokenizer.load(model)
