"""Blocks, seats and leases of simulated ranks under any order of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from splitwave.core.errors import Reason
from splitwave.core.generation import FinishReason, Sampling
from splitwave.core.handoff import LeaseEnd
from splitwave.engine.port import EngineRequest, Held, Pull, RequestOutput, Role, StepOutputs
from splitwave.engine.sim import SimModel, SimSettings
from splitwave.engine.sim.fabric import Offer
from splitwave.engine.sim.rank import SimRank
from splitwave.engine.sim.sequence import Step

BLOCK = 4
LENGTH_MAX = 24
SMALL = {
    "block_size_tokens": BLOCK,
    "blocks_per_rank": 8,
    "model_len_max_tokens": LENGTH_MAX,
    "batch_max_tokens": 6,
    "seats_per_rank": 3,
    "lease_ttl_s": 10.0,
    "pull_fixed_s": 2.0,
}
PREFILL = SimSettings(role=Role.PREFILL, group_id="p", **SMALL)  # type: ignore[arg-type]  # fields
DECODE = SimSettings(role=Role.DECODE, group_id="d", **SMALL)  # type: ignore[arg-type]  # fields
ONE = Sampling(max_tokens=1)


class Handoffs(RuleBasedStateMachine):
    """A prefill and a decode rank whose steps, calls and clock come in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.prefill = SimRank(PREFILL, 0, lambda offer, now_s: True)
        self.decode = SimRank(DECODE, 0, self.read)
        self.steps: dict[SimRank, Step] = {}
        self.prompts: dict[str, list[int]] = {}
        self.held: dict[str, Held] = {}
        """Leases that the model knows to be live."""
        self.ended = dict.fromkeys(LeaseEnd, 0)
        self.unread: dict[str, Held] = {}
        """Handoffs that no decode request has named yet."""
        self.right: dict[str, bool] = {}
        """Decode requests whose data has arrived, and whether the lease was then live."""
        self.made: dict[str, list[int]] = {}
        self.gone: set[str] = set()
        """Aborted or ended: nothing may come for them."""
        self.released: set[str] = set()
        self.unsettled: set[str] = set()
        """Decode requests aborted before their first output, whose pull is not said to be over."""
        self.settled: set[str] = set()

    def read(self, offer: Offer, now_s: float) -> bool:
        assert offer.request_id not in self.settled, "read after its pull was said to be over"
        self.expire()
        intact = self.prefill.pulled(offer, now_s)
        live = offer.request_id in self.held
        if live:
            assert intact, "a live lease was read as reused"
            self.end(offer.request_id, LeaseEnd.PULLED)
        self.right[offer.request_id] = intact
        return intact

    def end(self, request_id: str, end: LeaseEnd) -> None:
        del self.held[request_id]
        self.ended[end] += 1

    def expire(self) -> None:
        for request_id in [k for k, v in self.held.items() if v.expires_at_s <= self.now_s]:
            self.end(request_id, LeaseEnd.EXPIRED)

    @rule(length=st.integers(1, LENGTH_MAX - 1), hold=st.booleans(), priority=st.integers(-1, 1))
    def submit_prefill(self, length: int, hold: bool, priority: int) -> None:
        request_id = f"r{len(self.prompts)}"
        self.prompts[request_id] = [65 + len(self.prompts) % 26] * length
        request = EngineRequest(
            engine_request_id=request_id,
            rank=0,
            token_ids=self.prompts[request_id],
            sampling=ONE,
            hold=hold,
            priority=priority,
        )
        assert self.prefill.submit(request, self.now_s) is None

    @precondition(lambda self: self.unread)
    @rule(data=st.data(), max_tokens=st.integers(1, 8))
    def submit_decode(self, data: st.DataObject, max_tokens: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.unread)))
        held = self.unread.pop(request_id)
        prompt = self.prompts[request_id]
        first = SimModel().complete(prompt, ONE).token_ids
        if len(prompt) + 1 >= LENGTH_MAX:
            return
        request = EngineRequest(
            engine_request_id=f"{request_id}/d",
            rank=0,
            token_ids=prompt + first,
            sampling=Sampling(max_tokens=max_tokens),
            pull=Pull(
                handoff_id=request_id,
                remote_tokens=held.remote_tokens,
                connector_params=held.connector_params,
            ),
        )
        assert self.decode.submit(request, self.now_s) is None

    @rule(wait_s=st.sampled_from([0.1, 1.0, 5.0, 11.0]))
    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from([self.prefill, self.decode]))
        if rank not in self.steps and rank.has_work:
            self.expire()
            self.steps[rank] = rank.begin(self.now_s)

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        rank = data.draw(
            st.sampled_from([x for x in (self.prefill, self.decode) if x in self.steps])
        )
        batch = rank.finish(self.steps.pop(rank), self.now_s)
        self.settle(batch)
        for output in batch.outputs if batch else []:
            assert output.engine_request_id not in self.gone
            if output.finish or output.failure:
                self.gone.add(output.engine_request_id)
            self.check_prefilled(output) if rank is self.prefill else self.check_decoded(output)

    def check_prefilled(self, output: RequestOutput) -> None:
        request_id = output.engine_request_id
        assert output.finish is FinishReason.LENGTH
        assert output.token_ids == SimModel().complete(self.prompts[request_id], ONE).token_ids
        if output.held is None:
            return
        assert request_id not in self.released, "a released prompt was held"
        assert output.held.block_count == -(-len(self.prompts[request_id]) // BLOCK)
        self.held[request_id] = self.unread[request_id] = output.held

    def check_decoded(self, output: RequestOutput) -> None:
        request_id = output.engine_request_id.removesuffix("/d")
        made = self.made.setdefault(request_id, [])
        made += output.token_ids
        assert output.failure in (None, Reason.PREEMPTED)
        prompt = self.prompts[request_id]
        text = SimModel().complete(prompt, Sampling(max_tokens=9)).token_ids[1:]
        if self.right.get(request_id, True):
            assert made == text[: len(made)]

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), ahead=st.booleans())
    def release(self, data: st.DataObject, ahead: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.prompts)))
        if ahead:
            request_id = f"r{len(self.prompts)}"
        self.expire()
        found = self.prefill.release(request_id, self.now_s)
        if request_id in self.held:
            assert found
            self.end(request_id, LeaseEnd.RELEASED)
        elif found:
            self.gone.add(request_id)
        else:
            self.prefill.bury(request_id, self.now_s)
        if not ahead:
            self.released.add(request_id)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.prompts)))
        for rank, name in ((self.prefill, request_id), (self.decode, f"{request_id}/d")):
            if rank.abort(name):
                self.gone.add(name)
                if rank is self.decode and request_id not in self.made:
                    self.unsettled.add(name)
        self.settle(self.decode.idle_batch(self.now_s))

    def settle(self, batch: StepOutputs | None) -> None:
        """A pull is said to be over once, of those aborted alone, and never while it reads."""
        for name in batch.pulls_ended if batch else ():
            self.unsettled.remove(name)
            self.settled.add(name.removesuffix("/d"))

    @invariant()
    def accounts_agree(self) -> None:
        self.expire()
        for rank in (self.prefill, self.decode):
            rank.sweep(self.now_s)
            rank.check_each()
        assert self.prefill.lease_ends == self.ended
        counters = self.prefill.counters()
        assert counters.leases_live == len(self.held)
        held_blocks = sum(x.block_count for x in self.held.values())
        assert held_blocks <= counters.blocks_used <= PREFILL.blocks_per_rank
        if not self.prefill.has_work and self.prefill not in self.steps:
            assert counters.blocks_used == held_blocks
        if not self.decode.has_work and self.decode not in self.steps:
            assert self.decode.counters().blocks_used == 0
        assert self.decode.counters().prefill_tokens_computed == 0

    def teardown(self) -> None:
        """Once all have left, everything is back."""
        for rank in (self.prefill, self.decode):
            for _ in range(2_000):
                if rank not in self.steps and not rank.has_work:
                    break
                self.now_s += 0.5
                begun = rank in self.steps
                step = self.steps.pop(rank) if begun else rank.begin(self.now_s)
                self.settle(rank.finish(step, self.now_s))
            self.now_s += 11.0
            rank.sweep(self.now_s)
            assert not rank.has_work
            assert rank.counters().blocks_used == 0
        assert not self.unsettled


TestHandoffs = pytest.mark.timeout(90)(Handoffs.TestCase)
TestHandoffs.settings = settings(max_examples=80, stateful_step_count=60)
