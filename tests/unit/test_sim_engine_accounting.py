"""Blocks, seats and leases of simulated ranks under any order of calls."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitwave.core.errors import Reason
from splitwave.core.generation import FinishReason, Sampling
from splitwave.core.handoff import LeaseEnd
from splitwave.engine.port import (
    EngineRequest,
    Held,
    Pull,
    RequestOutput,
    Role,
    StepOutputs,
)
from splitwave.engine.sim import SimModel, SimSettings
from splitwave.engine.sim.fabric import Offer
from splitwave.engine.sim.rank import SimRank
from splitwave.engine.sim.sequence import Step

BLOCK = 4
LENGTH_MAX = 24
TTL_S = 10.0
SMALL = {
    "block_size_tokens": BLOCK,
    "blocks_per_rank": 8,
    "model_len_max_tokens": LENGTH_MAX,
    "batch_max_tokens": 12,
    "seats_per_rank": 3,
    "lease_ttl_s": TTL_S,
    "pull_fixed_s": 2.0,
}
PREFILL = SimSettings(role=Role.PREFILL, group_id="p", **SMALL)  # type: ignore[arg-type]  # fields
DECODE = SimSettings(role=Role.DECODE, group_id="d", **SMALL)  # type: ignore[arg-type]  # fields
MODEL = SimModel(length_max_tokens=LENGTH_MAX)
ONE = Sampling(max_tokens=1)
TEXT_TOKENS = 12


class World:
    """A prefill and a decode rank, and what must be true of them.

    Each action takes a number that picks among what is there.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.prefill = SimRank(PREFILL, 0, lambda _offer, _now_s: True)
        self.decode = SimRank(DECODE, 0, self.read)
        self.steps: dict[SimRank, Step] = {}
        self.prompts: dict[str, list[int]] = {}
        self.asked_to_hold: set[str] = set()
        self.held: dict[str, Held] = {}
        """Live leases."""
        self.ends = dict.fromkeys(LeaseEnd, 0)
        self.unread: list[str] = []
        """Handoffs that no decode request has named yet."""
        self.offers: dict[str, Held] = {}
        self.decoding: set[str] = set()
        self.intact: dict[str, bool] = {}
        """Handoffs whose data has arrived, and whether it was right."""
        self.made: dict[str, list[int]] = {}
        self.gone: set[tuple[SimRank, str]] = set()
        """Ended or aborted: nothing may come for them."""
        self.released_ahead_s: dict[str, float] = {}
        self.unsettled: set[str] = set()
        """Aborted before their first output, whose pull is not yet said to be over."""
        self.settled: set[str] = set()
        self.reached: Counter[str] = Counter()

    def read(self, offer: Offer, now_s: float) -> bool:
        """The decode rank's pull."""
        assert offer.request_id not in self.settled, "read after its pull was said to be over"
        self.expire()
        intact = self.prefill.pulled(offer, now_s)
        if offer.request_id in self.held:
            assert intact, "a live lease was read as reused"
            self.end(offer.request_id, LeaseEnd.PULLED)
        self.intact[offer.request_id] = intact
        self.reached["intact" if intact else "stale"] += 1
        return intact

    def end(self, request_id: str, end: LeaseEnd) -> None:
        del self.held[request_id]
        self.ends[end] += 1
        self.reached[end] += 1

    def expire(self) -> None:
        for request_id in [k for k, v in self.held.items() if v.expires_at_s <= self.now_s]:
            self.end(request_id, LeaseEnd.EXPIRED)

    def submit(self, number: int) -> None:
        request_id = f"r{len(self.prompts)}"
        self.prompts[request_id] = [65 + len(self.prompts) % 26] * (1 + number % 18)
        if number % 4:
            self.asked_to_hold.add(request_id)
        request = EngineRequest(
            engine_request_id=request_id,
            rank=0,
            token_ids=self.prompts[request_id],
            sampling=ONE,
            hold=request_id in self.asked_to_hold,
            priority=number % 3,
        )
        assert self.prefill.submit(request, self.now_s) is None

    def hand_over(self, number: int) -> None:
        if not self.unread:
            return
        request_id = self.unread.pop(number % len(self.unread))
        held, prompt = self.offers[request_id], self.prompts[request_id]
        self.decoding.add(request_id)
        request = EngineRequest(
            engine_request_id=request_id,
            rank=0,
            token_ids=prompt + MODEL.complete(prompt, ONE).token_ids,
            sampling=Sampling(max_tokens=1 + number % TEXT_TOKENS),
            pull=Pull(
                handoff_id=request_id,
                remote_tokens=held.remote_tokens,
                connector_params=held.connector_params,
            ),
        )
        assert self.decode.submit(request, self.now_s) is None

    def wait(self, number: int) -> None:
        self.now_s += (0.1, 1.0, 6.0, 11.0)[number % 4]

    def begin(self, number: int) -> None:
        rank = (self.prefill, self.decode)[number % 2]
        if rank not in self.steps and rank.has_work:
            self.expire()
            self.steps[rank] = rank.begin(self.now_s)

    def finish(self, number: int) -> None:
        rank = (self.prefill, self.decode)[number % 2]
        if rank not in self.steps:
            return
        batch = rank.finish(self.steps.pop(rank), self.now_s)
        self.settle(batch)
        for output in batch.outputs if batch else []:
            key = (rank, output.engine_request_id)
            assert key not in self.gone, "an output came after the end or an abort"
            if output.finish or output.failure:
                self.gone.add(key)
            self.check_prefilled(output) if rank is self.prefill else self.check_decoded(output)

    def step(self, number: int) -> None:
        for _ in range(1 + number % 4):
            self.begin(number)
            self.now_s += 0.5
            self.finish(number)

    def check_prefilled(self, output: RequestOutput) -> None:
        request_id = output.engine_request_id
        assert output.finish is FinishReason.LENGTH
        assert output.token_ids == MODEL.complete(self.prompts[request_id], ONE).token_ids
        released_s = self.released_ahead_s.get(request_id)
        if output.held is None:
            assert request_id not in self.asked_to_hold or released_s is not None
            self.reached["released ahead"] += released_s is not None
            return
        assert request_id in self.asked_to_hold
        assert released_s is None or self.now_s >= released_s + TTL_S, "released, yet held"
        assert output.held.block_count == -(-len(self.prompts[request_id]) // BLOCK)
        self.held[request_id] = self.offers[request_id] = output.held
        self.unread.append(request_id)

    def check_decoded(self, output: RequestOutput) -> None:
        request_id = output.engine_request_id
        made = self.made.setdefault(request_id, [])
        made += output.token_ids
        assert output.failure in (None, Reason.PREEMPTED)
        self.reached["preempted"] += output.failure is not None
        text = MODEL.complete(self.prompts[request_id], Sampling(max_tokens=TEXT_TOKENS + 1))
        if self.intact[request_id]:
            assert made == text.token_ids[1 : 1 + len(made)]

    def release_ahead(self, _number: int) -> None:
        """Release the next prefill's id, before it is known."""
        request_id = f"r{len(self.prompts)}"
        assert not self.prefill.release(request_id, self.now_s)
        self.prefill.bury(request_id, self.now_s)
        self.released_ahead_s[request_id] = self.now_s

    def release_held(self, number: int) -> None:
        self.expire()
        if self.held:
            request_id = sorted(self.held)[number % len(self.held)]
            assert self.prefill.release(request_id, self.now_s)
            self.end(request_id, LeaseEnd.RELEASED)

    def release_open(self, number: int) -> None:
        names = self.open(self.prefill, set(self.prompts))
        if names:
            name = names[number % len(names)]
            assert self.prefill.release(name, self.now_s)
            self.gone.add((self.prefill, name))

    def abort(self, number: int) -> None:
        names = self.open(self.decode, self.decoding)
        if not names:
            return
        name = names[number % len(names)]
        if not self.decode.abort(name):
            return  # It has failed in a step that still runs: that output is to come.
        self.gone.add((self.decode, name))
        if name not in self.made:
            self.unsettled.add(name)
            self.reached["aborted early"] += 1
        self.settle(self.decode.idle_batch(self.now_s))

    def open(self, rank: SimRank, names: set[str]) -> list[str]:
        return sorted(name for name in names if (rank, name) not in self.gone)

    def settle(self, batch: StepOutputs | None) -> None:
        """A pull is said to be over once, of those aborted early alone."""
        for name in batch.pulls_ended if batch else ():
            self.unsettled.remove(name)
            self.settled.add(name)

    def check(self) -> None:
        self.expire()
        for rank in (self.prefill, self.decode):
            rank.sweep(self.now_s)
            rank.check_each()
        assert self.prefill.lease_ends == self.ends
        counters = self.prefill.counters()
        assert counters.leases_live == len(self.held)
        held_blocks = sum(x.block_count for x in self.held.values())
        assert held_blocks <= counters.blocks_used <= PREFILL.blocks_per_rank
        if not self.prefill.has_work and self.prefill not in self.steps:
            assert counters.blocks_used == held_blocks
        if not self.decode.has_work and self.decode not in self.steps:
            assert self.decode.counters().blocks_used == 0
        assert self.decode.counters().prefill_tokens_computed == 0

    def leave(self) -> None:
        """Once all have ended and every lease is over, everything is back."""
        for number, rank in enumerate((self.prefill, self.decode)):
            for _ in range(1_000):
                if rank not in self.steps and not rank.has_work:
                    break
                self.step(number)
            assert not rank.has_work
            self.now_s += 2 * TTL_S
            rank.sweep(self.now_s)
            assert rank.counters().blocks_used == 0
        self.check()
        assert not self.unsettled


ACTIONS = [
    *[World.submit] * 4,
    *[World.hand_over] * 4,
    *[World.step] * 10,
    World.begin,
    World.finish,
    World.wait,
    World.release_ahead,
    World.release_held,
    World.release_open,
    *[World.abort] * 2,
]
"""Weighted so that most walks get beyond a first handoff."""


@pytest.mark.timeout(90)
def test_accounts_agree_in_any_order_of_calls() -> None:
    reached: Counter[str] = Counter()

    @settings(max_examples=100)
    @given(
        st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 400)), min_size=60, max_size=90)
    )
    def walk(actions: list[tuple[Callable[[World, int], None], int]]) -> None:
        world = World()
        for action, number in actions:
            action(world, number)
            world.check()
        world.leave()
        reached.update(world.reached)

    walk()

    # A walk that gets nowhere proves nothing.
    for end in (*LeaseEnd, "intact", "stale", "preempted", "released ahead", "aborted early"):
        assert reached[end] >= 5, f"{end} was hardly reached: {reached}"
