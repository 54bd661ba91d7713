"""A status as text for a terminal: tables of pools, groups and ranks. Pure."""

from collections.abc import Callable, Mapping, Sequence

from services.router.status_page.view import GroupView, RankView, RouterView, Status
from splitwave.core.worker import Role

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def text_of(status: Status) -> str:
    """Everything, a line for the router and a table a pool."""
    lines = [] if status.router is None else _router_lines(status.router)
    for role, columns in ((Role.PREFILL, _PREFILL), (Role.DECODE, _DECODE)):
        lines += _pool_lines(role, status.pool(role), columns)
    return "\n".join(lines)


def _router_lines(router: RouterView) -> list[str]:
    return [
        f"router {router.router_id}: {router.state}, model {router.model},"
        f" version {router.version}, up {duration(router.uptime_s)}",
        f"  {router.live} of {router.live_max} being served,"
        f" {router.rooms_waiting} waiting for decode room, {router.prompts_waiting} for prefill",
        f"  {router.admitted} admitted, ended: {_counts(router.outcomes)};"
        f" resumed: {_counts(router.resumes)}; refused: {_counts(router.refused)}",
        f"  tokens: {router.prompt_tokens} prompt, {router.completion_tokens} completion;"
        f" KV handed over: {size(router.handoff_bytes)}",
    ]


Columns = Mapping[str, Callable[[GroupView, RankView], str]]
"""Title, and the cell of a rank."""

_PREFILL: Columns = {
    "QUEUED": lambda _, rank: str(rank.queued_tokens),
    "LEASED": lambda _, rank: f"{rank.blocks_used}/{rank.blocks_max}",
    "STEPS": lambda _, rank: _counts(rank.steps_by_kind),
    "DUMMY": lambda _, rank: str(rank.dummy_steps),
    "PROMPT TOKENS": lambda _, rank: str(rank.prompt_tokens),
    "GUARD": lambda _, rank: _counts(rank.guard_refusals),
}
_DECODE: Columns = {
    "SEATS": lambda _, rank: f"{rank.seats_held}/{rank.seats_max}",
    "GRANTED": lambda _, rank: str(rank.seats_used - rank.seats_held),
    "BLOCKS": lambda _, rank: f"{rank.blocks_used}/{rank.blocks_max}",
    "STEPS": lambda _, rank: _counts(rank.steps_by_kind),
    "DUMMY": lambda _, rank: str(rank.dummy_steps),
    "KV PULLED": lambda _, rank: f"{rank.pulls}, {size(rank.pulled_bytes)}",
    "GUARD": lambda _, rank: _counts(rank.guard_refusals),
}


def _pool_lines(role: Role, groups: Sequence[GroupView], columns: Columns) -> list[str]:
    serving = sum(group.state == "serving" for group in groups)
    lines = [f"{role} pool: {serving} of {len(groups)} group(s) serving"]
    rows = [["GROUP", "STATE", "MODE", "RANK", *columns]]
    for group in groups:
        rows += _group_rows(group, columns)
    if groups:
        lines += _aligned(rows)
    for group in groups:
        lines += [f"  {group.group_id or group.address}: {_notes(group)}"]
    return lines


def _group_rows(group: GroupView, columns: Columns) -> list[list[str]]:
    head = [group.group_id or group.address, group.state, group.mode or "-"]
    rows = [
        [*head, str(rank.rank), *(cell(group, rank) for cell in columns.values())]
        for rank in group.ranks
    ]
    return rows or [[*head, *("-" for _ in range(1 + len(columns)))]]


def _notes(group: GroupView) -> str:
    if not group.worker_id:
        return f"{group.address} has not described itself"
    leases = group.leases
    state = (
        f"leases {leases.live} live, {leases.pulled} pulled, {leases.released} released,"
        f" {leases.expired} expired"
        if group.role is Role.PREFILL
        else f"{group.asks_waiting} ask(s) waiting"
    )
    age = f", said {duration(group.age_s)} ago" if group.age_s > 3.0 else ""
    words = f"{state}; worker {group.worker_id} at {group.address}, epoch {group.epoch}"
    return words + _certified(group) + age


def _certified(group: GroupView) -> str:
    """How it stands, and why if that is not well."""
    if group.standing == "certified":
        said = f", certified by {group.certificate}"
    else:
        said = f", {group.standing or 'uncertified'}"
        said += f" ({group.uncertified_why})" if group.uncertified_why else ""
    return said + (f"; gets no work: {group.refused}" if group.refused else "")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return ["  " + "  ".join(row).rstrip() for row in cells]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in _SIZES[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_SIZES[-1]}"


def duration(seconds: float) -> str:
    """Seconds for people."""
    for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
