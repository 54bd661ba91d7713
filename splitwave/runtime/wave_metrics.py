"""The waves of a worker's group, as metrics. docs/operations.md lists them, from here."""

from collections.abc import Iterator, Sequence

from prometheus_client import Metric

from splitwave.core.wave_record import WAKE_BOUNDS_S, RankWave, WaveStatus
from splitwave.runtime.metrics import Histogram, counter, gauge, histogram

STATE = gauge(
    "splitwave_waves_state",
    "1; the label says what the group does: paused, pausing, starting, running, held or ended.",
    "state",
)
NUMBER = gauge("splitwave_waves_number", "The group's wave number.")
STARTED = counter("splitwave_waves_started", "Waves that were started.")
BROADCASTS = counter(
    "splitwave_waves_broadcasts",
    "Starts that were broadcast, by why; watchdog: a message was lost, or a rank did not wake.",
    "why",
)
MESSAGES = counter("splitwave_waves_messages", "Messages that the group's coordinator was sent.")
WAKE_S = histogram(
    "splitwave_waves_wake_seconds", "From the start of a wave to a rank's word that it steps."
)
STEPPING = gauge("splitwave_waves_stepping", "1 while a rank takes part in steps, else 0.", "rank")
VOTES = counter("splitwave_waves_votes", "Votes on whether any rank still has work.", "rank")
DUMMY_STEPS = counter("splitwave_waves_dummy_steps", "Steps without work of its own.", "rank")
TOKENS = counter("splitwave_waves_tokens", "Tokens computed for requests.", "rank")
SKEW = counter(
    "splitwave_waves_skew_tokens",
    "What skewed batches cost: tokens by which other ranks' steps were wider than the rank's own.",
    "rank",
)
SILENCE_S = gauge("splitwave_waves_silence_seconds", "Time since a rank's last report.", "rank")

WAVE_FAMILIES = (
    STATE, NUMBER, STARTED, BROADCASTS, MESSAGES, WAKE_S, STEPPING, VOTES, DUMMY_STEPS, TOKENS,
    SKEW, SILENCE_S,
)  # fmt: skip


def wave_families(waves: WaveStatus | None) -> Iterator[Metric]:
    """Every family; none for a group without waves."""
    if waves is None:
        return
    yield STATE.by_one({waves.state: 1})
    yield NUMBER.of(waves.wave)
    yield STARTED.of(waves.waves)
    yield BROADCASTS.by_one(waves.starts_by_why)
    yield MESSAGES.of(waves.messages)
    wakes = Histogram(WAKE_BOUNDS_S)
    wakes.counts, wakes.total = list(waves.wake_counts), waves.wake_total_s
    yield WAKE_S.spread(wakes)
    yield from _rank_families(waves.ranks)


def _rank_families(ranks: Sequence[RankWave]) -> Iterator[Metric]:
    yield STEPPING.by_rank([rank.stepping for rank in ranks])
    yield VOTES.by_rank([rank.work.votes for rank in ranks])
    yield DUMMY_STEPS.by_rank([rank.work.dummy_steps for rank in ranks])
    yield TOKENS.by_rank([rank.work.tokens for rank in ranks])
    yield SKEW.by_rank([rank.work.padded_tokens - rank.work.tokens for rank in ranks])
    yield SILENCE_S.by_rank([max(0.0, rank.silence_s) for rank in ranks])
