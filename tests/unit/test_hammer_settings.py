"""The hammer's command line, and what a rank leaves on disk."""

from pathlib import Path

import pytest

from bench.hammer.beat import Beat, read_beat, read_end, write_end
from bench.hammer.parent import tail
from bench.hammer.settings import Plant, Settings, complaint, parse
from splitwave.certify.hammer.verdict import Phase, Position


def test_defaults_are_what_a_certificate_asks_for() -> None:
    settings = parse([])

    assert settings.transport == "v2"
    assert settings.replays == 50_000
    assert settings.sizes == (64, 128, 192, 256)
    assert settings.walk().skew_ms_max == 20.0
    assert settings.walk().skew_budget_s == 72.0
    assert settings.walk().pair_min == 50
    assert settings.seconds == 360.0


def test_a_rank_reads_what_its_parent_wrote(tmp_path: Path) -> None:
    settings = parse(["--dry", "--sizes", "8,16", "--plant", "hang@40:1", "--tbo"])
    settings.save(tmp_path / "settings.json")

    assert Settings.load(tmp_path / "settings.json") == settings
    assert settings.plant == Plant("hang", 40, 1)
    assert settings.transport == "dry"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--experts", "9"], "the same number of experts"),
        (["--experts", "8", "--topk", "8"], "at least top-k"),
        (["--tbo", "--sizes", "7"], "even sizes"),
        (["--tbo", "--transport", "legacy_unfixed"], "no microbatches"),
        (["--product", "--tbo"], "only from vLLM"),
        (["--product", "--dry"], "are v2 and legacy"),
        (["--stall-s", "0.02"], "longer than the skew"),
        (["--replays", "0"], "at least 1"),
        (["--transport", "pigeon"], "invalid choice"),
        (["--plant", "flood@1:0"], "no such fault"),
        (["--no-such-option"], "unrecognized"),
    ],
)
def test_settings_that_cannot_work_end_with_the_code_of_setup(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(arguments)

    assert end.value.code == 4
    assert why in capsys.readouterr().err


def test_host_synchronised_dispatches_come_only_where_they_are_the_point() -> None:
    shares = {
        name: parse(["--transport", name]).walk().eager_share
        for name in ("v2", "legacy", "legacy_shared", "legacy_unfixed")
    }

    assert shares == {"v2": 0, "legacy": 0, "legacy_shared": 0, "legacy_unfixed": 0.125}
    assert parse(["--transport", "legacy", "--product"]).walk().eager_share == 0.125
    assert parse(["--transport", "v2", "--product"]).walk().eager_share == 0
    assert complaint(parse([])) == ""


def test_a_beat_says_where_a_rank_is(tmp_path: Path) -> None:
    assert read_beat(tmp_path, 3) == Position()
    beat = Beat(tmp_path, 3)
    beat.enter(Phase.WARM, 64)
    assert read_beat(tmp_path, 3) == Position(Phase.WARM, size=64)

    beat.look = lambda: (7, ("layer 1 combined",))
    beat.enter(Phase.REPLAY)
    beat.issue(128)
    beat.start()
    beat.stop()

    assert read_beat(tmp_path, 3) == Position(
        Phase.REPLAY, issued=1, finished=7, size=128, marks=("layer 1 combined",)
    )


def test_a_rank_that_left_nothing_has_no_end(tmp_path: Path) -> None:
    assert read_end(tmp_path, 0) == {}
    write_end(tmp_path, 0, {"device": "a GPU"})
    write_end(tmp_path, 0, {"wrong": "a row"})
    assert read_end(tmp_path, 0) == {"device": "a GPU", "wrong": "a row"}


def test_a_log_is_kept_without_the_folders_of_its_machine(tmp_path: Path) -> None:
    import bench.hammer.parent as module

    log = tmp_path / "log"
    log.write_text(
        f'  File "{module.__file__}", line 1 in f\n'
        '  File "/srv/env/lib/python3.12/site-packages/torch/cuda.py", line 2 in g\n'
        '  File "/usr/lib/python3.12/threading.py", line 3 in h\n'
    )

    assert tail(log) == [
        '  File "bench/hammer/parent.py", line 1 in f',
        '  File "torch/cuda.py", line 2 in g',
        '  File "threading.py", line 3 in h',
    ]
    assert tail(tmp_path / "none") == []
