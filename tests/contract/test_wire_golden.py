"""Bytes that were once on the wire still mean what they meant."""

import pytest

from splitwave.v1alpha1 import decode_service_pb2 as pb
from tests.contract.golden_messages import FOLDER, GOLDEN, Golden


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_golden_bytes_are_read_as_what_they_say(golden: Golden) -> None:
    assert golden.decoded(golden.path.read_bytes()) == golden.core


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_a_message_is_written_as_its_golden_bytes(golden: Golden) -> None:
    assert golden.encoded() == golden.path.read_bytes()


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_a_field_of_a_newer_version_changes_nothing(golden: Golden) -> None:
    """Field 1000, a varint: what a newer peer may add."""
    newer = golden.path.read_bytes() + b"\xc0\x3e\x05"

    read = golden.decoded(newer)

    assert read == golden.core or isinstance(golden.core, type(golden.proto))


def test_every_message_of_a_session_has_golden_bytes() -> None:
    sent = [g.proto for g in GOLDEN]
    requests = {m.WhichOneof("body") for m in sent if isinstance(m, pb.SessionRequest)}
    responses = {m.WhichOneof("body") for m in sent if isinstance(m, pb.SessionResponse)}

    # Pieces are serialized submissions: their bytes are those of `submit`.
    assert requests | {"submit_chunk"} == bodies(pb.SessionRequest)
    assert responses == bodies(pb.SessionResponse)


def bodies(kind: type[pb.SessionRequest] | type[pb.SessionResponse]) -> set[str | None]:
    return {field.name for field in kind.DESCRIPTOR.oneofs_by_name["body"].fields}


def test_no_golden_file_is_left_over() -> None:
    assert set(FOLDER.iterdir()) == {golden.path for golden in GOLDEN}
