"""What `splitwave waves` prints."""

from dataclasses import replace

from services.cli.waves import text_of
from splitwave.core.wave_message import RankWork
from splitwave.core.wave_record import RankWave, WaveStatus
from splitwave.core.worker import Role, WorkerDescription
from splitwave.wire.waves import waves_from_proto, waves_to_proto

WORK = RankWork(
    steps_by_kind={"eager": 30, "full": 10}, dummy_steps=4, votes=5, tokens=60, padded_tokens=75
)
WAVES = WaveStatus(
    state="starting",
    wave=7,
    why="watchdog",
    waves=3,
    starts_by_why={"first_request": 3, "watchdog": 2},
    messages=90,
    ranks=(
        RankWave(
            rank=0, wave=7, stepping=True, waiting=2, running=16, work=WORK, silence_s=0.25,
            wake_s=0.0125,
        ),
        RankWave(rank=1, wave=7, held=True, silence_s=1.0),
        RankWave(rank=2, silence_s=-1.0),
    ),
)  # fmt: skip
WORKER = WorkerDescription(
    worker_id="decode-0", role=Role.DECODE, group_id="g", epoch=9, mode="m", model="x", ranks=3,
    block_size_tokens=32, blocks_per_rank=9, block_bytes=1, seats_per_rank=4,
    model_len_max_tokens=100, batch_max_tokens=10, kv_layout="k", waves=WAVES,
)  # fmt: skip


def test_waves_travel_whole() -> None:
    assert waves_from_proto(waves_to_proto(WAVES)) == WAVES


def test_each_rank_has_a_line_with_what_it_does_and_what_that_costs() -> None:
    head, starts, _, *ranks = text_of(WORKER)

    assert head == "decode-0 (decode, group g, epoch 9): starting, wave 7"
    assert starts.strip() == (
        "3 waves started by 5 broadcasts (3 first_request, 2 watchdog, last by watchdog);"
        " 90 messages"
    )
    assert ranks[0].split() == [
        "0", "steps", "7", "2", "16", "40", "10%", "5", "60", "15", "12.5ms", "0.2s",
    ]  # fmt: skip
    assert ranks[1].split()[:2] == ["1", "held"]
    assert ranks[2].split()[:2] == ["2", "unheard"]


def test_a_group_without_a_coordinator_says_so() -> None:
    (line,) = text_of(replace(WORKER, waves=None, ranks=1))

    assert line.endswith("no waves, its 1 rank(s) step each by itself")
