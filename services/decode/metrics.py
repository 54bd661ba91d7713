"""Metrics of a decode worker.

splitwave_decode_seats_used{rank}           seats granted or held
splitwave_decode_blocks_used{rank}          KV blocks granted or held
splitwave_decode_asks_waiting               asks for room that wait
splitwave_decode_sessions                   sessions that are kept, connected or not
splitwave_decode_sessions_reattached_total  sessions that went on over a new connection
splitwave_decode_attempts                   attempts that the engine works on
splitwave_decode_attempts_ended_total{end}  ended and refused attempts, by how
splitwave_decode_releases_failed_total      handoffs left to their lease: prefill not reached
"""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from services.decode.decode import Decoding
from services.decode.holdings import Holdings
from services.decode.room import Room
from services.decode.sessions import Sessions


def families(
    room: Room, sessions: Sessions, decoding: Decoding, holdings: Holdings
) -> Iterator[Metric]:
    """Every family, from the tables as they are now."""
    seats = GaugeMetricFamily(
        "splitwave_decode_seats_used", "Seats granted or held.", labels=["rank"]
    )
    blocks = GaugeMetricFamily(
        "splitwave_decode_blocks_used", "KV blocks granted or held.", labels=["rank"]
    )
    for rank in range(room.table.ranks):
        seats.add_metric([str(rank)], room.table.seats_used[rank])
        blocks.add_metric([str(rank)], room.table.blocks_used[rank])
    yield seats
    yield blocks
    for name, words, value in (
        ("asks_waiting", "Asks for room that wait.", room.load().asks_waiting),
        ("sessions", "Sessions that are kept.", len(sessions.by_id)),
        ("attempts", "Attempts that the engine works on.", len(holdings.engaged)),
    ):
        yield GaugeMetricFamily(f"splitwave_decode_{name}", words, value=value)
    for name, words, value in (
        ("sessions_reattached", "Sessions that were reattached.", sessions.reattached),
        ("releases_failed", "Handoffs left to their lease.", holdings.releases.failed),
    ):
        yield CounterMetricFamily(f"splitwave_decode_{name}", words, value=value)
    ended = CounterMetricFamily(
        "splitwave_decode_attempts_ended", "Ended and refused attempts, by how.", labels=["end"]
    )
    for end, count in decoding.ends.items():
        ended.add_metric([end], count)
    yield ended
