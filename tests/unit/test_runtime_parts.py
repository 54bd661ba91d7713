"""Logs, metrics, the engine's outbox, the pace of a watch."""

import asyncio
import itertools
import json
import logging
import resource
from collections.abc import Sequence

import pytest
from prometheus_client.core import GaugeMetricFamily

from splitwave.runtime.logs import HumanLines, JsonLines
from splitwave.runtime.metrics import scrape
from splitwave.runtime.outbox import Outbox
from splitwave.runtime.process import raise_file_limit, unless_stopped
from splitwave.runtime.watch import watch
from tests.sim.virtual_loop import run


def record(**extra: object) -> logging.LogRecord:
    """A log record with extras."""
    logger = logging.getLogger("splitwave.test")
    return logger.makeRecord("splitwave.test", 20, "f", 1, "took %d s", (3,), None, None, extra)


def test_a_line_for_people_shows_what_stands_in_extra() -> None:
    line = HumanLines("prefill").format(record(request_id="r1", rank=2))

    assert line.endswith("INFO prefill: took 3 s request_id=r1 rank=2")


def test_what_a_library_adds_to_every_record_is_no_extra() -> None:
    class Theirs(logging.LogRecord):
        def __init__(self, *args: object, **fields: object) -> None:
            super().__init__(*args, **fields)  # type: ignore[arg-type]  # passed through
            self.their_field = 1

    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(Theirs)
    try:
        assert HumanLines("prefill").format(record(rank=2)).endswith("took 3 s rank=2")
    finally:
        logging.setLogRecordFactory(before)


def test_a_json_line_is_one_object_with_the_request() -> None:
    line = JsonLines("prefill").format(record(request_id="r1"))

    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["service"], fields["message"], fields["request_id"]) == (
        "prefill", "took 3 s", "r1",
    )  # fmt: skip


def test_metrics_are_collected_when_they_are_scraped() -> None:
    values = iter([1.0, 2.0])

    async def collect() -> list[GaugeMetricFamily]:
        return [GaugeMetricFamily("splitwave_test", "A test.", value=next(values))]

    async def main() -> None:
        for wanted in (b"splitwave_test 1.0", b"splitwave_test 2.0"):
            body = (await scrape(collect)).body
            assert isinstance(body, bytes)
            assert wanted in body

    run(main())


def test_the_outbox_keeps_the_order_and_joins_neighbours() -> None:
    calls: list[tuple[str, list[int]]] = []

    async def submit(items: Sequence[int]) -> None:
        await asyncio.sleep(0.1)
        calls.append(("submit", list(items)))

    async def release(items: Sequence[int]) -> None:
        calls.append(("release", list(items)))

    async def main() -> None:
        outbox = Outbox()
        running = asyncio.create_task(outbox.run())
        outbox.put(submit, 1)
        outbox.put(submit, 2)
        outbox.put(release, 1)
        outbox.put(submit, 3)
        await asyncio.sleep(0.05)
        outbox.put(release, 3)
        await asyncio.sleep(1.0)
        running.cancel()

    run(main())
    assert calls == [("submit", [1, 2]), ("release", [1]), ("submit", [3]), ("release", [3])]


def test_what_a_call_raises_ends_the_outbox() -> None:
    async def broken(items: Sequence[int]) -> None:
        raise ValueError("engine")

    async def main() -> None:
        outbox = Outbox()
        outbox.put(broken, 1)
        with pytest.raises(ValueError, match="engine"):
            await outbox.run()

    run(main())


def test_a_watch_writes_at_once_on_change_and_at_least_every_two_seconds() -> None:
    written: list[tuple[float, int]] = []
    value = 0

    async def write(now: int) -> None:
        written.append((round(asyncio.get_running_loop().time(), 3), now))

    async def main() -> None:
        nonlocal value
        watching = asyncio.create_task(watch(lambda: value, write))
        await asyncio.sleep(0.55)
        for _ in range(50):
            value += 1
            await asyncio.sleep(0.01)
        await asyncio.sleep(4.0)
        watching.cancel()

    run(main())
    assert written[0] == (0.0, 0)
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(written)]
    assert min(gaps) > 0.099
    assert 1.9 < max(gaps) <= 2.2
    assert written[-1][1] == 50


def test_a_start_that_is_stopped_is_cancelled_to_its_end() -> None:
    ended: list[str] = []

    async def start() -> str:
        try:
            await asyncio.sleep(10.0)
            return "started"
        finally:
            await asyncio.sleep(0.5)
            ended.append("cleaned up")

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, stop.set)
        assert await unless_stopped(start(), stop) is None
        assert ended == ["cleaned up"]
        assert await unless_stopped(start(), asyncio.Event()) == "started"

    run(main())


def test_a_shells_limit_of_open_files_is_raised_to_what_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
    try:
        assert raise_file_limit() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
