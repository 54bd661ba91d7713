"""The smg gateway in front: its answers are the router's own, and what it leaves is ended."""

import time
from collections.abc import Iterator
from typing import Any  # JSON

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from tests.clients.conftest import smg_in_front
from tests.clients.documented import Target
from tests.clients.sessions import check_texts, openai_session

ENDED_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def front(target: Target) -> Iterator[Target]:
    with smg_in_front(target) as started:
        yield started


def test_its_answers_are_those_of_the_router(front: Target, told: dict[str, Any]) -> None:
    through = openai_session(front.smg, front.model)

    check_texts(through, front.model)
    for part in ("texts", "chats"):
        same = {"whole", "streamed", "several", "usage", "stopped"} & told[part].keys()
        assert {k: through[part][k] for k in same} == {k: told[part][k] for k in same}


def test_nothing_that_it_left_goes_on(front: Target) -> None:
    with grpc.insecure_channel(front.grpc) as channel:
        engine = pb_grpc.VllmEngineStub(channel)
        deadline_s = time.monotonic() + ENDED_WITHIN_S
        while engine.GetServerInfo(pb.GetServerInfoRequest()).active_requests:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
