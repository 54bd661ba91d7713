"""Checks of real engines' waves, run by tests/e2e/test_waves.py in a process of their own."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any  # JSON

from splitwave.core.wave import WaveCoordinator
from splitwave.engine.port import EngineRequest, Role
from splitwave.engine.vllm.start import preload
from tests.e2e.adapter_pair import nothing_held, within
from tests.e2e.checks import collect
from tests.e2e.wave_groups import Group, clocked, faults, running, start
from tests.sim.wave.mutants import LateFirstStart

HANG_S = 2.0
"""How long the race must hang under vLLM's coordinator to count as one."""
TRIES_MAX = 6
IDLE_S = 3.0


class Stack:
    """Where everything is, and the groups that several checks share."""

    def __init__(self, model: Path, out: Path) -> None:
        self.model, self.out = model, out
        self.prefill: Group
        self.two: Group
        self.four: Group

    async def running(self, role: Role, **changes: Any) -> Group:
        return await start(self.model, self.out, role, **changes)


async def race(group: Group) -> float | None:
    """Make a client believe that a paused group runs, then ask; seconds to the first token.

    A request that comes while the group is held by its operator sets the client's flag. It is
    aborted, the group is released, and all ranks sleep; but the client announces no first
    request any more, until a coordinator tells it better.
    """
    for rank in range(group.ranks):
        await group.run(rank, 2)
    lost, asked = await group.request(0, 4), await group.request(0, 4)
    await asyncio.sleep(0.5)
    await group.call_all("pause_scheduler", "keep", False)
    await asyncio.sleep(0.1)
    await group.caller.start(lost)
    await asyncio.sleep(0.05)
    await group.engine.abort([lost.engine_request_id])
    await asyncio.sleep(0.05)
    await group.call_all("resume_scheduler")
    waited_s = await group.first_token_s(asked, HANG_S)
    if waited_s is None:
        await group.run(0, 1)  # The next request wakes both.
    return waited_s


async def stock_race(stack: Stack) -> list[float | None]:
    """The positive control: vLLM's own coordinator, until it hangs.

    It tells clients better every few seconds, and then nothing is lost: so not every try hangs.
    """
    tries: list[float | None] = []
    with faults("stock_coordinator"):
        async with running(stack.model, stack.out, Role.PREFILL) as group:
            while len(tries) < TRIES_MAX and None not in tries:
                tries.append(await race(group))
    return tries


async def begin(stack: Stack) -> list[bool]:
    """Start the groups of the following checks."""
    stack.prefill = await stack.running(Role.PREFILL)
    stack.two = await stack.running(Role.DECODE, prefill=stack.prefill)
    return [group.engine.coordinator is not None for group in (stack.prefill, stack.two)]


async def races(stack: Stack) -> dict[str, list[float | None]]:
    """The same under ours."""
    groups = {"prefill": stack.prefill, "decode": stack.two}
    return {name: [await race(group) for _ in range(3)] for name, group in groups.items()}


async def idle(stack: Stack) -> dict[str, Any]:
    """What an idle group does: messages of each rank, steps, processor time."""
    group = stack.two
    await group.asleep()
    await asyncio.sleep(0.1)
    steps, messages = await group.steps(), group.coordinator.record.messages
    await asyncio.sleep(IDLE_S)
    return {
        "messages": group.coordinator.record.messages - messages,
        "steps": [b - a for a, b in zip(steps, await group.steps(), strict=True)],
    }


async def dropped_wakes(stack: Stack) -> dict[str, Any]:
    """Throw away all starts but the watchdog's: how long first tokens take from idle."""
    groups = {"prefill": stack.prefill, "decode": stack.two}
    return {name: await _dropped_wakes(group) for name, group in groups.items()}


async def _dropped_wakes(group: Group) -> dict[str, Any]:
    requests = [await group.request(i % 2, 1) for i in range(6)]
    waits: list[float | None] = []
    group.coordinator.drops_wakes = True
    for request in requests:
        await group.asleep()
        waits.append(await group.first_token_s(request, 5.0))
    group.coordinator.drops_wakes = False
    usual = []
    for _ in range(3):
        request = await group.request(0, 1)
        await group.asleep()
        usual.append(await group.first_token_s(request, 5.0))
    return {"waits_s": waits, "usual_s": usual}


async def burst(stack: Stack) -> dict[str, Any]:
    """64 requests at once at an idle group: waves, broadcasts, and the first one's wait.

    Three times, and a fourth time under a coordinator that gathers starts before it sends one.
    """
    group = stack.prefill
    alone = []
    for _ in range(5):
        request = await group.request(0, 1)
        await group.asleep()
        alone.append(await group.first_token_s(request, 5.0))
    bursts = [await _burst(group) for _ in range(3)]
    machine = group.coordinator.machine
    machine.__class__ = LateFirstStart
    late = await _burst(group)
    machine.__class__ = WaveCoordinator
    return {"bursts": bursts, "late": late, "alone_s": alone}


async def _burst(group: Group) -> dict[str, Any]:
    many = [await group.request(i % 2, 2) for i in range(64)]
    await group.asleep()
    machine = group.coordinator.machine
    wave, starts = machine.wave, machine.starts
    await asyncio.sleep(0.3)  # More than a segment waits for its ranks' last words.
    group.engine.wave_segments()
    with clocked(group.coordinator) as clock:
        first_s = await _first_of(group, many)
    await within(5, lambda: _true(len(group.coordinator.ended_segments) > 0))
    return {
        "segments": [
            {
                "why": x.why,
                "end": x.end,
                "tokens": x.tokens,
                "steps": x.steps,
                "wake": len(x.wake_s),
            }
            for x in group.engine.wave_segments()
        ],
        "waves": machine.wave - wave,
        "starts": machine.starts - starts,
        "first_s": first_s,
        "edge_s": clock.edge_s,
    }


async def _first_of(group: Group, many: list[EngineRequest]) -> float:
    """Serve all to their ends; seconds to the first output of the first."""
    began_s = time.monotonic()
    submitting = asyncio.ensure_future(group.caller.start(*many))  # All in one call.
    await within(10, lambda: _true(many[0].engine_request_id in group.caller.seen))
    first_s = time.monotonic() - began_s
    await submitting
    await within(10, lambda: _true(all(r.engine_request_id in group.caller.seen for r in many)))
    await group.asleep()
    return first_s


async def after_the_last(stack: Stack) -> dict[int, list[int]]:
    """Steps that the group goes on with when a request of so many tokens was its last."""
    found = {}
    for tokens in (1, 2, 17):
        request = await stack.two.request(0, tokens)
        await stack.two.asleep()
        await stack.two.caller.run(request)
        ended = await stack.two.steps()
        await stack.two.asleep()
        found[tokens] = [b - a for a, b in zip(ended, await stack.two.steps(), strict=True)]
    return found


async def abort_storm(stack: Stack) -> dict[str, Any]:
    """64 requests, all aborted wherever they are: what the ranks report comes to zero."""
    group = stack.two
    requests = [await group.request(i % 2, 200) for i in range(64)]
    await group.caller.start(*requests)
    await asyncio.sleep(0.3)
    busy = group.coordinator.record.loads()
    for request in requests:
        await group.engine.abort([request.engine_request_id])
    free = await within(2.0, lambda: nothing_held(group.engine))
    await group.asleep()
    await asyncio.sleep(0.1)
    return {"busy": busy, "free": free, "loads": group.coordinator.record.loads()}


async def skew(stack: Stack) -> dict[str, Any]:
    """Six requests beside one: the rank with few computes as wide as the other."""
    group = stack.two
    before = group.coordinator.record.work()
    requests = [await group.request(0, 20) for _ in range(6)] + [await group.request(1, 20)]
    await asyncio.gather(*(group.caller.run(request) for request in requests))
    await group.asleep()
    after = group.coordinator.record.work()
    return {
        "tokens": [b.tokens - a.tokens for a, b in zip(before, after, strict=True)],
        "padded": [b.padded_tokens - a.padded_tokens for a, b in zip(before, after, strict=True)],
    }


async def stopped_for_good(stack: Stack) -> dict[str, Any]:
    """Stop a rank under load and leave it so."""
    return await lost(stack.two, signal.SIGSTOP, 1)


async def four(stack: Stack) -> dict[str, Any]:
    """Four ranks: the race, a rank that is stopped for a while, a rank that is killed."""
    await stack.two.close()
    stack.four = group = await stack.running(Role.DECODE, prefill=stack.prefill, ranks=4)
    found: dict[str, Any] = {"race": await race(group)}
    requests = [await group.request(rank % 4, 60) for rank in range(8)]
    ends = asyncio.gather(*(group.caller.run(request) for request in requests))
    await within(5, lambda: _true(len(group.caller.seen) > 0))
    pid = group.engine.process_ids[2]
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(0.5)
    os.kill(pid, signal.SIGCONT)
    went_on_s = time.monotonic()
    seen = group.caller.batches
    await within(5, lambda: _true(group.caller.batches > seen))
    found["went_on_after_s"] = time.monotonic() - went_on_s
    await asyncio.wait_for(ends, 20)
    found["killed"] = await lost(group, signal.SIGKILL, 3)
    return found


async def lost(group: Group, number: signal.Signals, rank: int) -> dict[str, Any]:
    """Send a signal to a rank under load; how the group's end is told, and how soon."""
    requests = [await group.request(i % group.ranks, 300) for i in range(2 * group.ranks)]
    await group.caller.start(*requests)
    await within(5, lambda: _true(all(r.engine_request_id in group.caller.seen for r in requests)))
    began_s = time.monotonic()
    os.kill(group.engine.process_ids[rank], number)
    told = await group.caller.ended()
    return {
        "told": told,
        "after_s": time.monotonic() - began_s,
        "state": group.coordinator.machine.state.name,
    }


async def prefill_killed(stack: Stack) -> dict[str, Any]:
    """Kill a rank of the prefill group under load."""
    return await lost(stack.prefill, signal.SIGKILL, 1)


async def end(stack: Stack) -> list[int]:
    """Stop what runs; which processes are left?"""
    groups = (stack.prefill, stack.two, stack.four)
    pids = [pid for group in groups for pid in group.engine.process_ids]
    for group in groups:
        await group.close()
    return alive(pids)


def alive(pids: list[int]) -> list[int]:
    """Which of these processes still exist."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def _true(value: bool) -> bool:
    return value


CHECKS: list[Callable[[Stack], Awaitable[Any]]] = [
    stock_race, begin, races, idle, dropped_wakes, burst, after_the_last, abort_storm, skew,
    stopped_for_good, four, prefill_killed, end,
]  # fmt: skip

if __name__ == "__main__":
    preload()
    results, model = Path(sys.argv[1]), Path(sys.argv[2])
    asyncio.run(collect(results, Stack(model, results.parent / "logs"), CHECKS))
