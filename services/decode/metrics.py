"""Metrics of a decode worker. docs/operations.md lists them, from the declarations here."""

from collections.abc import Iterator

from prometheus_client import Metric

from services.decode.decode import CONFIRMED, Decoding
from services.decode.frames import Frames
from services.decode.holdings import Holdings
from services.decode.room import Room
from services.decode.sessions import Sessions
from splitwave.core.errors import Reason
from splitwave.core.generation import FinishReason
from splitwave.runtime.metrics import counter, gauge, histogram

SEATS_MAX = gauge("splitwave_decode_seats_max", "Seats of a rank.", "rank")
SEATS_USED = gauge("splitwave_decode_seats_used", "Seats granted or held.", "rank")
SEATS_HELD = gauge("splitwave_decode_seats_held", "Seats in which an attempt sits.", "rank")
BLOCKS_MAX = gauge("splitwave_decode_blocks_max", "KV blocks of a rank.", "rank")
BLOCKS_USED = gauge("splitwave_decode_blocks_used", "KV blocks granted or held.", "rank")
BLOCKS_HELD = gauge("splitwave_decode_blocks_held", "KV blocks that attempts hold.", "rank")
SEATS_BEYOND = gauge(
    "splitwave_decode_seats_unaccounted",
    "Requests that a rank reports beyond the attempts that sit on it; no room is given for them.",
    "rank",
)
BLOCKS_BEYOND = gauge(
    "splitwave_decode_blocks_unaccounted",
    "KV blocks that a rank reports beyond those held: generations longer than their reserve.",
    "rank",
)
SEATS_MISSING = gauge(
    "splitwave_decode_seats_missing",
    "Attempts that sit on a rank and that it does not report; their stall limit ends them.",
    "rank",
)
CORRECTIONS = counter(
    "splitwave_decode_room_corrections",
    "Times that a rank reported to hold more, beyond the worker's account, than before.",
)
ASKS_WAITING = gauge("splitwave_decode_asks_waiting", "Asks for room that wait.")
SESSIONS = gauge("splitwave_decode_sessions", "Sessions that are kept, connected or not.")
SESSIONS_OPENED = counter("splitwave_decode_sessions_opened", "Sessions that began.")
SESSIONS_REATTACHED = counter(
    "splitwave_decode_sessions_reattached", "Sessions that went on over a new connection."
)
ATTEMPTS = gauge("splitwave_decode_attempts", "Attempts that the engine works on.")
ATTEMPTS_ENDED = counter(
    "splitwave_decode_attempts_ended",
    "Ended and refused attempts: a finish reason, or the reason of a failure (preempted, ...).",
    "end",
)
FRAMES = counter("splitwave_decode_frames", "Frames sent to routers.")
TOKENS = counter("splitwave_decode_tokens", "Tokens sent to routers.")
FENCES = counter(
    "splitwave_decode_fences",
    "Handoffs by what prefill said after the pull: confirmed, or the reason why not.",
    "answer",
)
HANDOFF_S = histogram(
    "splitwave_decode_handoff_seconds",
    "From an attempt's acceptance to its first output: the pull, and its first step.",
)
RELEASES_FAILED = counter(
    "splitwave_decode_releases_failed", "Handoffs left to their lease: prefill was not reached."
)
DRAINING = gauge("splitwave_decode_draining", "1 once the worker takes no new work, else 0.")

FAMILIES = (
    SEATS_MAX, SEATS_USED, SEATS_HELD, BLOCKS_MAX, BLOCKS_USED, BLOCKS_HELD,
    SEATS_BEYOND, BLOCKS_BEYOND, SEATS_MISSING, CORRECTIONS, ASKS_WAITING,
    SESSIONS, SESSIONS_OPENED, SESSIONS_REATTACHED, ATTEMPTS, ATTEMPTS_ENDED, FRAMES, TOKENS,
    FENCES, HANDOFF_S, RELEASES_FAILED, DRAINING,
)  # fmt: skip


_ENDS = (*FinishReason, *Reason)
_ANSWERS = (CONFIRMED, Reason.HANDOFF_EXPIRED, Reason.EPOCH_MISMATCH, Reason.WORKER_LOST)


def families(
    room: Room, sessions: Sessions, decoding: Decoding, holdings: Holdings
) -> Iterator[Metric]:
    """Every family, from the tables as they are now."""
    yield from _room_families(room)
    yield SESSIONS.of(len(sessions.by_id))
    yield SESSIONS_OPENED.of(sessions.opened)
    yield SESSIONS_REATTACHED.of(sessions.reattached)
    yield ATTEMPTS.of(len(holdings.engaged))
    # A count that appears with its first event has no increase: every one begins at 0.
    yield ATTEMPTS_ENDED.by_one({**dict.fromkeys(_ENDS, 0), **decoding.ends})
    yield from _frame_families(decoding.frames)
    yield FENCES.by_one({**dict.fromkeys(_ANSWERS, 0), **decoding.fences})
    yield HANDOFF_S.spread(decoding.handoff_s)
    yield RELEASES_FAILED.of(holdings.releases.failed)


def _room_families(room: Room) -> Iterator[Metric]:
    table = room.table
    yield SEATS_MAX.by_rank([table.seats_per_rank] * table.ranks)
    yield SEATS_USED.by_rank(table.seats_used)
    yield SEATS_HELD.by_rank(table.seats_held)
    yield BLOCKS_MAX.by_rank([table.blocks_per_rank] * table.ranks)
    yield BLOCKS_USED.by_rank(table.blocks_used)
    yield BLOCKS_HELD.by_rank(table.blocks_held)
    yield SEATS_BEYOND.by_rank([seats for seats, _ in table.unaccounted])
    yield BLOCKS_BEYOND.by_rank([blocks for _, blocks in table.unaccounted])
    yield SEATS_MISSING.by_rank(room.reports.missing)
    yield CORRECTIONS.of(room.reports.corrections)
    yield ASKS_WAITING.of(room.load().asks_waiting)
    yield DRAINING.of(room.draining)


def _frame_families(frames: Frames) -> Iterator[Metric]:
    yield FRAMES.of(frames.sent)
    yield TOKENS.of(frames.tokens_sent)
