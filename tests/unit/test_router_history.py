"""What a router remembers of requests, and the gaps between tokens that its sessions count."""

import asyncio
from dataclasses import dataclass, field

import pytest

from services.router.attempts import Rest, Trail
from services.router.history import KEPT, History
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from tests.sim.virtual_loop import run


@dataclass(slots=True)
class Sink:
    shown_tokens: int = 0
    first_at_s: float | None = None
    last_at_s: float = 0.0

    def show(self, tokens: int = 1) -> None:
        now_s = asyncio.get_running_loop().time()
        self.first_at_s = self.first_at_s or now_s
        self.last_at_s = now_s
        self.shown_tokens += tokens


@dataclass(slots=True)
class Course:
    sink: Sink = field(default_factory=Sink)
    trail: Trail = field(default_factory=Trail)


def test_a_request_is_told_while_it_lives_and_after_with_where_its_time_went() -> None:
    async def main() -> None:
        history, course = History(), Course()
        await asyncio.sleep(10.0)
        live = history.begin("r1", 30, [course])
        await asyncio.sleep(0.5)
        (waiting,) = history.recent()
        assert (waiting.outcome, waiting.grant_wait_s, waiting.decode_s) == ("", 0.5, 0.0)

        course.trail.grant_wait_s = 0.5
        course.trail.attempts, course.trail.at_work = 1, True
        await asyncio.sleep(1.0)
        (prefilling,) = history.recent()
        assert (prefilling.prefill_s, prefilling.decode_s) == (1.0, 0.0)

        course.trail.prefill_s = 1.0
        course.sink.show()
        await asyncio.sleep(2.0)
        course.trail.handoff_s, course.trail.handoff_bytes = 0.25, 4096
        course.sink.show(4)
        history.end(live, "finished")
        await asyncio.sleep(5.0)
        (ended,) = history.recent()

        assert ended.outcome == "finished"
        assert ended.first_token_s == pytest.approx(1.5)
        assert ended.total_s == pytest.approx(3.5)
        parts = (ended.grant_wait_s, ended.prefill_s, ended.handoff_s, ended.decode_s)
        assert parts == pytest.approx((0.5, 1.0, 0.25, 1.75))
        assert ended.age_s == pytest.approx(8.5)
        assert (ended.prompt_tokens, ended.completion_tokens) == (30, 5)
        assert history.tpot_s.total == pytest.approx(0.5)
        assert history.ttft_s.total == pytest.approx(1.5)

    run(main())


def test_tokens_of_live_requests_count_and_count_once() -> None:
    async def main() -> None:
        history, course = History(), Course()
        await asyncio.sleep(1.0)
        live = history.begin("r1", 30, [course])
        course.sink.show(7)
        assert history.completion_tokens == 7
        history.end(live, "finished")
        assert history.completion_tokens == 7
        assert history.prompt_tokens == 30

    run(main())


def test_of_several_completions_tokens_are_added_and_times_are_the_longest() -> None:
    async def main() -> None:
        history, courses = History(), [Course(), Course()]
        await asyncio.sleep(1.0)
        live = history.begin("r1", 30, courses)
        await asyncio.sleep(1.0)
        for course, wait_s in zip(courses, (0.2, 0.4), strict=True):
            course.trail.grant_wait_s = wait_s
            course.sink.show(3)
        history.end(live, "finished")
        (ended,) = history.recent()
        assert (ended.choices, ended.completion_tokens, ended.grant_wait_s) == (2, 6, 0.4)

    run(main())


def test_only_the_last_that_ended_are_kept_beside_the_live_ones() -> None:
    async def main() -> None:
        history = History()
        first = history.begin("live", 1, [Course()])
        for number in range(3 * KEPT):
            await asyncio.sleep(0.01)
            history.end(history.begin(f"r{number}", 1, [Course()]), "finished")
        recent = history.recent()
        assert len(recent) == KEPT + 1
        assert recent[0].request_id == f"r{3 * KEPT - 1}"
        assert recent[-1].request_id == "live"
        history.end(first, "finished")

    run(main())


def test_resumes_are_counted_by_what_the_attempt_before_failed_with() -> None:
    async def main() -> None:
        history, course = History(), Course()
        live = history.begin("r1", 1, [course])
        trail, rest = course.trail, Rest([1, 2], 0, Sampling(max_tokens=1))
        for reason in (Reason.WORKER_LOST, Reason.HANDOFF_EXPIRED):
            trail.attempts += 1
            trail.failed(ServingError(reason, "x"), rest)
        # The second failure was not followed by an attempt: the budget was spent.
        history.end(live, "resume_budget_exhausted")
        assert history.resumes == {Reason.WORKER_LOST: 1}

    run(main())
