"""The verdict on a split stack: each claim holds for what is right, and fails for what is not."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any  # a test's keywords

import pytest

from bench.split_gpu_verdict import Given, Reference, Seen, difference, judge
from splitwave.core.worker import LeaseCounts, RankCounters, Role, WorkerDescription
from splitwave.runtime.tracing_files import SpanRecord
from tests.unit.split_gpu_seen import spans_of, wave

LENGTH, BLOCK_TOKENS, BLOCK_BYTES = 40, 32, 1000
BLOCKS = 2
WAYS = ("http", "http stream", "grpc")
TOP = {65: -0.1, 66: -0.2, 67: -9.0}


def counters(rank: int, kind: str, **more: Any) -> RankCounters:
    fields: dict[str, Any] = {
        "rank": rank, "steps_by_kind": {kind: 9}, "dummy_steps": 1, "prefill_tokens_computed": 0,
        "pulls": 0, "bytes_pulled": 0, "leases_live": 0, "blocks_used": 0,
    }  # fmt: skip
    return RankCounters(**fields | more)


def worker(role: Role, mode: str, ranks: tuple[RankCounters, ...]) -> WorkerDescription:
    return WorkerDescription(
        worker_id=f"{role}-0", role=role, group_id=f"{role}-0", epoch=1, mode=mode, model="m",
        ranks=len(ranks), block_size_tokens=BLOCK_TOKENS, blocks_per_rank=64,
        block_bytes=BLOCK_BYTES, seats_per_rank=8, model_len_max_tokens=512, batch_max_tokens=512,
        kv_layout="l", rank_counters=ranks, leases=LeaseCounts(started=3, pulled=3),
    )  # fmt: skip


def seen(dtype: str = "float32") -> Seen:
    """Three requests, one each way, on GPU modes with microbatches and graphs."""
    prefill = tuple(
        counters(rank, "eager_ubatched", prefill_tokens_computed=tokens)
        for rank, tokens in enumerate((2 * LENGTH, LENGTH))
    )
    decode = tuple(
        counters(rank, "full", pulls=pulls, bytes_pulled=pulls * BLOCKS * BLOCK_BYTES)
        for rank, pulls in enumerate((2, 1))
    )
    spans: list[SpanRecord] = []
    for at in range(len(WAYS)):
        spans += spans_of(at, BLOCKS * BLOCK_BYTES)
    spans += [
        wave("prefill", {"steps.eager_ubatched": 18}),
        wave("decode", {"steps.full": 18, "steps_of_size.8": 12, "steps_of_size.16": 6}),
    ]
    return Seen(
        dtype=dtype,
        references={"a": Reference((65, 66, 65), (TOP, {66: -0.1}, TOP))},
        given=[Given("a", way, LENGTH, (65, 66, 65)) for way in WAYS],
        workers={
            "prefill": worker(Role.PREFILL, "prefill_eager_ht_dbo", prefill),
            "decode": worker(Role.DECODE, "decode_graph_ht", decode),
        },
        spans=spans,
    )


def failing(what: Seen) -> set[str]:
    return {check.name for check in judge(what) if check.wrong}


def test_a_right_run_has_nothing_wrong() -> None:
    assert {check.name: check.wrong for check in judge(seen()) if check.wrong} == {}


def with_token(what: Seen, token: int) -> Seen:
    given = [replace(what.given[0], token_ids=(token, 66, 65)), *what.given[1:]]
    return replace(what, given=given)


def with_rank(what: Seen, role: str, **changes: Any) -> Seen:
    first, *others = what.workers[role].rank_counters
    ranks = (replace(first, **changes), *others)
    return replace(
        what, workers={**what.workers, role: replace(what.workers[role], rank_counters=ranks)}
    )


def with_attributes(what: Seen, group: str, **changes: object) -> Seen:
    spans = [
        replace(span, attributes={**span.attributes, **changes})
        if span.attributes.get("splitwave.group") == f"{group}-0"
        else span
        for span in what.spans
    ]
    return replace(what, spans=spans)


def without(what: Seen, name: str) -> Seen:
    first = next(span for span in what.spans if span.name == name)
    return replace(what, spans=[span for span in what.spans if span is not first])


BROKEN: list[tuple[str, Callable[[Seen], Seen], set[str]]] = [
    ("another token", lambda s: with_token(s, 67), {"tokens"}),
    ("fewer tokens", lambda s: replace(
        s, given=[replace(s.given[0], token_ids=(65, 66)), *s.given[1:]]), {"tokens"}),
    ("an eager step", lambda s: with_rank(
        s, "decode", steps_by_kind={"full": 8, "eager": 1}), {"steps"}),
    ("a rank without steps", lambda s: with_rank(s, "prefill", steps_by_kind={}), {"steps"}),
    ("a prompt on decode", lambda s: with_rank(
        s, "decode", prefill_tokens_computed=1), {"decode prefill tokens"}),
    ("a prompt from a cache", lambda s: with_rank(
        s, "prefill", prefill_tokens_computed=1), {"decode prefill tokens"}),
    ("bytes that were not counted", lambda s: with_rank(
        s, "decode", bytes_pulled=0), {"handoffs"}),
    ("a block that stays", lambda s: with_rank(s, "prefill", blocks_used=1), {"freed"}),
    ("a lease that expired", lambda s: replace(s, workers={
        **s.workers, "prefill": replace(s.workers["prefill"], leases=LeaseCounts(expired=1)),
    }), {"freed"}),
    ("a pull that nobody confirmed", lambda s: without(
        s, "splitwave.handoff.confirm"), {"handoffs", "traces"}),
    ("a lost span", lambda s: without(s, "splitwave.prefill.compute"), {"traces"}),
    ("no microbatches", lambda s: with_attributes(s, "prefill", **{
        "splitwave.wave.steps.eager_ubatched": 0}), {"waves"}),
    ("no graph sizes", lambda s: with_attributes(s, "decode", **{
        "splitwave.wave.steps_of_size.8": 0}), {"waves"}),
    ("no waves", lambda s: replace(s, spans=[
        span for span in s.spans if span.name != "splitwave.wave.segment"]), {"waves"}),
]  # fmt: skip


@pytest.mark.parametrize(("breaks", "checks"), [x[1:] for x in BROKEN], ids=[x[0] for x in BROKEN])
def test_what_is_broken_fails_its_claim_and_no_other(
    breaks: Callable[[Seen], Seen], checks: set[str]
) -> None:
    assert failing(breaks(seen())) == checks


def test_in_bfloat16_a_near_tie_may_go_the_other_way_and_a_wrong_token_may_not() -> None:
    ours = Given("a", "grpc", LENGTH, (66, 1, 1))
    reference = Reference((65, 66, 65), (TOP, TOP, TOP))

    assert difference(ours, reference, 0.15).startswith("tie")
    assert difference(ours, reference, 0.05).startswith("wrong")
    assert difference(replace(ours, token_ids=(99,)), reference, 0.15).startswith("wrong")
    assert difference(replace(ours, token_ids=(65, 66, 65)), reference, 0.0) == ""


def test_ties_do_not_excuse_more_than_a_few_sequences() -> None:
    many = dataclasses.replace(seen("bfloat16"))
    few = replace(
        many,
        given=[*many.given, *many.given, *many.given, replace(many.given[0], token_ids=(66, 1, 1))],
    )
    most = replace(many, given=[replace(one, token_ids=(66, 1, 1)) for one in many.given])

    assert "tokens" not in failing(few)
    assert "tokens" in failing(most)
