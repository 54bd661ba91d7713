"""A prefill and a decode group side by side: what a check has in its hands."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from splitwave.certify.battery.cases import Case, Generated
from splitwave.certify.battery.drive import Flight, Group
from splitwave.certify.battery.verdict import CheckBroken
from splitwave.core.generation import Sampling, first_token_is_kept
from splitwave.core.worker import Role
from splitwave.engine.port import EngineRequest, Held, Pull
from splitwave.engine.vllm.config import VllmGroupSettings
from splitwave.engine.vllm.start import start_group

SETTLE_S = 10.0
POLL_S, POLL_MAX_S = 0.05, 0.5
"""Between the first two looks, and between late ones: each takes its time of the engines."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Opened:
    """A request that decode was given, and what prefill had said of it."""

    name: str
    first: Flight
    decoding: Flight | None
    """None if it ended with prefill's token."""
    keeps_first: bool
    """Whether prefill's token is the client's, or decode makes every token."""


class Rig:
    """Two groups and the way from one to the other. `target` is the one that is certified."""

    def __init__(self, target: Role, prefill: Group, decode: Group) -> None:
        self.role = target
        self.prefill, self.decode = prefill, decode
        self._names = itertools.count()
        self._known: dict[str, Generated] = {}
        """What the prefill group generates alone, by case: that of one boot does not change."""

    @property
    def target(self) -> Group:
        """The group under test."""
        return self.prefill if self.role is Role.PREFILL else self.decode

    def ranks(self) -> range:
        """Ranks of the group under test."""
        return range(self.target.description.ranks)

    def name(self, word: str) -> str:
        """An id that no request has had."""
        return f"{word}/{next(self._names)}"

    async def whole(self, case: Case) -> Generated:
        """Generate on the prefill group alone, prompt to end: the aggregated way.

        What a boot was asked before it is not asked again: both subjects of a battery ask for much
        the same. So nothing may be broken on it meanwhile.
        """
        if (known := self._known.get(repr(case))) is not None:
            return known
        request = EngineRequest(
            engine_request_id=self.name("whole"),
            rank=0,
            token_ids=case.token_ids,
            sampling=case.sampling,
        )
        found = _checked(await self.prefill.run(request), request).generated()
        self._known[repr(case)] = found
        return found

    async def generate(self, case: Case, rank: int) -> Generated:
        """Prefill on one group, decode on the other; `rank` is the target's."""
        opened = await self.open(case.token_ids, case.sampling, rank)
        return await self.finished(opened)

    async def finished(self, opened: Opened) -> Generated:
        """Wait for a request's end; what both groups together gave it."""
        if opened.decoding is not None:
            await self.decode.until(opened.decoding.ended, opened.name)
        return self.generated(opened)

    def generated(self, opened: Opened) -> Generated:
        """What a request was given so far by both groups together."""
        first, rest = opened.first.generated(), opened.decoding
        if rest is None:
            return first
        if rest.failure is not None:
            raise CheckBroken(f"{opened.name}: {rest.failure}: {rest.outputs[-1].failure_message}")
        then = rest.generated()
        if not opened.keeps_first:
            return then
        return Generated(first.token_ids + then.token_ids, first.logprobs + then.logprobs)

    async def open(self, token_ids: Sequence[int], sampling: Sampling, rank: int) -> Opened:
        """Prefill a prompt and hand it to decode; returns once decode has been given it."""
        name = self.name("request")
        keeps_first = first_token_is_kept(sampling)
        first = await self.hold(name, token_ids, sampling, self._of(self.prefill, rank))
        held = first.outputs[-1].held
        if held is None:
            return Opened(name, first, None, keeps_first)
        going_on = await self.hand_over(name, token_ids, sampling, first, rank)
        return Opened(name, first, going_on, keeps_first)

    async def hold(
        self, name: str, token_ids: Sequence[int], sampling: Sampling, rank: int
    ) -> Flight:
        """Prefill a prompt; its KV is held afterwards."""
        request = EngineRequest(
            engine_request_id=name, rank=rank, token_ids=token_ids, sampling=sampling, hold=True
        )
        return _checked(await self.prefill.run(request), request)

    async def hand_over(
        self,
        name: str,
        token_ids: Sequence[int],
        sampling: Sampling,
        first: Flight,
        rank: int,
    ) -> Flight:
        """Submit to decode what prefill holds, behind the token that prefill sampled."""
        held = first.outputs[-1].held
        if held is None:
            raise CheckBroken(f"{name}: prefill held nothing")
        request = decode_request(name, token_ids, sampling, first, held)
        request = replace(request, rank=self._of(self.decode, rank))
        return (await self.decode.start(request))[0]

    def _of(self, group: Group, rank: int) -> int:
        """The rank of a group that serves a rank of the target."""
        return rank % group.description.ranks

    async def settled(self) -> bool:
        """True once nothing is held on either side; False if something is still after a while."""
        return await within(SETTLE_S, self._holds_nothing)

    async def _holds_nothing(self) -> bool:
        return await self.prefill.holds_nothing() and await self.decode.holds_nothing()

    async def quiet(self) -> None:
        """Wait until nothing is held, and forget past requests; CheckBroken if it never is."""
        if not await self.settled():
            raise CheckBroken("blocks or leases are held although no request runs")
        self.prefill.forget()
        self.decode.forget()

    async def reboot(self, settings: VllmGroupSettings, say: Say) -> None:
        """Stop the group under test, and start it anew."""
        await self.target.close()
        epoch = self.target.description.epoch + 1
        say(f"starting {self.role} again")
        group = Group(await start_group(replace(settings, epoch=epoch)))
        if self.role is Role.PREFILL:
            self.prefill = group
            self._known.clear()
        else:
            self.decode = group

    async def close(self) -> None:
        """Stop both groups: decode first, whose pulls prefill serves."""
        await self.decode.close()
        await self.prefill.close()


def decode_request(
    name: str, token_ids: Sequence[int], sampling: Sampling, first: Flight, held: Held
) -> EngineRequest:
    """The request with which decode goes on behind prefill's token."""
    kept = first.token_ids if first_token_is_kept(sampling) else []
    return EngineRequest(
        engine_request_id=name,
        rank=0,
        token_ids=[*token_ids, *kept],
        sampling=replace(sampling, max_tokens=sampling.max_tokens - len(kept)),
        pull=Pull(
            handoff_id=name,
            remote_tokens=held.remote_tokens,
            connector_params=held.connector_params,
        ),
    )


def _checked(flight: Flight, request: EngineRequest) -> Flight:
    if flight.failure is not None:
        last = flight.outputs[-1]
        raise CheckBroken(f"{request.engine_request_id}: {flight.failure}: {last.failure_message}")
    return flight


async def within(limit_s: float, true: Callable[[], Awaitable[bool]]) -> bool:
    """Ask until the answer is yes, at most `limit_s`."""
    give_up_at_s, poll_s = time.monotonic() + limit_s, POLL_S
    while not await true():
        if time.monotonic() > give_up_at_s:
            return False
        await asyncio.sleep(poll_s)
        poll_s = min(1.2 * poll_s, POLL_MAX_S)
    return True


async def boot(target: Role, settings: dict[Role, VllmGroupSettings], say: Say) -> Rig:
    """Start both groups; SettingsError or EngineDied as `start_group` raises them."""
    groups: dict[Role, Group] = {}
    try:
        for role in (Role.PREFILL, Role.DECODE):
            say(f"starting {role}, mode {settings[role].mode}")
            groups[role] = Group(await start_group(settings[role]))
    except BaseException:
        for group in groups.values():
            await group.close()
        raise
    return Rig(target, groups[Role.PREFILL], groups[Role.DECODE])
