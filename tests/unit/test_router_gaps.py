"""Gaps between tokens: one count a row, however they come, and none for a first token."""

import asyncio

from splitwave.core.session import Accepted
from tests.fakes import FakeSink
from tests.sim.virtual_loop import run
from tests.unit.test_router_session import Peer, frame


def gaps(peer: Peer) -> tuple[int, float]:
    """How many gaps were counted, and their sum."""
    counted = peer.session.tally.gaps_s
    return sum(counted.counts), round(counted.total, 6)


def test_streams_in_pace_are_counted_together_and_one_that_is_late_by_itself() -> None:
    async def main() -> None:
        await asyncio.sleep(1.0)
        peer = Peer()
        peer.accept("a", 0)
        peer.accept("b", 1)
        peer.say(frame((0, 0, [1]), (1, 0, [1])))
        assert gaps(peer) == (0, 0.0)  # Both first tokens came from decode.

        await asyncio.sleep(0.02)
        peer.say(frame((0, 1, [2]), (1, 1, [2])))
        assert gaps(peer) == (2, 0.04)

        await asyncio.sleep(0.03)
        peer.say(frame((0, 2, [3])))
        await asyncio.sleep(0.01)
        peer.say(frame((0, 3, [4]), (1, 2, [3])))
        assert gaps(peer) == (5, round(0.04 + 0.03 + 0.01 + 0.04, 6))

    run(main())


def test_the_gap_behind_prefills_token_counts() -> None:
    async def main() -> None:
        await asyncio.sleep(1.0)
        peer, sink = Peer(), FakeSink()
        sink.last_at_s = asyncio.get_running_loop().time()  # Prefill's token was shown.
        await asyncio.sleep(0.5)
        peer.submit("a", sink=sink)
        peer.say(Accepted("a", 0, 0))
        peer.say(frame((0, 0, [1])))
        assert gaps(peer) == (1, 0.5)

    run(main())


def test_tokens_that_nobody_wants_are_not_counted() -> None:
    async def main() -> None:
        await asyncio.sleep(1.0)
        peer = Peer()
        attempt, _ = peer.accept("a", 0)
        peer.say(frame((0, 0, [1])))
        peer.session.cancel(attempt)
        await asyncio.sleep(0.1)
        peer.say(frame((0, 1, [2])))
        assert gaps(peer) == (0, 0.0)

    run(main())
