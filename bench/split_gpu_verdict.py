"""What a split stack has to show, judged from what was seen of it. No I/O."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from splitwave.core.mode import StepKind, lookup
from splitwave.core.worker import WorkerDescription
from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing_check import broken_links, faults, missing, of_requests
from splitwave.runtime.tracing_files import SpanRecord
from splitwave.runtime.wave_spans import WAVE_SEGMENT

STEPS_OF_KIND = "splitwave.wave.steps."
STEPS_OF_SIZE = "splitwave.wave.steps_of_size."
UBATCHED = (StepKind.EAGER_UBATCHED, StepKind.UBATCHED_FULL)
TIE_LOGPROB = {"float32": 0.0, "bfloat16": 0.5}
"""How much less likely than the aggregated run's own a token may be, in its eyes: batches of other
shapes round otherwise, and a near tie then goes the other way: by 0.27 where bfloat16 is beside
float32 on one engine, with logprobs 0.14 apart (median; 0.41 in the tenth that differ most). In
float32 nothing may differ."""
EQUAL_SHARE_MIN = {"float32": 1.0, "bfloat16": 0.8}
"""Sequences that must be equal to their last token."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One generation of the aggregated run."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, float]]
    """At each place, those of the likeliest tokens."""


@dataclass(frozen=True, slots=True)
class Given:
    """One generation of the split stack."""

    name: str
    way: str
    """`http`, `http stream` or `grpc`."""
    prompt_tokens: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All that was seen of one run."""

    dtype: str
    references: Mapping[str, Reference]
    given: Sequence[Given]
    workers: Mapping[str, WorkerDescription]
    """By role, with counters, when all requests had ended."""
    spans: Sequence[SpanRecord]
    """Of all processes, read once they have stopped."""


@dataclass(slots=True)
class Check:
    """One claim."""

    name: str
    figures: dict[str, object] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """For the report."""
        return {"name": self.name, "ok": not self.wrong, **self.figures, "wrong": self.wrong[:10]}


def judge(seen: Seen) -> list[Check]:
    """Every claim; a run is good if none has anything wrong."""
    return [tokens(seen), steps(seen), prefill_on_decode(seen), handoffs(seen), freed(seen),
            traces(seen), waves(seen)]  # fmt: skip


def tokens(seen: Seen) -> Check:
    """Tokens are those of the aggregated run, whichever way they were asked for."""
    check, equal = Check("tokens"), 0
    for one in seen.given:
        told = difference(one, seen.references[one.name], TIE_LOGPROB[seen.dtype])
        equal += told == ""
        if told.startswith("wrong"):
            check.wrong.append(f"{one.way}, {one.name}: {told}")
    ways = Counter(one.way for one in seen.given)
    check.figures = {"sequences": len(seen.given), "equal": equal, "by_way": dict(ways)}
    if not seen.given or equal < EQUAL_SHARE_MIN[seen.dtype] * len(seen.given):
        check.wrong.append(f"{equal} of {len(seen.given)} sequences are equal to the last token")
    if missing := {"http", "http stream", "grpc"} - set(ways):
        check.wrong.append(f"nothing was asked by {', '.join(sorted(missing))}")
    return check


def difference(ours: Given, theirs: Reference, tie: float) -> str:
    """Empty if equal, else what differs: a near tie, from which on texts part, or wrong."""
    pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
    place = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        lengths = len(ours.token_ids), len(theirs.token_ids)
        return "" if lengths[0] == lengths[1] else f"wrong: {lengths[0]} tokens, not {lengths[1]}"
    row = theirs.logprobs[place] if theirs.logprobs else {theirs.token_ids[place]: 0.0}
    token = ours.token_ids[place]
    behind = row[theirs.token_ids[place]] - row.get(token, -math.inf)
    word = "tie" if behind <= tie else "wrong"
    return f"{word}: token {place} is {token}, {behind:.3f} behind {theirs.token_ids[place]}"


def steps(seen: Seen) -> Check:
    """No step of a rank was of a kind outside its mode, and every rank stepped."""
    check = Check("steps")
    for role, worker in seen.workers.items():
        allowed = lookup(worker.mode).step_kinds
        for rank in worker.rank_counters:
            check.figures[f"{role} {rank.rank}"] = dict(rank.steps_by_kind)
            strays = {k: n for k, n in rank.steps_by_kind.items() if k not in allowed and n}
            if strays:
                check.wrong.append(f"{role} rank {rank.rank} ran {strays} outside {worker.mode}")
            if not any(rank.steps_by_kind.values()):
                check.wrong.append(f"{role} rank {rank.rank} ran no step")
        if len(worker.rank_counters) != worker.ranks:
            check.wrong.append(f"{role}: {len(worker.rank_counters)} of {worker.ranks} ranks tell")
    return check


def prefill_on_decode(seen: Seen) -> Check:
    """Decode computed no prompt."""
    counts = [rank.prefill_tokens_computed for rank in seen.workers["decode"].rank_counters]
    check = Check("decode prefill tokens", {"by_rank": counts})
    if any(counts):
        check.wrong.append(f"decode computed {sum(counts)} tokens of prompts")
    computed = sum(rank.prefill_tokens_computed for rank in seen.workers["prefill"].rank_counters)
    asked = sum(one.prompt_tokens for one in seen.given)
    check.figures |= {"prefill_computed": computed, "asked": asked}
    # Some engines count a prompt's last token as the first one generated.
    if computed < asked - len(seen.given):
        check.wrong.append(f"prefill computed {computed} tokens of {asked} that were asked")
    return check


def handoffs(seen: Seen) -> Check:
    """What decode pulled is what the prompts' blocks hold, in counters and in traces."""
    decode = seen.workers["decode"]
    size = decode.block_size_tokens
    due = sum(math.ceil(x.prompt_tokens / size) * decode.block_bytes for x in seen.given)
    moved = sum(rank.bytes_pulled for rank in decode.rank_counters)
    pulls = sum(rank.pulls for rank in decode.rank_counters)
    told = [span for span in seen.spans if span.name == names.HANDOFF]
    traced = sum(int(str(span.attributes.get("splitwave.handoff.bytes", 0))) for span in told)
    fences = sorted(_ms(span) for span in seen.spans if span.name == names.CONFIRM)
    check = Check("handoffs", {"bytes": moved, "due": due, "traced": traced, "pulls": pulls})
    if fences:
        check.figures["fence_ms_p50"] = round(fences[len(fences) // 2], 3)
        check.figures["fence_ms_max"] = round(fences[-1], 3)
    for words, found in (("pulled", moved), ("in traces", traced)):
        if found != due:
            check.wrong.append(f"{found} bytes {words}, {due} are due")
    if len(fences) != len(seen.given):
        check.wrong.append(f"{len(fences)} pulls were confirmed, of {len(seen.given)}")
    return check


def freed(seen: Seen) -> Check:
    """Nothing is held once all have ended, and no lease has ended by time."""
    check = Check("freed")
    for role, worker in seen.workers.items():
        held = {
            "blocks": sum(rank.blocks_used for rank in worker.rank_counters),
            "leases": sum(rank.leases_live for rank in worker.rank_counters) + worker.leases.live,
            "expired": worker.leases.expired,
        }
        check.figures[role] = held
        check.wrong += [f"{role}: {count} {what}" for what, count in held.items() if count]
    return check


def traces(seen: Seen) -> Check:
    """Each request has its whole trace, and links to waves lead somewhere."""
    requests = [span for span in of_requests(seen.spans) if span.is_request]
    ended = Counter(str(span.attributes.get(names.OUTCOME)) for span in requests)
    check = Check("traces", {"requests": len(requests), "outcomes": dict(ended)})
    check.wrong += faults(seen.spans) + missing(seen.spans) + broken_links(seen.spans)
    if ended != {names.FINISHED: len(seen.given)}:
        check.wrong.append(f"{len(seen.given)} finished requests are due, there are {dict(ended)}")
    return check


def waves(seen: Seen) -> Check:
    """The traces of waves tell of microbatches where the mode has them, and of graph sizes."""
    check = Check("waves")
    for role, worker in seen.workers.items():
        segments = [span for span in seen.spans if _is_wave_of(span, worker.group_id)]
        kinds, sizes = _summed(segments, STEPS_OF_KIND), _summed(segments, STEPS_OF_SIZE)
        check.figures[role] = {"segments": len(segments), "kinds": kinds, "sizes": sizes}
        mode = lookup(worker.mode)
        if worker.ranks > 1 and not segments:
            check.wrong.append(f"{role} has no trace of a wave")
        split = [kind for kind in UBATCHED if kind in mode.step_kinds]
        if split and not any(kinds.get(kind) for kind in split):
            check.wrong.append(f"{role} ran no microbatches, which {worker.mode} is for")
        gridded = sum(count for kind, count in kinds.items() if not kind.startswith("eager"))
        if mode.has_grid and sum(sizes.values()) != gridded:
            check.wrong.append(f"{role} tells sizes of {sum(sizes.values())} steps of {gridded}")
    return check


def _is_wave_of(span: SpanRecord, group_id: str) -> bool:
    return span.name == WAVE_SEGMENT and span.attributes.get("splitwave.group") == group_id


def _summed(segments: Sequence[SpanRecord], prefix: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for name, count in _of(segments, prefix):
        found[name] += count
    return dict(found)


def _of(segments: Sequence[SpanRecord], prefix: str) -> Iterator[tuple[str, int]]:
    for span in segments:
        for name, value in span.attributes.items():
            if name.startswith(prefix):
                yield name.removeprefix(prefix), int(str(value))


def _ms(span: SpanRecord) -> float:
    return (span.ended_ns - span.began_ns) / 1e6
