"""vLLM's gRPC engine service over real gRPC, on simulated engines."""

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from services.router.main import Service
from services.router.vllm_engine import servicer
from services.router.vllm_engine.model import EngineModel
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.engine.sim import SimModel
from splitwave.wire.errors import CODE, from_rpc_error
from tests.integration.router_stack import MODEL, Model, RouterStack, router_stack
from tests.integration.worker_stack import DECODE, eventually

PROMPT = list(b"The capital of France is")
GREEDY = Sampling(max_tokens=30, temperature=0.0)


class Engine:
    """A caller of the service on a stack."""

    def __init__(self, stack: RouterStack) -> None:
        self.stack = stack
        self.calls = pb_grpc.VllmEngineStub(stack.channel)

    async def generate(
        self, *, stream: bool, name: str = "r", **sampling: object
    ) -> list[pb.GenerateResponse]:
        call = self.calls.Generate(ask(stream=stream, name=name, **sampling), timeout=20.0)
        return [message async for message in call]


def ask(*, stream: bool, name: str = "r", **sampling: object) -> pb.GenerateRequest:
    params = {"temperature": 0.0, "max_tokens": 30, **sampling}
    return pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=PROMPT),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )


def right(sampling: Sampling = GREEDY) -> list[int]:
    """The tokens of an aggregated engine."""
    return list(SimModel().complete(PROMPT, replace(sampling, eos_token_ids=(259,))).token_ids)


def streamed(messages: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    return [token_id for m in messages if m.chunk.index == index for token_id in m.chunk.token_ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def service(model: Model) -> Service:
    facts = EngineModel.read(model.directory)
    return Service(servicer.SERVICE_NAMES, lambda s, door: servicer.add_to(s, door, facts))


@pytest.fixture
async def engine(model: Model, service: Service) -> AsyncIterator[Engine]:
    async with router_stack(model, further=[service]) as started:
        yield Engine(started)
        await started.empty()


async def test_a_stream_has_the_tokens_of_one_engine_and_one_end(engine: Engine) -> None:
    got = await engine.generate(stream=True)

    assert [m.WhichOneof("response") for m in got] == ["chunk"] * (len(got) - 1) + ["complete"]
    assert streamed(got) == right()
    assert all(m.chunk.completion_tokens == len(m.chunk.token_ids) for m in got[:-1])
    assert {m.chunk.prompt_tokens for m in got[:-1]} == {len(PROMPT)}
    assert got[-1].complete.finish_reason == "length"
    assert list(got[-1].complete.output_ids) == []


async def test_without_a_stream_one_message_has_it_all(engine: Engine) -> None:
    (got,) = await engine.generate(stream=False)

    assert list(got.complete.output_ids) == right()
    assert got.complete.completion_tokens == 30
    assert (got.complete.prompt_tokens, got.complete.finish_reason) == (len(PROMPT), "length")


async def test_text_is_tokenized_here(engine: Engine) -> None:
    request = ask(stream=False)
    request.text = bytes(PROMPT).decode()

    (got,) = [message async for message in engine.calls.Generate(request)]

    assert list(got.complete.output_ids) == right()


async def test_each_choice_has_its_tokens_and_its_end(engine: Engine) -> None:
    whole = await engine.generate(stream=False, n=3)
    parts = await engine.generate(stream=True, n=3)

    assert [m.complete.index for m in whole] == [0, 1, 2]
    assert [list(m.complete.output_ids) for m in whole] == [right()] * 3
    assert [streamed(parts, index) for index in range(3)] == [right()] * 3
    ends = [m.complete for m in parts if m.HasField("complete")]
    assert sorted((end.index, end.finish_reason) for end in ends) == [
        (index, "length") for index in range(3)
    ]


async def test_log_probabilities_come_with_tokens_and_prompt(engine: Engine) -> None:
    (got,) = await engine.generate(stream=False, max_tokens=4, logprobs=2, prompt_logprobs=1)

    out, prompt = got.complete.output_logprobs, got.complete.input_logprobs
    rows = SimModel().complete(PROMPT, replace(GREEDY, max_tokens=4, logprobs=2)).logprobs
    assert list(out.token_ids) == [row.token_id for row in rows]
    assert list(out.token_logprobs) == pytest.approx([row.logprob for row in rows])
    assert [list(top.token_ids) for top in out.top_logprobs] == [
        [token_id for token_id, _ in row.top] for row in rows
    ]
    assert list(prompt.token_ids) == PROMPT
    assert [row.HasField("value") for row in prompt.token_logprobs] == [False] + [True] * (
        len(PROMPT) - 1
    )


async def test_what_stopped_a_completion_is_named(engine: Engine) -> None:
    text = bytes(right()).decode()

    (by_text,) = await engine.generate(stream=False, stop=[text[10:13]])
    (by_token,) = await engine.generate(stream=False, stop_token_ids=[ord(text[4])])

    assert by_text.complete.matched_stop_str == text[10:13]
    assert by_text.complete.finish_reason == by_token.complete.finish_reason == "stop"
    assert by_token.complete.matched_token_id == ord(text[4])


@pytest.mark.parametrize("stream", [True, False])
async def test_an_abort_ends_the_computing_and_is_told(engine: Engine, stream: bool) -> None:
    running = asyncio.create_task(engine.generate(stream=stream, name="long", max_tokens=4000))
    await eventually(lambda: engine.stack.decode_seats() == 1)

    await engine.calls.Abort(pb.AbortRequest(request_ids=["nobody", "long"]))
    got = await running

    assert got[-1].complete.finish_reason == "abort"
    made = streamed(got) if stream else list(got[-1].complete.output_ids)
    assert made == right(replace(GREEDY, max_tokens=4000))[: len(made)]
    assert engine.stack.door.outcomes["cancelled"] == 1


async def test_a_caller_that_leaves_stops_the_computing(engine: Engine) -> None:
    call = engine.calls.Generate(ask(stream=True, max_tokens=4000))
    await call.read()
    call.cancel()

    await eventually(lambda: engine.stack.door.outcomes["cancelled"] == 1)


@pytest.mark.parametrize(
    ("request_", "reason", "message"),
    [
        (ask(stream=True, top_p=2.0), Reason.INVALID_REQUEST, "top_p: 2.0"),
        (ask(stream=True, n=1000), Reason.INVALID_REQUEST, "n: 1000"),
        (ask(stream=False, json_object=True), Reason.UNSUPPORTED_FEATURE, "json_object: "),
    ],
    ids=["bad", "choices", "unserved"],
)
async def test_a_refusal_has_code_reason_and_field(
    engine: Engine, request_: pb.GenerateRequest, reason: Reason, message: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=message) as refused:
        await engine.calls.Generate(request_).read()

    path = "/vllm.grpc.engine.VllmEngine/Generate"
    refusals, outcomes = engine.stack.door.refusals.counts, engine.stack.door.outcomes
    assert refusals[path, reason] + outcomes[reason.value] == 1
    assert refused.value.code() is CODE[reason]
    assert from_rpc_error(refused.value).reason is reason


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Embed", pb.EmbedRequest()),
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_not_served_says_so_by_name(
    engine: Engine, method: str, request_: object
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=f"{method}: ") as refused:
        await getattr(engine.calls, method)(request_)

    path = f"/vllm.grpc.engine.VllmEngine/{method}"
    assert engine.stack.door.refusals.counts == {(path, Reason.UNSUPPORTED_FEATURE): 1}
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_kv_events_are_not_served_and_say_so(engine: Engine) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="SubscribeKvEvents: ") as refused:
        async for _ in engine.calls.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()):
            pass

    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_it_tells_of_model_server_and_load_as_one_engine(
    engine: Engine, model: Model
) -> None:
    told = await engine.calls.GetModelInfo(pb.GetModelInfoRequest())
    server = await engine.calls.GetServerInfo(pb.GetServerInfoRequest())
    loads = await engine.calls.GetLoads(pb.GetLoadsRequest())
    health = await engine.calls.HealthCheck(pb.HealthCheckRequest())

    assert (told.served_model_name, told.is_generation, told.vocab_size) == (MODEL, True, 260)
    assert told.max_context_length == DECODE.model_len_max_tokens
    assert (told.tokenizer_path, list(told.eos_token_ids)) == (str(model.directory), [259])
    assert (server.server_type, server.data_parallel_size, server.kv_role) == ("vllm-grpc", 1, "")
    assert [(load.num_running_reqs, load.dp_rank) for load in loads.loads] == [(0, 0)]
    assert (health.healthy, health.message) == (True, "ready")


async def test_the_tokenizers_files_come_as_one_archive(engine: Engine, model: Model) -> None:
    request = common_pb2.GetTokenizerRequest()

    chunks = [chunk async for chunk in engine.calls.GetTokenizer(request)]

    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [
        hashlib.sha256(data).hexdigest()
    ]
    with zipfile.ZipFile(io.BytesIO(data)) as bundle:
        names = set(bundle.namelist())
        tokenizer = json.loads(bundle.read("tokenizer.json"))
    assert names == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert tokenizer["model"]["type"] == "BPE"


async def test_a_drain_is_told_and_lets_nobody_in(model: Model, service: Service) -> None:
    async with router_stack(model, further=[service]) as stack:
        engine = Engine(stack)
        running = asyncio.create_task(engine.generate(stream=True, max_tokens=400))
        await eventually(lambda: stack.decode_seats() == 1)
        stack.stop.set()
        await eventually(lambda: stack.door.admission.closed)

        health = await engine.calls.HealthCheck(pb.HealthCheckRequest())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await engine.generate(stream=True)

        error: ServingError = from_rpc_error(refused.value)
        assert (health.healthy, error.reason) == (False, Reason.WORKER_DRAINING)
        assert streamed(await running) == right(replace(GREEDY, max_tokens=400))
