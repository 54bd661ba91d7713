"""The coordinator of one group's waves: messages and ticks in, effects out.

The ranks of a group step together or not at all. Any rank with work keeps all of
them stepping; when a vote finds no work they pause together, and the wave number
goes up. A rank that sleeps while another has work stops the group, so the
coordinator's one duty is that every rank is woken, whatever message is lost.
docs/waves.md has the protocol.

It believes nothing about a rank but that rank's own last word: sending a start is
no proof that anyone runs. It speaks to vLLM's engines as their own coordinator
does; the reports come from Splitwave's plugin inside them.
"""

import math
from collections.abc import Sequence

from splitwave.core.wave_message import (
    Effect,
    EpochEnded,
    GroupState,
    Publish,
    RankReport,
    StartReason,
    StartWave,
    WaveSettings,
)


class _Rank:
    """The last word of one rank."""

    __slots__ = (
        "epoch",
        "heard_at_s",
        "held",
        "kv_usage",
        "number",
        "running",
        "stepping",
        "waiting",
        "wave",
    )

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.number = 0
        self.heard_at_s = 0.0
        self.wave = 0
        self.stepping = False
        self.held = False
        self.waiting = 0
        self.running = 0
        self.kv_usage = 0.0


class WaveCoordinator:
    """Wakes every rank of a group when any has work.

    Each method returns what to do, in order. Call `tick` after at most `wait_s()`.

    Invariants, asserted by `check`:
      C1  no rank's word is of a wave beyond the group's
      C2  RUNNING means that every rank has said, and lately, that it steps in the group's wave
      C3  STARTING has a time, at most one patience away, of the next start, and RUNNING one at
          which a silent rank is doubted
      C4  PAUSED and PAUSING mean that nothing is announced and that nobody is known to step
      C5  front-ends are told that the group runs only while it is RUNNING
    and in place:
      C6  two starts of one wave are at least one patience apart, however many ask
    """

    def __init__(
        self, *, ranks: int, epoch: int, now_s: float, settings: WaveSettings | None = None
    ) -> None:
        """A group whose ranks start with `epoch`; nothing is known of them yet."""
        assert ranks > 0
        self.settings = settings or WaveSettings()
        self.wave = 0
        self.epoch = epoch
        self.state = GroupState.PAUSED
        self.why: StartReason | None = None
        """Why the last start was broadcast."""
        self.starts = 0
        """Broadcasts since this object was made."""
        self._ranks = [_Rank(epoch) for _ in range(ranks)]
        self._announced: StartReason | None = None
        self._patience_s = self.settings.patience_s
        self._silence_s = self.settings.silence_s
        self._doubt_s = self.settings.doubt_s
        self._clock_s = 0.0  # Time passed. Unlike now_s it never goes back.
        self._seen_s = now_s
        self._advanced_at_s = 0.0
        self._started_wave = -1
        self._started_at_s = 0.0
        self._due_s: float | None = None  # When the watchdog acts.
        self._published: tuple[int, bool] | None = None
        self._published_at_s = 0.0
        self._counts_changed = False

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return len(self._ranks)

    @property
    def loads(self) -> list[tuple[int, int, float]]:
        """(waiting, running, KV usage) of each rank, by its last word."""
        return [(rank.waiting, rank.running, rank.kv_usage) for rank in self._ranks]

    # What front-ends say

    def on_first_request(self, wave: int, now_s: float) -> list[Effect]:
        """A front-end has sent a request, with this wave, and believes the group paused."""
        self._pass(now_s)
        self._advance(wave)
        if self.state is GroupState.HELD:
            # The front-end now believes that the group runs, and would not ask again.
            self._published = None
        self._announce(StartReason.FIRST_REQUEST)
        return self._settle()

    # What ranks say

    def on_report(self, report: RankReport, now_s: float) -> list[Effect]:
        """A rank's word on itself."""
        self._pass(now_s)
        rank = self._known(report.rank, report.epoch)
        if rank is None or not self._is_new(rank, report):
            return self._settle()
        if report.wave > self.wave:
            self._advance(report.wave)
            self._advanced_at_s = self._ended_by_s(rank)
        rank.number = report.number
        rank.heard_at_s = self._clock_s
        rank.wave = report.wave
        rank.stepping = report.stepping
        rank.held = report.held
        self._count(rank, report)
        return self._settle()

    def on_start_wave(self, rank: int, epoch: int, wave: int, now_s: float) -> list[Effect]:
        """A rank runs in a wave that not all may have joined.

        An engine says so of a request that came with an ended wave, and rank 0 of
        each first step. A wave that has ended says nothing: the rank's report will.
        """
        self._pass(now_s)
        if self._known(rank, epoch) is not None and wave >= self.wave:
            self._advance(wave)
            self._announce(StartReason.START_WAVE)
        return self._settle()

    def on_wave_complete(self, rank: int, epoch: int, wave: int, now_s: float) -> list[Effect]:
        """All ranks have voted that this wave's work is done."""
        self._pass(now_s)
        if self._known(rank, epoch) is not None:
            self._advance(wave + 1)
        return self._settle()

    # What whoever runs the group says

    def on_rank_started(self, rank: int, epoch: int, now_s: float) -> list[Effect]:
        """One rank's process was started again, with a larger epoch; the others live on."""
        self._pass(now_s)
        self._known(rank, epoch)
        return self._settle()

    def on_rank_died(self, rank: int, epoch: int, reason: str, now_s: float) -> list[Effect]:
        """A rank is lost, and with it the group: its peers wait for it in their next step."""
        self._pass(now_s)
        dead = self._ranks[rank] if rank < len(self._ranks) else None
        if dead is None or epoch < dead.epoch or self.state is GroupState.ENDED:
            return []
        self.state = GroupState.ENDED
        self._due_s = None
        ended = EpochEnded(self.epoch, f"rank {rank}: {reason}")
        return [ended, self._publish()]

    def on_resized(self, epochs: Sequence[int], now_s: float) -> list[Effect]:
        """The group now has one rank an entry, with these epochs; words of known ones stand."""
        self._pass(now_s)
        assert epochs
        del self._ranks[len(epochs) :]
        for index, epoch in enumerate(epochs):
            if index == len(self._ranks):
                self._ranks.append(_Rank(epoch))
            self._known(index, epoch)
        self._counts_changed = True
        return self._settle()

    def on_restarted(self, *, ranks: int, epoch: int, now_s: float) -> list[Effect]:
        """The whole group was started again.

        The wave goes on from where it was, and one further: front-ends hold requests
        of the old one, and a word of a dead rank must not pass for one of a live rank.
        """
        assert epoch > self.epoch
        self._pass(now_s)
        self.epoch = epoch
        self.wave += 1
        self._ranks = [_Rank(epoch) for _ in range(ranks)]
        self._announced = None
        self._due_s = None
        self._counts_changed = True
        self.state = GroupState.PAUSED
        return self._settle()

    # Time

    def tick(self, now_s: float) -> list[Effect]:
        """Time has passed."""
        self._pass(now_s)
        return self._settle()

    def wait_s(self) -> float:
        """Seconds from the last call until `tick` has something to do."""
        if self.state is GroupState.ENDED:
            return math.inf
        settings = self.settings
        silence_s = settings.publish_min_s if self._counts_changed else settings.publish_max_s
        due_s = self._published_at_s + silence_s
        if self._due_s is not None and self._due_s < due_s:
            due_s = self._due_s
        return max(0.0, due_s - self._clock_s)

    # Inside

    def _pass(self, now_s: float) -> None:
        """Let time pass. A clock that was set back costs the time since the last call, no more."""
        if now_s > self._seen_s:
            self._clock_s += now_s - self._seen_s
        self._seen_s = now_s

    def _known(self, index: int, epoch: int) -> _Rank | None:
        """The rank, anew if the epoch is; None if these are the words of a dead one."""
        if index >= len(self._ranks):
            return None
        rank = self._ranks[index]
        if epoch < rank.epoch:
            return None
        if epoch > rank.epoch:
            rank = self._ranks[index] = _Rank(epoch)
            self._counts_changed = True
        return rank

    def _is_new(self, rank: _Rank, report: RankReport) -> bool:
        return report.number > rank.number

    def _count(self, rank: _Rank, report: RankReport) -> None:
        if (report.waiting, report.running) != (rank.waiting, rank.running):
            self._counts_changed = True
        rank.waiting = report.waiting
        rank.running = report.running
        rank.kv_usage = report.kv_usage

    def _advance(self, wave: int) -> None:
        """Move to a wave that someone has seen. All work of the waves before has ended."""
        if wave > self.wave:
            self.wave = wave
            self._advanced_at_s = self._clock_s
            self._announced = None

    def _ended_by_s(self, rank: _Rank) -> float:
        """When the wave that this rank shows to be over had ended at the latest.

        One that answers a start after it had fallen silent would have repeated itself
        while it stepped: what others said since was said after the end.
        """
        if rank.stepping and rank.heard_at_s < self._started_at_s:
            return min(self._clock_s, rank.heard_at_s + self.settings.report_busy_s)
        return self._clock_s

    def _announce(self, why: StartReason) -> None:
        """Note that there is work, until every rank steps or the wave has ended."""
        if self._announced is None:
            self._announced = why

    def _settle(self) -> list[Effect]:
        """Draw the state from what is known, and return what it asks for."""
        if self.state is GroupState.ENDED:
            return []
        self.state = self._derive()
        effects: list[Effect] = []
        if self.state is GroupState.STARTING:
            self._watch(effects)
        else:
            self._announced = None
            self._due_s = None
            if self.state is GroupState.RUNNING:
                heard_at_s = min([rank.heard_at_s for rank in self._ranks])
                self._due_s = heard_at_s + self._silence_s
        self._tell(effects)
        return effects

    def _derive(self) -> GroupState:
        awake = asleep = held = 0
        for rank in self._ranks:
            if rank.stepping:
                awake += self._is_awake(rank)
            elif rank.held:
                held += 1
            else:
                asleep += 1
        if awake == len(self._ranks):
            return GroupState.RUNNING
        if held == len(self._ranks):
            return GroupState.HELD
        if awake or self._announced or self._left_behind() is not None:
            return GroupState.STARTING
        return GroupState.PAUSED if asleep + held == len(self._ranks) else GroupState.PAUSING

    def _is_awake(self, rank: _Rank) -> bool:
        """True if its last word proves that it is awake: it leaves a wave only for the next."""
        return rank.wave == self.wave and self._clock_s < rank.heard_at_s + self._silence_s

    def _left_behind(self) -> int | None:
        """A rank that has said, after a wave's end, that it still steps in it or one before.

        One that has said nothing since may sleep, its word of that lost. Nobody waits
        then: whoever waits repeats itself.
        """
        since_s = max(self._advanced_at_s + self._doubt_s, self._clock_s - self._silence_s)
        for index, rank in enumerate(self._ranks):
            if rank.stepping and rank.wave < self.wave and rank.heard_at_s > since_s:
                return index
        return None

    def _watch(self, effects: list[Effect]) -> None:
        """Start the wave: at once if this is its first start, or when patience ends."""
        is_first = self._started_wave != self.wave
        self._due_s = self._clock_s if is_first else self._started_at_s + self._patience_s
        if self._due_s > self._clock_s:
            return
        exclude = self._left_behind() if is_first else None
        if not is_first or exclude is not None:
            self.why = StartReason.WATCHDOG
        else:
            self.why = self._announced or StartReason.REPORT
        self.starts += 1
        self._started_wave = self.wave
        self._started_at_s = self._clock_s
        self._due_s = self._clock_s + self._patience_s
        effects.append(StartWave(self.wave, self.why, exclude))

    def _tell(self, effects: list[Effect]) -> None:
        """Publish a changed wave or state at once, counts soon, and all of it now and then."""
        settings = self.settings
        silence_s = settings.publish_min_s if self._counts_changed else settings.publish_max_s
        changed = self._published != (self.wave, self.state is GroupState.RUNNING)
        if changed or self._clock_s >= self._published_at_s + silence_s:
            effects.append(self._publish())

    def _publish(self) -> Publish:
        self._published = (self.wave, self.state is GroupState.RUNNING)
        self._published_at_s = self._clock_s
        self._counts_changed = False
        return Publish(self.loads, *self._published)

    def check(self) -> None:
        """Assert the invariants. Cheap enough to call after every change in tests."""
        state = self.state
        awake = 0
        for rank in self._ranks:
            assert rank.wave <= self.wave, "C1"
            if rank.stepping and self._is_awake(rank):
                awake += 1
        if state is GroupState.RUNNING:
            assert awake == len(self._ranks), "C2"
            assert self._due_s is not None, "C3"
        if state is GroupState.STARTING:
            assert self._due_s is not None, "C3"
            assert 0 < self._due_s - self._clock_s <= self._patience_s + 1e-9, "C3"
        if state in (GroupState.PAUSED, GroupState.PAUSING):
            assert self._announced is None, "C4"
            assert not awake, "C4"
        if self._published is not None and state is not GroupState.ENDED:
            assert self._published[1] is (state is GroupState.RUNNING), "C5"
