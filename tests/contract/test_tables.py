"""The documents' tables are those that code makes, and the two APIs have the same features."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from google.protobuf.descriptor import Descriptor

from scripts import tables
from services.router import parity
from services.router.openai import openapi
from services.router.openai.http_faults import HTTP_FAULTS
from services.router.openai.reading import UNSUPPORTED, Reader
from services.router.openai.schema import (
    UNSUPPORTED_OF_MESSAGES,
    ChatBody,
    CompletionBody,
    Message,
    TokenizeBody,
    conversation,
    read_chat,
    read_completion,
    read_tokenize,
)
from splitwave.core.errors import Reason, ServingError
from splitwave.v1alpha1 import generate_service_pb2
from splitwave.wire.errors import TOLD

REQUEST = generate_service_pb2.GenerateRequest.DESCRIPTOR
NESTED = {"sampling", "chat", "messages"}
"""Messages whose fields are told one by one."""


@pytest.mark.parametrize("document", tables.TABLES)
def test_a_documents_tables_are_fresh(document: str) -> None:
    text = (tables.ROOT / document).read_text(encoding="utf-8")

    assert text == tables.filled(document), f"{document} is stale: run `make gen`"


@pytest.mark.parametrize(
    ("told", "stale_words"),
    [
        ("| 429 |", "| 503 |"),
        ('{"message", "type", "param", "code"}', '{"message", "code"}'),
        ("requests_shed_total{reason}", "requests_shed_total{why}"),
        ("then `[DONE]` | FINISH", "then nothing | FINISH"),
        ("| `body_too_large` |", "| `too_large` |"),
    ],
    ids=["reasons", "body", "metrics", "ends", "faults"],
)
def test_a_stale_table_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, stale_words: str
) -> None:
    text = (tables.ROOT / "docs/errors.md").read_text(encoding="utf-8")
    (tmp_path / "docs").mkdir()
    stale = tmp_path / "docs/errors.md"
    stale.write_text(text.replace(told, stale_words), encoding="utf-8")
    monkeypatch.setattr(tables, "ROOT", tmp_path)

    assert tables.filled("docs/errors.md") == text != stale.read_text(encoding="utf-8")


def test_a_document_without_its_markers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/errors.md").write_text("# Errors\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)

    with pytest.raises(ValueError, match=r"docs/errors.md: has no lines"):
        tables.filled("docs/errors.md")


def test_every_reason_is_told() -> None:
    assert set(TOLD) == set(Reason)


@pytest.mark.parametrize(
    ("mapping", "body"), [(parity.COMPLETIONS, CompletionBody), (parity.CHATS, ChatBody)]
)
def test_every_field_over_http_has_its_place_over_grpc(
    mapping: Mapping[str, str], body: type[CompletionBody | ChatBody]
) -> None:
    assert {name for name in mapping if "." not in name} == set(body.__struct_fields__)


def test_every_field_over_grpc_has_its_place_over_http() -> None:
    told = " ".join([*parity.COMPLETIONS.values(), *parity.CHATS.values(), *parity.FILLED_IN])

    untold = [name for name in fields(REQUEST) if name not in told]

    assert untold == []


def fields(message: Descriptor, prefix: str = "") -> Iterator[str]:
    """Dotted names of a message's fields."""
    for field in message.fields:
        inner = field.message_type
        if inner is not None and field.name in NESTED:
            yield from fields(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def test_what_a_messages_text_needs_goes_over_grpc_and_the_rest_is_refused() -> None:
    told = {name.removeprefix("messages.") for name in parity.CHATS if "." in name}

    assert told | UNSUPPORTED_OF_MESSAGES.keys() == set(Message.__struct_fields__)


@pytest.mark.parametrize("name", UNSUPPORTED_OF_MESSAGES)
@pytest.mark.parametrize("read", [read_chat, read_tokenize], ids=["chat", "tokenize"])
def test_a_messages_field_that_is_not_served_is_refused_unless_it_is_empty(
    read: Reader[ChatBody] | Reader[TokenizeBody], name: str
) -> None:
    def told(value: object) -> object:
        message = {"role": "user", "content": "x", name: value}
        return conversation(read(msgspec.json.encode({"messages": [message]})).messages or [])

    empty: object = [] if name in ("tool_calls", "annotations") else ""
    full: object = [{"type": "x"}] if name in ("tool_calls", "annotations") else "x"

    assert told(empty) == told(None) == [{"role": "user", "content": "x"}]
    with pytest.raises(ServingError, match=rf"messages\[0\]\.{name}: ") as refused:
        told(full)
    assert refused.value.reason is Reason.UNSUPPORTED_FEATURE


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_known_field_that_is_not_served_is_refused_by_name(name: str) -> None:
    body = {"prompt": "x", name: {"anything": "else"}}

    with pytest.raises(ServingError, match=f"{name}: ") as refused:
        read_completion(msgspec.json.encode(body))
    assert refused.value.reason is Reason.UNSUPPORTED_FEATURE


def test_every_route_has_its_rpc() -> None:
    assert {route.path for route in openapi.ROUTES} == set(parity.ROUTES)


def test_each_operation_tells_each_status_and_the_codes_that_come_with_it() -> None:
    paths = msgspec.json.decode(openapi.document())["paths"]
    told = {status: {HTTP_FAULTS[status].code} for status in HTTP_FAULTS}
    for reason, answer in TOLD.items():
        told.setdefault(answer.http_status, set()).add(reason.value)

    for operation in (x for methods in paths.values() for x in methods.values()):
        failures = {int(x): y["description"] for x, y in operation["responses"].items()}
        del failures[200]
        assert {status: set(x.split(", ")) for status, x in failures.items()} == told


def test_no_field_is_both_served_and_refused() -> None:
    served = {*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__}

    assert served & UNSUPPORTED.keys() == set()
