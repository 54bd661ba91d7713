"""Requests of several choices at pools that have less room than all of them want."""

import asyncio
import random
from pathlib import Path

import pytest

from services.router.attempts import Call, Trail
from services.router.choices import Choice, Turns, sampling_of_choice, serve_choices
from services.router.generate import Finish
from services.router.sink import TextSink
from splitwave.core.deadline import Deadline
from splitwave.core.generation import Request, Sampling
from splitwave.engine.port import Role
from splitwave.engine.sim import SimSettings, write_vocabulary
from splitwave.text import TextOptions, TextStream, Tokenizer
from tests.sim import virtual_loop
from tests.sim.router_world import EMPTY, Plan, World, world
from tests.sim.weather import now_s

SEATS = 4
PLAN = Plan(
    decode_nodes=2,
    decode=SimSettings(role=Role.DECODE, seats_per_rank=2, step_fixed_s=0.02),
)
SAMPLING = Sampling(max_tokens=20, seed=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("model")
    write_vocabulary(directory)
    return Tokenizer.load(directory)


async def serve(w: World, turns: Turns, tokenizer: Tokenizer, wanted: tuple[str, int]) -> None:
    """Serve a request of a name and so many choices; what they say must be right."""
    name, count = wanted
    prompt = tuple(name.encode())
    choices = [
        Choice(
            Call(
                request=Request(name, prompt, sampling_of_choice(SAMPLING, i)),
                key=name,
                deadline=Deadline(now_s() + 600.0),
                stall_max_s=30.0,
                choice=i,
            ),
            TextSink(TextStream(tokenizer, TextOptions(), prompt), lambda part: None),
            Trail(),
        )
        for i in range(count)
    ]
    ended: list[int] = []

    def finished(choice: Choice, finish: Finish) -> None:
        ended.append(choice.call.choice)

    await serve_choices(choices, w.fleet, finished, turns)

    assert sorted(ended) == list(range(count))
    for choice in choices:
        right = w.model.complete(prompt, choice.call.request.sampling).token_ids
        assert list(choice.sink.token_ids) == right


async def crowded(seed: int, tokenizer: Tokenizer) -> None:
    """Twenty requests of one to three choices want a pool of four seats on two workers."""
    rng = random.Random(seed)
    async with world(PLAN, seed) as w:
        await w.ready()
        # Two orders of turns, as two routers would keep them: they can hold what the other lacks.
        turns = [Turns(w.fleet.rooms.chance), Turns(w.fleet.rooms.chance)]
        wanted = [(f"request {i}", rng.randint(1, SEATS - 1)) for i in range(20)]

        await asyncio.gather(
            *(serve(w, turns[i % 2], tokenizer, each) for i, each in enumerate(wanted))
        )

        await asyncio.sleep(3.0)
        assert await w.held() == EMPTY


@pytest.mark.parametrize("seed", range(20))
def test_requests_that_want_each_others_room_all_end(seed: int, tokenizer: Tokenizer) -> None:
    virtual_loop.run(crowded(seed, tokenizer))
