"""Metrics of a router. docs/operations.md lists them, from the declarations here."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric

from services.router.fleet import WorkerFleet
from services.router.front_door import FrontDoor
from services.router.refusals import REASONS
from services.router.tally import Tally
from splitwave.core.demands import RefusedGroup
from splitwave.core.envelope import Limit
from splitwave.core.errors import Reason
from splitwave.core.mode_guard import Action, Standing
from splitwave.core.worker import Role
from splitwave.runtime.metrics import counter, gauge, histogram, process_families
from splitwave.runtime.tracing_names import FINISHED

LIVE = gauge("splitwave_router_requests_live", "Completions being served.")
LIVE_MAX = gauge("splitwave_router_requests_live_max", "Completions served at once, at most.")
ADMITTED = counter(
    "splitwave_router_requests_admitted",
    "Requests let in. Each has one outcome in the end.",
)
REQUESTS = counter(
    "splitwave_router_requests",
    "Requests by how they ended: finished, or the reason of the failure.",
    "outcome",
)
REFUSED = counter(
    "splitwave_router_requests_refused",
    "Calls that ended before anything was admitted for them, shed ones included: by their HTTP"
    " path or gRPC method (unread: no head that could be read), and by why.",
    "route",
    "reason",
)
SHED = counter(
    "splitwave_router_requests_shed",
    "Requests not let in: overloaded (too many live) or worker_draining (the router stops).",
    "reason",
)
PROMPT_TOKENS = counter("splitwave_router_prompt_tokens", "Prompt tokens of admitted requests.")
CACHED_TOKENS = counter(
    "splitwave_router_cached_tokens", "Of these, tokens that a prefix cache of prefill had."
)
COMPLETION_TOKENS = counter(
    "splitwave_router_completion_tokens", "Completion tokens given to clients."
)
HANDOFF_BYTES = counter("splitwave_router_handoff_bytes", "KV bytes handed over.")
TTFT_S = histogram("splitwave_router_ttft_seconds", "From admission to the first token (TTFT).")
ITL_S = histogram(
    "splitwave_router_itl_seconds", "Between two arrivals of tokens of one stream (ITL)."
)
TPOT_S = histogram(
    "splitwave_router_tpot_seconds", "Mean time of a token behind the first, by completion (TPOT)."
)
REQUEST_S = histogram(
    "splitwave_router_request_seconds", "From admission to the end, however it ended."
)
GRANT_WAIT_S = histogram("splitwave_router_grant_wait_seconds", "Wait for room in decode.")
PREFILL_S = histogram(
    "splitwave_router_prefill_seconds", "Prefill: its queues, its computing and the way there."
)
HANDOFF_S = histogram(
    "splitwave_router_handoff_seconds", "From decode's acceptance to its first output."
)
ROOMS_WAITING = gauge("splitwave_router_rooms_waiting", "Requests that wait for decode room.")
PROMPTS_WAITING = gauge(
    "splitwave_router_prompts_waiting", "Prompts that wait for a place in a prefill queue."
)
RESUMES = counter(
    "splitwave_router_resumes",
    "Attempts beyond the first, by what the one before failed with.",
    "reason",
)
WORKERS = gauge("splitwave_router_workers", "Workers that new work may go to.", "role")
WORKERS_LISTED = gauge(
    "splitwave_router_workers_listed", "Workers that this router is to serve.", "role"
)
GROUPS = gauge(
    "splitwave_router_groups", "Groups by how they stand, as their workers say.", "role", "standing"
)
GROUPS_REFUSED = gauge(
    "splitwave_router_groups_refused",
    "Groups that get no work, by why: unknown, uncertified, level or decertified.",
    "role",
    "why",
)
GROUPS_JUDGED = counter(
    "splitwave_router_groups_judged",
    "Decertified groups that were told to drain, or to serve on since too many were out.",
    "role",
    "judgement",
)
OUTSIDE = counter(
    "splitwave_router_requests_outside_envelope",
    "Requests that no group of a role is certified for, by the limit that they would have left.",
    "limit",
)
SESSIONS_OPENED = counter("splitwave_router_sessions_opened", "Sessions with decode workers.")
SESSIONS_REATTACHED = counter(
    "splitwave_router_sessions_reattached", "Times that one went on over a new connection."
)
SESSIONS_LOST = counter(
    "splitwave_router_sessions_lost", "Sessions that ended while attempts ran in them."
)
HANDOFFS_LEFT = counter(
    "splitwave_router_handoffs_left", "Handoffs that could not be released; leases end them."
)

FAMILIES = (
    LIVE, LIVE_MAX, ADMITTED, REQUESTS, REFUSED, SHED, PROMPT_TOKENS, CACHED_TOKENS,
    COMPLETION_TOKENS, HANDOFF_BYTES, TTFT_S, ITL_S, TPOT_S, REQUEST_S, GRANT_WAIT_S, PREFILL_S,
    HANDOFF_S,
    ROOMS_WAITING, PROMPTS_WAITING, RESUMES, WORKERS, WORKERS_LISTED, GROUPS, GROUPS_REFUSED,
    GROUPS_JUDGED, OUTSIDE, SESSIONS_OPENED,
    SESSIONS_REATTACHED, SESSIONS_LOST, HANDOFFS_LEFT,
)  # fmt: skip


_SHED = (Reason.OVERLOADED, Reason.WORKER_DRAINING)


def _none_yet(reasons: Iterable[Reason]) -> dict[str, float]:
    """A count that appears with its first event has no increase: every one begins at 0."""
    return {reason.value: 0 for reason in reasons}


def _named(counts: Mapping[Reason, int]) -> dict[str, float]:
    return {reason.value: count for reason, count in counts.items()}


async def collect(door: FrontDoor) -> Iterable[Metric]:
    """Every family, from the counts as they are now."""
    return (
        *process_families("router", ready=door.ready()),
        *families(door),
        *door.traces.families(),
    )


def families(door: FrontDoor) -> Iterator[Metric]:
    """The router's own."""
    yield from _request_families(door)
    yield from _time_families(door)
    yield from _fleet_families(door)
    yield from _standing_families(door.fleet)
    yield from _session_families(door.fleet.tally)


def _request_families(door: FrontDoor) -> Iterator[Metric]:
    history = door.history
    yield LIVE.of(door.admission.live)
    yield LIVE_MAX.of(door.admission.live_max)
    yield ADMITTED.of(door.admitted)
    yield REQUESTS.by_one({FINISHED: 0, **_none_yet(Reason), **door.outcomes})
    yield REFUSED.by({(route, reason.value): n for (route, reason), n in _refused(door).items()})
    yield SHED.by_one({**_none_yet(_SHED), **_named(door.admission.refused)})
    yield PROMPT_TOKENS.of(history.prompt_tokens)
    yield CACHED_TOKENS.of(history.cached_tokens)
    yield COMPLETION_TOKENS.of(history.completion_tokens)
    yield HANDOFF_BYTES.of(history.handoff_bytes)
    resumable = [reason for reason in Reason if reason.resumable]
    yield RESUMES.by_one({**_none_yet(resumable), **_named(history.resumes)})


def _refused(door: FrontDoor) -> dict[tuple[str, Reason], int]:
    none_yet = {(route, reason): 0 for route in door.refusals.routes for reason in REASONS}
    return {**none_yet, **door.refusals.counts}


def _time_families(door: FrontDoor) -> Iterator[Metric]:
    history = door.history
    yield TTFT_S.spread(history.ttft_s)
    yield ITL_S.spread(door.fleet.tally.gaps_s)
    yield TPOT_S.spread(history.tpot_s)
    yield REQUEST_S.spread(history.total_s)
    yield GRANT_WAIT_S.spread(history.grant_wait_s)
    yield PREFILL_S.spread(history.prefill_s)
    yield HANDOFF_S.spread(history.handoff_s)


def _fleet_families(door: FrontDoor) -> Iterator[Metric]:
    fleet = door.fleet
    yield ROOMS_WAITING.of(fleet.rooms.waiting)
    yield PROMPTS_WAITING.of(fleet.prefill_pool.waiting)
    yield WORKERS.by_one({role.value: n for role, n in fleet.usable().items()})
    yield WORKERS_LISTED.by_one({role.value: n for role, n in fleet.listed().items()})
    yield HANDOFFS_LEFT.of(fleet.releases.left_to_expiry)


def _standing_families(fleet: WorkerFleet) -> Iterator[Metric]:
    """Of a fleet that demands something of its groups."""
    stands: Counter[tuple[str, str]] = Counter()
    refused: Counter[tuple[str, str]] = Counter()
    judged: Counter[tuple[Role, Action]] = Counter()
    if fleet.standings is not None:
        judged = fleet.standings.judged
        for _, group in fleet.standings.groups():
            why = group.refused(fleet.standings.demands)
            refused[group.role, "" if why is None else why[0]] += 1
            stands[group.role, group.standing or ""] += 1
    yield GROUPS.by({(r, x): stands[r, x] for r in Role for x in Standing})
    yield GROUPS_REFUSED.by({(r, x): refused[r, x] for r in Role for x in RefusedGroup})
    told = (Action.DRAIN, Action.SERVE_ON)
    yield GROUPS_JUDGED.by({(r, x): judged[r, x] for r in Role for x in told})
    asked = (Limit.PROMPT_LENGTH, Limit.OUTPUT_LENGTH, Limit.SEQUENCE_LENGTH, Limit.SAMPLING)
    yield OUTSIDE.by_one({limit: fleet.outside[limit] for limit in asked})


def _session_families(tally: Tally) -> Iterator[Metric]:
    yield SESSIONS_OPENED.of(tally.opened)
    yield SESSIONS_REATTACHED.of(tally.reattached)
    yield SESSIONS_LOST.of(tally.lost)
