"""One simulated rank: its queue, seats, blocks and leases, without clock or await.

A step is `begin` and, once its time has passed, `finish`. In between requests may
come and go: whoever is aborted keeps its blocks until `finish`.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable

from splitwave.core.errors import Reason
from splitwave.core.generation import FinishReason
from splitwave.core.handoff import LeaseEnd
from splitwave.engine.port import (
    EngineRequest,
    Held,
    Pulled,
    RankCounters,
    RequestOutput,
    Role,
    StepOutputs,
)
from splitwave.engine.sim.admission import Refused, blocks_for, model_of, sequence_of
from splitwave.engine.sim.blocks import BlockPool
from splitwave.engine.sim.fabric import Offer, PeerGone
from splitwave.engine.sim.faults import strikes
from splitwave.engine.sim.held import HeldTable
from splitwave.engine.sim.odd_step import KIND as ODD
from splitwave.engine.sim.odd_step import OddSteps
from splitwave.engine.sim.sequence import Phase, Sequence, Step, failed
from splitwave.engine.sim.settings import SimSettings
from splitwave.engine.sim.tokens import spoiled

Read = Callable[[Offer, float], bool]


class SimRank:
    """One rank.

    Invariants, asserted by `check` each step:
      R1  requests that run or pull are within the seats
      R2  blocks taken are those of these requests and of live leases, and within 0..max
      R3  each lease ends exactly once
      R4  a decode rank computes at most one token a request and step
    """

    def __init__(self, settings: SimSettings, rank: int, read: Read) -> None:
        self._settings = settings
        self.rank = rank
        self._read = read
        self._model = model_of(settings)
        self._pool = BlockPool(settings.blocks_per_rank)
        self._held = HeldTable(settings.lease_ttl_s * settings.time_scale)
        self.requests: dict[str, Sequence] = {}  # Live ones, by id.
        self._waiting: list[Sequence] = []  # A heap; the aborted leave it when they come up.
        self.waiting_count = 0  # Live ones without a seat.
        self._pulling: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._generating: list[Sequence] = []
        self._ended: list[RequestOutput] = []  # By preemption and failed pulls, for the next batch.
        self._some_aborted = False
        self._pulls_ended: list[str] = []  # Of the aborted that gave no output yet.
        self._arrivals = 0
        self._batches = 0
        self.steps = 0
        """Executed steps, dummy steps included."""
        self._dummy_steps = 0
        self._prefill_tokens = 0
        self._pulls = 0
        self._bytes_pulled = 0
        self.late_pulls = 0
        """Prefill: pulls that came when their lease was over."""
        self._guard_refusals: Counter[str] = Counter()
        self._odd = OddSteps(settings, rank)

    @property
    def has_work(self) -> bool:
        """True while a request waits, pulls or runs."""
        return bool(self._generating or self._prefilling or self._pulling or self.waiting_count)

    @property
    def lease_ends(self) -> dict[LeaseEnd, int]:
        """Ended leases by how they ended."""
        return dict(self._held.ends)

    def submit(self, request: EngineRequest, now_s: float) -> StepOutputs | None:
        """Queue a request; a refusal comes back as a batch of its own."""
        request_id = request.engine_request_id
        assert request_id not in self.requests, f"{request_id} runs already"
        try:
            sequence = sequence_of(self._settings, self._model, request)
        except Refused as refused:
            if refused.guard:
                self._guard_refusals[refused.guard] += 1
            return self._batch([failed(request_id, refused.reason, refused.message)], now_s)
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self.requests[request_id] = sequence
        heapq.heappush(self._waiting, sequence)
        self.waiting_count += 1
        return None

    def abort(self, request_id: str) -> bool:
        """Stop a request without an output; False if it is unknown."""
        sequence = self.requests.pop(request_id, None)
        if sequence is None:
            return False
        sequence.aborted = True
        if sequence.phase is Phase.WAITING:
            self.waiting_count -= 1
        else:
            self._some_aborted = True
        waits = sequence.phase is Phase.WAITING and sequence.offer is not None
        if waits or sequence.pulled is not None:  # Not begun, or over and not yet told.
            self._pulls_ended.append(request_id)
        return True

    def idle_batch(self, now_s: float) -> StepOutputs | None:
        """What is to be told though no step may come."""
        return self._batch([], now_s) if self._pulls_ended else None

    def release(self, request_id: str, now_s: float) -> bool:
        """Free what a request holds, or abort it; False if it is unknown."""
        self.sweep(now_s)
        blocks = self._held.end(request_id, LeaseEnd.RELEASED)
        if blocks is None:
            return self.abort(request_id)
        self._pool.give(blocks)
        return True

    def bury(self, request_id: str, now_s: float) -> None:
        """Remember that an unknown id was released: it holds nothing when it ends."""
        self._held.bury(request_id, now_s)

    def pulled(self, offer: Offer, now_s: float) -> bool:
        """End a lease as pulled; False if its blocks had been reused by then."""
        self.sweep(now_s)
        blocks = self._held.end(offer.request_id, LeaseEnd.PULLED)
        if blocks is not None:
            self._pool.give(blocks)
            return True
        self.late_pulls += 1
        return self._pool.intact(offer.blocks, offer.writer)

    def sweep(self, now_s: float) -> None:
        """Free the blocks of leases whose time is up."""
        for blocks in self._held.sweep(now_s):
            self._pool.give(blocks)

    def begin(self, now_s: float) -> Step:
        """Land pulls, find room, admit, and say what the step computes."""
        self.sweep(now_s)
        self._drop_aborted()
        if self._pulling:
            self._land_pulls(now_s)
        self._grow()
        step = Step(len(self._generating))
        for sequence in self._prefilling:
            self._add_chunk(step, sequence)
        self._admit(step, now_s)
        return step

    def finish(self, step: Step, now_s: float) -> StepOutputs | None:
        """End the step; None if there is nothing to tell."""
        self._drop_aborted()
        self.steps += 1
        self._odd.look(self.steps, step, self._generating)
        if not step.tokens:
            self._dummy_steps += 1
        outputs, self._ended = self._ended, []
        finished = False
        for sequence in self._generating:
            output = sequence.advance()
            outputs.append(output)
            if output.finish is not None:
                finished = True
                self._free(sequence)
                del self.requests[sequence.request_id]
        if finished:
            self._generating = [x for x in self._generating if x.phase is Phase.GENERATING]
        if step.chunks:
            outputs += self._finish_chunks(step, now_s)
        self.check(step)
        told = outputs or step.tokens or self._pulls_ended or self._odd.unsent
        return self._batch(outputs, now_s) if told else None

    def counters(self) -> RankCounters:
        """What this rank has counted."""
        return RankCounters(
            rank=self.rank,
            steps_by_kind={self._settings.step_kind: self.steps - self._odd.count}
            | ({ODD: self._odd.count} if self._odd.count else {}),
            dummy_steps=self._dummy_steps,
            prefill_tokens_computed=self._prefill_tokens,
            pulls=self._pulls,
            bytes_pulled=self._bytes_pulled,
            leases_live=self._held.live,
            blocks_used=self._pool.used,
            guard_refusals=dict(self._guard_refusals),
        )

    def check(self, step: Step | None = None) -> None:
        """Assert the invariants. Cheap: it runs after every step."""
        seated = (self._generating, self._prefilling, self._pulling)
        assert sum(map(len, seated)) <= self._settings.seats_per_rank, "R1"
        held = self._held.blocks_held
        for group in seated:
            held += sum([len(x.blocks) for x in group])
        self._pool.check(held)
        self._held.check()
        if step is not None and self._settings.role is Role.DECODE:
            assert not step.chunks, "R4"

    def check_each(self) -> None:
        """Assert what takes a walk over all blocks and leases: for tests."""
        self.check()
        self._pool.check_each()
        self._held.check_each()
        assert self.waiting_count == sum(not x.aborted for x in self._waiting)

    def _batch(self, outputs: list[RequestOutput], now_s: float) -> StepOutputs:
        self._batches += 1
        pulls_ended, self._pulls_ended = self._pulls_ended, []
        return StepOutputs(
            rank=self.rank,
            step=self._batches,
            at_s=now_s,
            outputs=outputs,
            running=len(self._generating) + len(self._prefilling),
            waiting=self.waiting_count + len(self._pulling),
            blocks_used=self._pool.used,
            pulls_ended=pulls_ended,
            violations=self._odd.take(),
        )

    def _free(self, sequence: Sequence) -> None:
        sequence.phase = Phase.ENDED
        self._pool.give(sequence.blocks)
        sequence.blocks = []

    def _fail(self, sequence: Sequence, reason: Reason, message: str) -> None:
        self._free(sequence)
        if not sequence.aborted:
            del self.requests[sequence.request_id]
            self._ended.append(failed(sequence.request_id, reason, message))

    def _drop_aborted(self) -> None:
        """Free the aborted, but for those that pull: a transfer still writes into their blocks."""
        if not self._some_aborted:
            return
        self._some_aborted = False
        for sequence in (*self._generating, *self._prefilling):
            if sequence.aborted:
                self._free(sequence)
        self._generating = [x for x in self._generating if not x.aborted]
        self._prefilling = [x for x in self._prefilling if not x.aborted]

    def _land_pulls(self, now_s: float) -> None:
        landed = [x for x in self._pulling if x.pull_ends_at_s <= now_s]
        self._pulling = [x for x in self._pulling if x.pull_ends_at_s > now_s]
        self._pulls_ended += [x.request_id for x in landed if x.aborted]
        for sequence in landed:
            try:
                intact = self._read_offer(sequence, now_s)
            except PeerGone as gone:
                self._fail(sequence, Reason.HANDOFF_FAILED, f"the pull failed: {gone}")
                continue
            if sequence.aborted:
                self._free(sequence)
                continue
            if not intact:
                sequence.continuation.state = spoiled(sequence.continuation.state)
            sequence.phase = Phase.GENERATING
            self._generating.append(sequence)

    def _read_offer(self, sequence: Sequence, now_s: float) -> bool:
        """Read what was offered; False if it was someone else's by then. Raises PeerGone."""
        offer, faults = sequence.offer, self._settings.faults
        assert offer is not None
        request_id = sequence.request_id
        if strikes(faults, faults.pull_failure_rate, "pull_failure", request_id):
            raise PeerGone("the transfer broke off")
        intact = self._read(offer, now_s)
        moved_bytes = blocks_for(self._settings, offer.tokens) * self._settings.block_bytes
        self._pulls += 1
        self._bytes_pulled += moved_bytes
        sequence.pulled = Pulled(
            bytes_moved=moved_bytes, first_position=sequence.continuation.length - 1
        )
        return intact and not strikes(faults, faults.stale_pull_rate, "stale_pull", request_id)

    def _grow(self) -> None:
        """Give each request a block for its next token, at the cost of the newest."""
        full = [x for x in self._generating if x.continuation.length > x.capacity_tokens]
        for sequence in full:
            while sequence.phase is Phase.GENERATING:
                blocks = self._pool.take(1, sequence.arrival)
                if blocks is not None:
                    self._add_blocks(sequence, blocks)
                    break
                running = (*self._generating, *self._prefilling)
                self._preempt(max(running, key=lambda x: x.arrival))

    def _preempt(self, victim: Sequence) -> None:
        group = self._generating if victim.phase is Phase.GENERATING else self._prefilling
        group.remove(victim)
        self._fail(victim, Reason.PREEMPTED, f"rank {self.rank} has no free KV block")

    def _add_blocks(self, sequence: Sequence, blocks: list[int]) -> None:
        sequence.blocks += blocks
        sequence.capacity_tokens += len(blocks) * self._settings.block_size_tokens

    def _add_chunk(self, step: Step, sequence: Sequence) -> None:
        room = self._settings.batch_max_tokens - step.tokens
        count = min(room, sequence.prompt_tokens - sequence.computed_tokens)
        if count > 0:
            step.chunks.append((sequence, count))
            step.prompt_tokens += count

    def _admit(self, step: Step, now_s: float) -> None:
        settings = self._settings
        seats = settings.seats_per_rank
        seats -= len(self._generating) + len(self._prefilling) + len(self._pulling)
        while self._waiting and seats > 0 and step.tokens < settings.batch_max_tokens:
            sequence = self._waiting[0]
            if not sequence.aborted:
                count = blocks_for(settings, sequence.prompt_tokens)
                blocks = self._pool.take(count, sequence.arrival)
                if blocks is None:
                    break
                seats -= 1
                self.waiting_count -= 1
                self._add_blocks(sequence, blocks)
                self._start(step, sequence, now_s)
            heapq.heappop(self._waiting)

    def _start(self, step: Step, sequence: Sequence, now_s: float) -> None:
        if sequence.offer is None:
            sequence.phase = Phase.PREFILLING
            self._prefilling.append(sequence)
            self._add_chunk(step, sequence)
            return
        settings, faults = self._settings, self._settings.faults
        moved_bytes = blocks_for(settings, sequence.offer.tokens) * settings.block_bytes
        pull_s = settings.pull_fixed_s + moved_bytes / settings.pull_bytes_per_s
        if strikes(faults, faults.pull_delay_rate, "pull_delay", sequence.request_id):
            pull_s += faults.pull_delay_s
        sequence.phase = Phase.PULLING
        sequence.pull_ends_at_s = now_s + pull_s * settings.time_scale
        self._pulling.append(sequence)

    def _finish_chunks(self, step: Step, now_s: float) -> Iterable[RequestOutput]:
        outputs = []
        for sequence, count in step.chunks:
            if sequence.aborted:
                continue
            self._prefill_tokens += count - 1
            sequence.computed_tokens += count
            if sequence.computed_tokens == sequence.prompt_tokens:
                outputs.append(self._finish_prompt(sequence, now_s))
        self._prefilling = [x for x in self._prefilling if x.phase is Phase.PREFILLING]
        return outputs

    def _finish_prompt(self, sequence: Sequence, now_s: float) -> RequestOutput:
        prompt_state = sequence.continuation.state
        output = sequence.advance()
        if output.finish is None:
            sequence.phase = Phase.GENERATING
            self._generating.append(sequence)
            return output
        # As in vLLM, a prompt whose first token ends the generation holds nothing.
        if sequence.hold and output.finish is FinishReason.LENGTH:
            output.held = self._hold(sequence, prompt_state, now_s)
        self._free(sequence)
        del self.requests[sequence.request_id]
        return output

    def _hold(self, sequence: Sequence, state: int, now_s: float) -> Held | None:
        if self._held.buried(sequence.request_id):
            return None
        blocks, sequence.blocks = sequence.blocks, []
        held = self._held.hold(sequence.request_id, blocks, now_s)
        offer = Offer(
            engine_id=self._settings.engine_id,
            rank=self.rank,
            request_id=sequence.request_id,
            kv_layout=self._settings.kv_layout,
            tokens=sequence.prompt_tokens,
            state=state,
            state_before_last=sequence.state_before_last,
            blocks=blocks,
            writer=sequence.arrival,
            expires_at_s=held.expires_at_s,
        )
        return Held(
            connector_params=offer.to_bytes(),
            block_count=len(blocks),
            remote_tokens=sequence.prompt_tokens,
            expires_at_s=held.expires_at_s,
        )
