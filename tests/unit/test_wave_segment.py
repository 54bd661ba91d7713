"""Segments of waves: when they end, and that they account for every step."""

from splitwave.core.wave_message import GroupState, RankReport, RankWork, StartReason, StartWave
from splitwave.core.wave_segment import (
    LINKS_MAX,
    Link,
    SegmentEnd,
    WaveSegment,
    WaveSegments,
)

RUNNING, PAUSED = GroupState.RUNNING, GroupState.PAUSED


class Group:
    """Two ranks that report cumulative counts."""

    def __init__(self) -> None:
        self.segments = WaveSegments(epoch=1)
        self.numbers = [0, 0]
        self.steps = [0, 0]
        self.ended: list[WaveSegment] = []
        for rank in (0, 1):
            self.say(rank, 0, 0.0, stepping=False)

    def say(self, rank: int, wave: int, now_s: float, *, stepping: bool, steps: int = 0) -> None:
        self.numbers[rank] += 1
        self.steps[rank] += steps
        done = self.steps[rank]
        work = RankWork(
            steps_by_kind={"eager": done},
            steps_by_size={8: done},
            dummy_steps=done if rank else 0,
            votes=done,
            tokens=0 if rank else 3 * done,
            padded_tokens=3 * done,
        )
        report = RankReport(rank, 1, self.numbers[rank], wave, stepping, work=work)
        self.segments.on_report(report, now_s)

    def settle(self, state: GroupState, wave: int, now_s: float) -> None:
        self.ended += self.segments.settle(state, wave, now_s)

    def start(self, wave: int, now_s: float) -> None:
        self.segments.on_start(StartWave(wave, StartReason.FIRST_REQUEST), now_s)
        self.settle(GroupState.STARTING, wave, now_s)


def one_wave(group: Group) -> None:
    group.start(0, 1.0)
    group.say(0, 0, 1.01, stepping=True)
    group.say(1, 0, 1.03, stepping=True)
    group.settle(RUNNING, 0, 1.03)
    group.say(0, 1, 1.5, stepping=False, steps=4)
    group.settle(GroupState.PAUSING, 1, 1.5)


def test_a_segment_ends_with_its_wave_once_every_rank_has_sent_its_last_counts() -> None:
    group = Group()
    one_wave(group)
    assert group.ended == []

    group.say(1, 1, 1.51, stepping=False, steps=4)
    group.settle(PAUSED, 1, 1.51)

    (segment,) = group.ended
    assert (segment.wave, segment.segment, segment.why) == (0, 1, "first_request")
    assert (segment.end, segment.began_s, segment.ended_s) == (SegmentEnd.PAUSE, 1.0, 1.5)
    assert {rank: round(wake_s, 3) for rank, wake_s in segment.wake_s.items()} == {0: 0.01, 1: 0.03}
    assert segment.steps_by_kind == {"eager": 8}
    assert segment.steps_by_size == {8: 8}
    assert (segment.dummy_steps, segment.dummy_share, segment.votes) == (4, 0.5, 8)
    assert (segment.tokens, segment.padded_tokens, segment.skew_tokens) == (12, 24, 12)


def test_a_rank_that_stays_silent_does_not_keep_a_segment_open() -> None:
    group = Group()
    one_wave(group)

    group.settle(GroupState.PAUSING, 1, 1.8)

    assert [segment.steps for segment in group.ended] == [4]


def test_last_counts_that_come_late_go_to_the_next_segment_and_none_is_lost() -> None:
    group = Group()
    one_wave(group)
    group.settle(GroupState.PAUSING, 1, 1.8)

    group.say(1, 1, 1.9, stepping=False, steps=4)
    group.start(1, 2.0)
    group.say(0, 2, 2.1, stepping=False, steps=1)
    group.say(1, 2, 2.1, stepping=False, steps=1)
    group.settle(PAUSED, 2, 2.1)

    assert sum(segment.steps for segment in group.ended) == sum(group.steps)


def test_a_wave_under_load_is_cut_every_ten_seconds() -> None:
    group = Group()
    group.start(0, 1.0)
    for second in range(1, 26):
        group.say(0, 0, 1.0 + second, stepping=True, steps=10)
        group.settle(RUNNING, 0, 1.0 + second)

    cuts = [(segment.segment, segment.why, segment.end, segment.steps) for segment in group.ended]

    assert cuts == [
        (1, "first_request", SegmentEnd.LENGTH, 100),
        (2, "continued", SegmentEnd.LENGTH, 100),
    ]
    assert group.segments.current == (0, 3)


def test_the_end_of_the_epoch_ends_all_segments() -> None:
    group = Group()
    one_wave(group)
    group.start(1, 1.6)

    group.settle(GroupState.ENDED, 1, 2.0)

    assert [(s.wave, s.end) for s in group.ended] == [(0, SegmentEnd.PAUSE), (1, SegmentEnd.EPOCH)]
    assert group.segments.current is None


def test_two_waves_within_a_moment_are_two_segments() -> None:
    group = Group()
    one_wave(group)
    group.start(1, 1.55)
    group.say(0, 2, 1.6, stepping=False, steps=1)
    group.settle(GroupState.PAUSING, 2, 1.6)
    group.say(1, 2, 1.61, stepping=False, steps=5)
    group.settle(PAUSED, 2, 1.61)

    assert [segment.wave for segment in group.ended] == [0, 1]
    assert sum(segment.steps for segment in group.ended) == sum(group.steps)


def test_work_that_no_start_began_is_a_segment_too() -> None:
    group = Group()
    group.say(0, 0, 1.0, stepping=True)
    group.say(1, 0, 1.0, stepping=True)

    group.settle(RUNNING, 0, 1.0)

    assert group.segments.current == (0, 1)
    assert group.segments.end_epoch(2, 3.0)[0].why == "resumed"


def test_copies_and_late_reports_count_nothing() -> None:
    group = Group()
    group.start(0, 1.0)
    group.say(0, 0, 1.1, stepping=True, steps=2)
    old = RankReport(0, 1, 1, 0, False, work=RankWork(steps_by_kind={"eager": 900}))

    group.segments.on_report(old, 1.2)

    assert group.segments.end_epoch(2, 2.0)[0].steps == 2


def test_requests_are_linked_to_the_segment_that_they_start_and_32_are_kept() -> None:
    group = Group()
    group.segments.note_request(Link("first", "1"))
    group.start(0, 1.0)
    for i in range(40):
        group.segments.note_request(Link("trace", str(i)))

    (segment,) = group.segments.end_epoch(2, 2.0)

    assert segment.links[0] == Link("first", "1")
    assert (len(segment.links), segment.links_dropped) == (LINKS_MAX, 9)


def test_a_request_that_is_told_of_again_is_one_link() -> None:
    group = Group()
    group.start(0, 1.0)
    link = Link("trace", "1")
    group.segments.note_request(link)
    group.segments.note_work(link, 1.1, 1.2)

    (segment,) = group.segments.end_epoch(2, 2.0)

    assert (segment.links, segment.links_dropped) == ((link,), 0)


def test_work_belongs_to_the_segments_of_its_first_and_last_step() -> None:
    group = Group()
    group.start(0, 1.0)
    for second in range(1, 25):
        group.say(0, 0, 1.0 + second, stepping=True)
        group.settle(RUNNING, 0, 1.0 + second)
    note = group.segments.note_work

    assert note(Link("t", "1"), 3.0, 4.0) == ((0, 1),)
    assert note(Link("t", "2"), 3.0, 24.0) == ((0, 1), (0, 3))
    assert note(Link("t", "3"), 24.0, 25.0) == ((0, 3),)
    (last,) = group.segments.end_epoch(2, 30.0)
    assert last.links == (Link("t", "2"), Link("t", "3"))


def test_work_that_came_before_its_wave_began_is_of_that_wave() -> None:
    group = Group()
    assert group.segments.note_work(Link("t", "0"), 0.1, 0.2) == ()
    one_wave(group)
    group.start(1, 1.6)

    assert group.segments.note_work(Link("t", "1"), 1.55, 1.7) == ((1, 1),)


def test_a_segment_that_waits_for_its_ranks_last_words_still_takes_links() -> None:
    group = Group()
    one_wave(group)  # Rank 1 has not spoken yet.
    group.segments.note_work(Link("t", "1"), 1.1, 1.4)
    group.say(1, 1, 1.55, stepping=False)
    group.settle(PAUSED, 1, 1.55)

    (segment,) = group.ended
    assert segment.links == (Link("t", "1"),)
