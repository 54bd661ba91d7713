"""Histograms, declared families, and engines' counts that nobody waits for."""

import asyncio
import itertools
from collections.abc import Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

from splitwave.core.worker import RankCounters, Role, WorkerDescription
from splitwave.runtime.engine_metrics import (
    AGE_MAX_S,
    ENGINE_FAMILIES,
    WAIT_MAX_S,
    EngineCounters,
    engine_families,
)
from splitwave.runtime.metrics import Histogram, counter, gauge, histogram, render
from tests.sim.virtual_loop import run

WORKER = WorkerDescription(
    worker_id="d0",
    role=Role.DECODE,
    group_id="d",
    epoch=3,
    mode="decode_cpu_eager",
    model="m",
    ranks=1,
    block_size_tokens=16,
    blocks_per_rank=64,
    block_bytes=1,
    seats_per_rank=4,
    model_len_max_tokens=128,
    batch_max_tokens=128,
    kv_layout="layout",
)


def counted(steps: int) -> Sequence[RankCounters]:
    return [
        RankCounters(
            rank=0,
            steps_by_kind={"eager": steps},
            dummy_steps=1,
            prefill_tokens_computed=0,
            pulls=2,
            bytes_pulled=300,
            leases_live=0,
            blocks_used=5,
            guard_refusals={"preempted": 1},
        )
    ]


def test_a_histogram_counts_by_upper_bound_and_a_bound_is_its_own() -> None:
    seen = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        seen.observe(value)
    seen.observe(0.2, times=3)
    seen.observe(100.0, times=0)

    assert seen.counts == [2, 4, 1]
    assert seen.total == pytest.approx(8.25)


def test_families_come_out_as_prometheus_reads_them() -> None:
    spread = Histogram((0.1, 1.0))
    spread.observe(0.5, times=2)
    made = [
        gauge("splitwave_a", "A.", "rank").by_rank([3, 4]),
        counter("splitwave_b", "B.", "why").by_one({"late": 2}),
        histogram("splitwave_c_seconds", "C.").spread(spread),
    ]
    read = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(render(made).decode())
        for sample in family.samples
    }

    assert read == {
        ("splitwave_a", "0"): 3,
        ("splitwave_a", "1"): 4,
        ("splitwave_b_total", "late"): 2,
        ("splitwave_c_seconds_bucket", "0.1"): 0,
        ("splitwave_c_seconds_bucket", "1.0"): 2,
        ("splitwave_c_seconds_bucket", "+Inf"): 2,
        ("splitwave_c_seconds_count",): 2,
        ("splitwave_c_seconds_sum",): 1.0,
    }


def test_a_label_too_few_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError):
        gauge("splitwave_a", "A.", "role", "rank").by({("decode",): 1})


def test_engines_are_asked_at_most_once_a_second_however_many_scrapes_come() -> None:
    asked: list[float] = []

    async def ask() -> Sequence[RankCounters]:
        asked.append(asyncio.get_running_loop().time())
        return counted(len(asked))

    async def main() -> None:
        counters = EngineCounters(ask, WORKER, asyncio.get_running_loop().time)
        for _ in range(40):
            await asyncio.gather(counters.refresh(), counters.refresh())
            await asyncio.sleep(0.1)
        assert counters.last == tuple(counted(len(asked)))

    run(main())
    assert 3 <= len(asked) <= 4
    assert min(b - a for a, b in itertools.pairwise(asked)) >= AGE_MAX_S


def test_a_scrape_does_not_wait_for_an_engine_that_hangs_and_says_how_old_its_counts_are() -> None:
    answers = asyncio.Event()

    async def ask() -> Sequence[RankCounters]:
        await answers.wait()
        return counted(7)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        counters = EngineCounters(ask, WORKER, loop.time)
        await asyncio.sleep(100.0)
        began_s = loop.time()
        await counters.refresh()
        assert loop.time() - began_s == pytest.approx(WAIT_MAX_S)
        assert counters.last == ()
        assert counters.age_s > 100.0
        answers.set()
        await counters.refresh()
        assert counters.last == tuple(counted(7))
        assert counters.age_s < 1.0
        await counters.close()

    run(main())


def test_an_engine_that_fails_to_answer_leaves_what_was_known() -> None:
    async def ask() -> Sequence[RankCounters]:
        raise RuntimeError("gone")

    async def main() -> None:
        counters = EngineCounters(ask, WORKER, asyncio.get_running_loop().time)
        counters.last = counted(1)
        await counters.refresh()
        await counters.refresh()
        assert counters.last == counted(1)

    run(main())


def test_counts_are_renewed_without_a_scrape_and_without_waiting() -> None:
    asked: list[float] = []
    answers = asyncio.Event()

    async def ask() -> Sequence[RankCounters]:
        asked.append(asyncio.get_running_loop().time())
        if len(asked) == 3:
            await answers.wait()
        if len(asked) == 4:
            raise RuntimeError("gone")
        return counted(len(asked))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        counters = EngineCounters(ask, WORKER, loop.time)
        for _ in range(200):
            counters.renew()
            await asyncio.sleep(0.1)
            if loop.time() > 15.0:
                answers.set()
        await counters.close()
        assert counters.last == tuple(counted(len(asked)))

    run(main())
    assert asked == pytest.approx([2.0, 4.0, 6.0, 15.1, 17.1, 19.1], abs=0.15)


def test_every_engine_family_is_made_and_no_other() -> None:
    async def main() -> None:
        counters = EngineCounters(lambda: asyncio.sleep(0, counted(1)), WORKER, lambda: 0.0)
        await counters.refresh()
        made = list(engine_families(counters))
        assert [metric.name for metric in made] == [family.name for family in ENGINE_FAMILIES]
        assert all(metric.samples for metric in made)

    run(main())
