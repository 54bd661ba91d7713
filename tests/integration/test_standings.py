"""Certified, uncertified and decertified groups behind a router, over real gRPC."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import pytest

from services.decode.main import DecodeProgram
from services.decode.peers import GrpcPeers
from services.decode.worker import DecodeWorker
from services.prefill.main import PrefillProgram
from services.prefill.worker import PrefillWorker
from services.router.config import RouterConfig
from services.router.front_door import FrontDoor
from services.router.main import make_door
from services.router.metrics import families
from splitwave.core.envelope import Envelope, Traffic
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.core.mode_guard import Standing
from splitwave.core.worker import Certification
from splitwave.engine.sim import SimFaults, SimSettings, start_sim_group
from splitwave.runtime.serve import EXIT_EPOCH_OVER
from splitwave.wire.client import describe_worker
from tests.integration.router_stack import MODEL, Model
from tests.integration.worker_stack import (
    DECODE,
    DECODE_CONFIG,
    PREFILL,
    PREFILL_CONFIG,
    Served,
    eventually,
    free_port,
    served,
)
from tests.unit.order_viewer import Got, order_of

ODD = SimFaults(out_of_mode_step=30)
SLOW = replace(DECODE, ranks=1, step_fixed_s=0.005)
PROMPT = list(b"The capital of France is")
ENVELOPE = Envelope(
    ranks=1, step_max_tokens=2048, seats_max=64, prompt_max_tokens=40, sequence_max_tokens=4096,
    traffic=Traffic(output_max_tokens=400, sampling=("logprobs", "temperature")),
)  # fmt: skip
FULL = Certification(certificate_id="c" * 16, level="full", envelope=ENVELOPE)
LONG = replace(FULL, envelope=replace(ENVELOPE, prompt_max_tokens=4096))
"""Prefill's: the prompt of a resumed request is as long as its sequence."""


@dataclass(slots=True)
class Pools:
    """One prefill worker, some decode workers, and what is behind a router's APIs."""

    door: FrontDoor
    prefill: Served
    decode: list[Served]
    workers: list[DecodeWorker]
    tasks: "list[asyncio.Task[Got]]" = field(default_factory=list)

    def ask(self, name: str, tokens: int = 20, prompt: list[int] = PROMPT) -> "asyncio.Task[Got]":
        """Start one greedy request."""
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return self.send(name, prompt, sampling)

    def send(self, name: str, prompt: list[int], sampling: Sampling) -> "asyncio.Task[Got]":
        """Start one request."""
        task = asyncio.create_task(_completed(self.door, name, prompt, sampling))
        self.tasks.append(task)
        return task

    def standing(self, index: int) -> Standing:
        return self.workers[index].guard.standing

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the router's."""
        return sum(
            sample.value
            for family in families(self.door)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


async def _completed(door: FrontDoor, name: str, prompt: list[int], sampling: Sampling) -> Got:
    got = Got()
    await door.complete([order_of(name, prompt, sampling)], got)
    return got


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def pools(
    model: Model, *decode: tuple[SimSettings, Certification], grace_s: float = 5.0, **router: object
) -> AsyncIterator[Pools]:
    """A certified prefill group, decode groups as given, and a router."""
    clock = asyncio.get_running_loop().time
    async with contextlib.AsyncExitStack() as stack:
        config = replace(PREFILL_CONFIG, listen=f"127.0.0.1:{free_port()}")
        engine = await start_sim_group(replace(PREFILL, ranks=1))
        worker = PrefillWorker(engine, config, clock)
        worker.guard.certify(LONG)
        prefill = await stack.enter_async_context(served(PrefillProgram(worker), config, engine))
        groups, workers = [], []
        for index, (settings, certification) in enumerate(decode):
            own = replace(
                DECODE_CONFIG,
                listen=f"127.0.0.1:{free_port()}",
                worker_id=f"d{index}",
                drain_grace_s=grace_s,
                sweep_s=0.05,
            )
            engine = await start_sim_group(replace(settings, group_id=f"g{index}"))
            peers = GrpcPeers(confirm_timeout_s=2.0, release_timeout_s=2.0)
            worker_d = DecodeWorker(engine, peers, own, clock)
            worker_d.guard.certify(certification)
            program = DecodeProgram(worker_d, peers)
            groups.append(await stack.enter_async_context(served(program, own, engine)))
            workers.append(worker_d)
        door = make_door(
            RouterConfig(
                prefill=prefill.address, decode=",".join(x.address for x in groups), model=MODEL,
                model_path=str(model.directory), **router,  # type: ignore[arg-type]  # settings by name
            ),
            model.tokenizer,
        )  # fmt: skip
        await stack.enter_async_context(door.fleet.running())
        made = Pools(door, prefill, groups, workers)
        yield made
        await asyncio.gather(*made.tasks, return_exceptions=True)


async def ready(made: Pools, groups: int) -> None:
    await eventually(lambda: list(made.door.fleet.usable().values()) == [1, groups])


async def refusal(task: "asyncio.Task[Got]") -> ServingError:
    with pytest.raises(ServingError) as refused:
        await task
    return refused.value


async def settled(holds: Callable[[], bool]) -> None:
    await eventually(holds, within_s=15.0)


async def test_a_step_outside_the_mode_drains_its_group_and_work_goes_on_elsewhere(
    model: Model,
) -> None:
    odd = replace(SLOW, faults=ODD)
    async with pools(model, (odd, FULL), (SLOW, FULL), grace_s=0.3) as made:
        await ready(made, 2)
        long = [made.ask(f"long{i}", 400) for i in range(6)]
        await settled(lambda: made.standing(0) is not Standing.CERTIFIED)
        assert made.standing(0) is Standing.DECERTIFIED
        (violation,) = made.workers[0].guard.certification.violations
        assert (violation.rank, violation.step, violation.kind) == (0, 30, "odd")
        assert not made.workers[0].healthy()

        assert await made.decode[0].task == EXIT_EPOCH_OVER
        assert made.metric("splitwave_router_groups_judged_total", judgement="drain") == 1
        for got in await asyncio.gather(*long):
            assert len(got.token_ids) == 400
            assert got.token_ids == (await made.ask("again", 400)).token_ids
        resumed = made.metric("splitwave_router_resumes_total", reason="group_decertified")
        assert resumed >= 1
        assert made.standing(1) is Standing.CERTIFIED


async def test_no_step_of_new_work_runs_once_a_group_is_decertified(model: Model) -> None:
    odd = replace(SLOW, faults=ODD)
    async with pools(model, (odd, FULL), (SLOW, FULL)) as made:
        await ready(made, 2)
        for i in range(6):  # So many that some land on either group.
            made.ask(f"first{i}", 100)
        await settled(lambda: made.standing(0) is Standing.DECERTIFIED)
        before = made.workers[0].room.table.seats_held
        for i in range(8):
            made.ask(f"more{i}", 5)
        await asyncio.sleep(0.2)
        assert sum(made.workers[0].room.table.seats_held) <= sum(before)


async def test_a_group_that_the_pool_cannot_spare_serves_on_and_is_marked(model: Model) -> None:
    async with pools(model, (replace(SLOW, faults=ODD), FULL)) as made:
        await ready(made, 1)
        await made.ask("a", 60)
        await settled(lambda: made.standing(0) is Standing.DEGRADED)
        assert made.metric("splitwave_router_groups_judged_total", judgement="serve_on") == 1
        await settled(lambda: made.metric("splitwave_router_groups", standing="degraded") == 1)
        await ready(made, 1)
        assert len((await made.ask("b", 10)).token_ids) == 10
        described = await describe_worker(made.decode[0].channel, 5.0)
        assert described.uncertified
        assert described.certification.violating_steps == 1
        assert not made.decode[0].task.done()


async def test_a_group_of_one_may_be_drained_if_the_share_says_so(model: Model) -> None:
    odd = (replace(SLOW, faults=ODD), FULL)
    async with pools(model, odd, decertified_groups_max=1.0) as made:
        await ready(made, 1)
        await made.ask("a", 60)
        assert await made.decode[0].task == EXIT_EPOCH_OVER


@pytest.mark.parametrize(
    ("certification", "why"),
    [
        (Certification(refusal="nobody asked"), "it is uncertified: nobody asked"),
        (replace(FULL, level="smoke"), "level smoke; full is demanded"),
    ],
)
async def test_a_router_gives_no_work_to_a_group_that_proves_too_little(
    model: Model, certification: Certification, why: str
) -> None:
    async with pools(model, (SLOW, certification)) as made:
        stands = made.door.fleet.stands
        address = made.decode[0].address
        await eventually(lambda: why in stands.why_not(address))
        assert made.door.fleet.usable()["decode"] == 0  # type: ignore[index]  # the key of an enumeration of texts
        assert made.metric("splitwave_router_groups_refused", role="decode") == 1
    async with pools(
        model, (SLOW, certification), certificate_level="smoke", allow_uncertified=True
    ) as made:
        await ready(made, 1)
        assert len((await made.ask("a", 10)).token_ids) == 10


@pytest.mark.parametrize(
    ("tokens", "length", "sampling", "limit"),
    [
        (401, 24, {}, "output_length"),
        (10, 41, {}, "prompt_length"),
        (10, 24, {"temperature": 0.5, "top_p": 0.9}, "sampling"),
    ],
)
async def test_a_request_outside_the_envelope_is_refused_by_the_limits_name(
    model: Model, tokens: int, length: int, sampling: dict[str, float], limit: str
) -> None:
    async with pools(model, (SLOW, FULL)) as made:
        await ready(made, 1)
        limits = made.door.sampling_limits([65] * length)
        assert limits.certified_max == ENVELOPE.traffic.output_max_tokens
        assert limits.tokens_max is not None
        assert limits.tokens_max > 401, "it is a request for another pool, and no bad one"
        asked = Sampling(max_tokens=tokens, **({"temperature": 0.0} | sampling))  # type: ignore[arg-type]  # fields by name
        refused = await refusal(made.send("outside", [65] * length, asked))
        assert refused.reason is Reason.OUTSIDE_ENVELOPE
        assert f"({limit})" in refused.message
        name = "splitwave_router_requests_outside_envelope_total"
        assert made.metric(name, limit=limit) == 1
        assert (await made.prefill.engine.counters())[0].steps_by_kind == {"eager": 0}
        assert len((await made.ask("inside", 10)).token_ids) == 10


async def test_a_group_with_a_wider_envelope_takes_what_another_must_not(model: Model) -> None:
    narrow = replace(ENVELOPE, traffic=Traffic(output_max_tokens=15))
    async with pools(model, (SLOW, replace(FULL, envelope=narrow)), (SLOW, FULL)) as made:
        await ready(made, 2)
        for got in await asyncio.gather(*(made.ask(f"r{i}", 20) for i in range(10))):
            assert len(got.token_ids) == 20
        (rank,) = await made.decode[0].engine.counters()
        assert rank.pulls == 0
