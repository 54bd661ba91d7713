"""Certified groups on real engines: a burst leaves no step outside the mode, and a rank may die.

One stack is started three times over: without certificates, after a rank's death, and once more.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from splitwave.core.errors import ServingError
from splitwave.core.worker import WorkerDescription
from splitwave.wire.client import Ask, describe_worker, generate
from tests.e2e.adapter_cases import greedy, prompt
from tests.e2e.live_stack import LiveStack, running

pytestmark = pytest.mark.timeout(900)

RANKS, SEATS = 2, 4
LIVE_MAX = 48
"""What the router takes on: six times the seats, and fewer than come."""
BURST = 10 * RANKS * SEATS
LENGTHS = tuple(range(2, 202, 20))
TOKENS = 60
PROMPT_MAX = 255
"""Of prefill, whose engines are shorter than decode's: by one token less than they hold."""
OUTSIDE = 6
"""Requests amid the burst for which prefill is not certified, and as many that nothing can hold."""
BACK_WITHIN_S = 120.0
FLAGS = (
    *("--certify", "smoke", "--decode-mode", "decode_cpu_compiled"),
    *("--decode-setting", f"seats_max={SEATS}"),
    *("--prefill-setting", f"model_len_max_tokens={PROMPT_MAX + 1}"),
    *("--router", f"live_max={LIVE_MAX}"),
)
MAKES = "making smoke ones"
SMOKE_CPU_S_MAX = 90
"""Of CPU time, which neighbours hardly change. A half more than the 60 of design.md for slower
cores; it takes a good deal less, but that a compiled group has a compiler run."""


@dataclass(frozen=True, slots=True)
class End:
    """How one request ended."""

    tokens: Sequence[int]
    reason: str = "finished"
    message: str = ""


@dataclass(slots=True)
class Seen:
    """What the scenario saw."""

    made: list[str] = field(default_factory=list)
    """Lines of the first start about certificates that it makes."""
    alone: dict[int, End] = field(default_factory=dict)
    burst: list[tuple[int, End]] = field(default_factory=list)
    outside: list[End] = field(default_factory=list)
    unfit: list[End] = field(default_factory=list)
    waiting_max: int = 0
    """Most requests that waited for a seat at one time."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The router's behind the burst, as `name{label=value}`."""
    loaded: dict[str, WorkerDescription] = field(default_factory=dict)
    back: WorkerDescription | None = None
    """Decode after a rank's death."""
    made_after_death: list[str] = field(default_factory=list)
    status: str = ""
    """What `splitwave status` printed then."""
    again: dict[int, End] = field(default_factory=dict)
    certificates: list[Mapping[str, float]] = field(default_factory=list)
    """Files and when they were written: behind the first start, the death, the second start."""
    second: dict[str, WorkerDescription] = field(default_factory=dict)
    made_by_second: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def seen(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    home = tmp_path_factory.mktemp("state")
    environment = {"XDG_STATE_HOME": str(home)}
    found = Seen()
    with running(
        tiny_model, tmp_path_factory.mktemp("first"), *FLAGS, environment=environment
    ) as stack:
        found.made = making(stack)
        found.certificates.append(files(home))
        asyncio.run(bursting(stack, found))
        asyncio.run(dying(stack, found))
        found.certificates.append(files(home))
    with running(
        tiny_model, tmp_path_factory.mktemp("second"), *FLAGS, environment=environment
    ) as stack:
        found.second = asyncio.run(described(stack))
        found.made_by_second = making(stack)
        found.certificates.append(files(home))
    return found


def making(stack: LiveStack) -> list[str]:
    """Lines in which a stack says that it certifies."""
    return [line for line in stack.output if "certify:" in line]


def files(home: Path) -> Mapping[str, float]:
    """Certificates below a user's state."""
    return {path.name: path.stat().st_mtime for path in home.rglob("*.cert.json")}


async def described(stack: LiveStack) -> dict[str, WorkerDescription]:
    found = {}
    for name in ("prefill", "decode"):
        async with stack.channel(name) as channel:
            found[name] = await describe_worker(channel, 10.0, counters=True)
    return found


async def asked(stack: LiveStack, length: int, tokens: int = TOKENS) -> End:
    """One request, to its end."""
    got: list[int] = []
    async with stack.channel("grpc") as channel:
        try:
            ask = Ask(prompt=prompt(length), sampling=greedy(tokens))
            async for answer in generate(channel, ask, 200.0):
                assert answer.offset == len(got)
                got += answer.token_ids
        except ServingError as error:
            return End(got, error.reason.value, error.message)
    return End(got)


async def bursting(stack: LiveStack, found: Seen) -> None:
    """Ten requests for each seat at once, and among them some that must not run."""
    for length in LENGTHS:
        found.alone[length] = await asked(stack, length)
    lengths = [LENGTHS[number % len(LENGTHS)] for number in range(BURST)]
    looking = asyncio.create_task(look(stack, found))
    ends, found.outside, found.unfit = await asyncio.gather(
        asyncio.gather(*(asked(stack, length) for length in lengths)),
        asyncio.gather(*(asked(stack, PROMPT_MAX + 1 + n) for n in range(OUTSIDE))),
        asyncio.gather(*(asked(stack, 1024 + n) for n in range(OUTSIDE))),
    )
    looking.cancel()
    found.burst = list(zip(lengths, ends, strict=True))
    found.loaded = await described(stack)
    told = await asyncio.to_thread(read, stack, "/metrics")
    found.metrics = {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(told)
        for sample in family.samples
    }


async def look(stack: LiveStack, found: Seen) -> None:
    """Note how many requests wait for a seat, again and again."""
    while True:
        status = json.loads(await asyncio.to_thread(read, stack, "/status.json"))
        found.waiting_max = max(found.waiting_max, status["router"]["rooms_waiting"])
        await asyncio.sleep(0.05)


def read(stack: LiveStack, path: str) -> str:
    with urllib.request.urlopen(f"http://{stack.address('http')}{path}", timeout=60) as response:
        text: str = response.read().decode()
    return text


async def dying(stack: LiveStack, found: Seen) -> None:
    """Kill the last rank of decode, and ask again once its group is back."""
    epoch, said = found.loaded["decode"].epoch, len(making(stack))
    worker = listener(stack, "decode")
    engines = sorted(worker.children(), key=lambda child: child.create_time())
    os.kill(engines[RANKS - 1].pid, signal.SIGKILL)
    found.back = await back(stack, epoch)
    for length in LENGTHS[:3]:
        found.again[length] = await served(stack, length)
    command = [sys.executable, "-m", "services.cli.main", "status"]
    done = await asyncio.create_subprocess_exec(
        *command, "--router", stack.address("http"), stdout=subprocess.PIPE
    )
    found.status = (await done.communicate())[0].decode()
    found.made_after_death = making(stack)[said:]


def listener(stack: LiveStack, name: str) -> psutil.Process:
    """The worker that listens on a program's port."""
    for process in stack.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            ports = [c.laddr.port for c in process.net_connections() if c.status == "LISTEN"]
            if stack.ports[name] in ports and process.children():
                return process
    raise AssertionError(f"nobody listens for {name}")


async def back(stack: LiveStack, epoch: int) -> WorkerDescription:
    """What decode says once it is ready in a later epoch."""
    until_s = time.monotonic() + BACK_WITHIN_S
    while time.monotonic() < until_s:
        with contextlib.suppress(ServingError):
            found = (await described(stack))["decode"]
            if found.epoch > epoch and found.load.ready:
                return found
        await asyncio.sleep(0.2)
    raise AssertionError("the group did not come back:\n" + stack.said())


async def served(stack: LiveStack, length: int) -> End:
    """A request's end; the router may still have to hear that the group is back."""
    until_s = time.monotonic() + BACK_WITHIN_S
    while True:
        end = await asked(stack, length)
        if end.reason == "finished" or time.monotonic() > until_s:
            return end
        await asyncio.sleep(0.5)


def test_a_first_start_makes_smoke_certificates_and_serves_by_them(seen: Seen) -> None:
    assert any(MAKES in line for line in seen.made)
    assert len(seen.certificates[0]) == 2
    assert [group.certification.level for group in seen.loaded.values()] == ["smoke", "smoke"]
    assert [group.load.standing.value for group in seen.loaded.values()] == ["certified"] * 2


def test_a_smoke_battery_keeps_to_its_cpu_time(seen: Seen) -> None:
    spent_s = [int(found) for line in seen.made for found in re.findall(r"(\d+) CPU sec", line)]

    assert len(spent_s) == 2, "told of each group"
    assert max(spent_s) <= SMOKE_CPU_S_MAX


def test_a_burst_of_ten_times_the_seats_leaves_no_step_outside_the_mode(seen: Seen) -> None:
    decode = seen.loaded["decode"]
    kinds = [dict(rank.steps_by_kind) for rank in decode.rank_counters]

    assert decode.mode == "decode_cpu_compiled"
    assert [set(found) for found in kinds] == [{"compiled"}] * RANKS
    assert min(found["compiled"] for found in kinds) > TOKENS
    assert [rank.prefill_tokens_computed for rank in decode.rank_counters] == [0] * RANKS
    assert {kind for r in seen.loaded["prefill"].rank_counters for kind in r.steps_by_kind} == {
        "eager"
    }
    assert [group.certification.violating_steps for group in seen.loaded.values()] == [0, 0]


def test_who_comes_in_a_burst_waits_for_a_seat_or_is_shed_with_the_reason(seen: Seen) -> None:
    reasons = [end.reason for _, end in seen.burst]

    assert set(reasons) == {"finished", "overloaded"}
    assert reasons.count("finished") >= LIVE_MAX
    assert seen.waiting_max > 0
    assert counted(seen, "requests_shed_total", reason="overloaded") + counted(
        seen, "requests_total", outcome="overloaded"
    ) == reasons.count("overloaded")


def test_what_a_burst_serves_is_what_each_gets_alone(seen: Seen) -> None:
    assert {len(end.tokens) for end in seen.alone.values()} == {TOKENS}
    for length, end in seen.burst:
        if end.reason == "finished":
            assert end.tokens == seen.alone[length].tokens


def test_a_prompt_outside_the_envelope_is_refused_by_the_limits_name_and_counted(
    seen: Seen,
) -> None:
    assert {end.reason for end in seen.outside} == {"outside_envelope"}
    assert all("(prompt_length)" in end.message for end in seen.outside)
    assert counted(seen, "requests_outside_envelope_total", limit="prompt_length") == OUTSIDE
    assert {end.reason for end in seen.unfit} == {"invalid_request"}
    assert not any(end.tokens for end in [*seen.outside, *seen.unfit])


def counted(seen: Seen, name: str, **labels: str) -> float:
    """A count of the router's."""
    return seen.metrics[f"splitwave_router_{name}{sorted(labels.items())}"]


def test_a_group_whose_rank_died_is_back_by_the_same_certificate(seen: Seen) -> None:
    before, after = seen.loaded["decode"].certification, seen.back
    assert after is not None
    assert after.certification.certificate_id == before.certificate_id != ""
    assert after.load.standing.value == "certified"
    assert not after.uncertified
    assert seen.made_after_death == []
    assert seen.certificates[1] == seen.certificates[0]
    assert f"certified by {before.certificate_id} (smoke)" in seen.status
    assert "uncertified" not in seen.status


def test_it_serves_as_before(seen: Seen) -> None:
    assert seen.again == {length: seen.alone[length] for length in LENGTHS[:3]}


def test_a_second_start_finds_the_certificates(seen: Seen) -> None:
    first = [group.certification.certificate_id for group in seen.loaded.values()]

    assert [x.certification.certificate_id for x in seen.second.values()] == first
    assert seen.made_by_second == []
    assert seen.certificates[2] == seen.certificates[0]
