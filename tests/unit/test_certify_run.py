"""Results are kept and found again; what is not proved is not signed."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any  # JSON

import pytest

from splitwave.certify.battery import svg
from splitwave.certify.battery.bench import Bench, Subject
from splitwave.certify.battery.campaign import CHECKS, Order, Trial, finish
from splitwave.certify.battery.report import page
from splitwave.certify.battery.run import (
    FAILED_BEFORE,
    RESULT_AGE_MAX_S,
    Result,
    State,
    Work,
    code_digest,
    outcome,
    result_of,
    run_checks,
    subject_digest,
)
from splitwave.certify.battery.scale import Scale
from splitwave.certify.battery.verdict import CheckBroken, Problem, Verdict
from splitwave.certify.keys import SigningKey, TrustStore
from splitwave.certify.store import read_file
from splitwave.core.certificate import authenticate
from splitwave.core.evidence import Check as Name
from splitwave.core.evidence import Control, Evidence, Level, required_checks
from splitwave.core.fingerprint import Fingerprint
from tests.unit.test_certify_judges import GOOD, SCALE, SUBJECT

KEY = SigningKey.generate()
FINGERPRINT = Fingerprint({"version.vllm": "0.32.0"})
SMOKE = replace(SUBJECT, level=Level.SMOKE)


def result(name: Name, *, caught: bool = True, passed: bool = True, control: bool = True) -> Result:
    evidence = Evidence(
        check=name,
        passed=passed,
        seconds=1.5,
        replays=10,
        figures={"compared": 3},
        control=Control(broken="a wrong weight", was_caught=caught) if control else None,
    )
    return Result(evidence=evidence, problems=[], noticed=["it is off"], seen=GOOD.get(name, {}))


def trial(tmp_path: Path, results: list[Result], subject: Subject = SMOKE) -> Trial:
    return Trial(subject, FINGERPRINT, SCALE, State(tmp_path / "state", "d"), results)


def order(tmp_path: Path) -> Order:
    return Order(
        level=Level.SMOKE,
        settings={},
        targets=(),
        out=tmp_path,
        certificates=tmp_path / "certificates",
        key=KEY,
    )


def all_results(**of_one: Any) -> list[Result]:
    required = required_checks(SMOKE.mode, Level.SMOKE, ranks=SMOKE.envelope.ranks)
    first, *rest = required
    return [result(first, **of_one), *(result(name) for name in rest)]


def test_what_was_proved_is_signed_and_reported(tmp_path: Path) -> None:
    done = finish(order(tmp_path), trial(tmp_path, all_results()), 12.0)

    assert done.certificate is not None
    signed = read_file(done.certificate)
    assert authenticate(signed, TrustStore({KEY.public.key_id: KEY.public})) is None
    assert signed.certificate.envelope == SMOKE.envelope
    assert signed.certificate.certificate_id in done.html.read_text()
    told = json.loads((done.html.parent / "report.json").read_text())
    assert [check["evidence"]["check"] for check in told["checks"]] == [
        item.check for item in signed.certificate.evidence
    ]


@pytest.mark.parametrize(
    ("of_one", "why"),
    [
        ({"passed": False}, "check_failed"),
        ({"caught": False}, "control_not_caught"),
        ({"control": False}, "control_missing"),
    ],
)
def test_one_flaw_is_enough_for_no_certificate(
    tmp_path: Path, of_one: dict[str, bool], why: str
) -> None:
    done = finish(order(tmp_path), trial(tmp_path, all_results(**of_one)), 0.0)

    assert done.certificate is None
    assert why in done.report.not_signed_for
    assert "Not signed" in done.html.read_text()


@pytest.mark.parametrize(("soak_s", "is_signed"), [(25.0, True), (24.0, False)])
def test_a_soak_shorter_than_its_levels_signs_nothing(
    tmp_path: Path, soak_s: float, is_signed: bool
) -> None:
    found = trial(tmp_path, [*all_results(), result(Name.SOAK)])
    found = replace(found, scale=replace(SCALE, soak_s=soak_s), soak_min_s=25.0)

    done = finish(order(tmp_path), found, 0.0)

    assert (done.certificate is not None) is is_signed
    assert ("lasts 25 s at least" in done.report.not_signed_for) is not is_signed


def test_a_check_that_was_left_out_is_missed(tmp_path: Path) -> None:
    done = finish(order(tmp_path), trial(tmp_path, all_results()[1:]), 0.0)

    assert done.certificate is None
    assert "check_missing" in done.report.not_signed_for


def test_a_control_that_shows_another_problem_is_not_caught() -> None:
    check = CHECKS[Name.SOAK]
    two_of_three = Verdict(problems=[Problem("drift", "slow"), Problem("kinds", "odd")])
    three = Verdict(problems=[*two_of_three.problems, Problem("memory", "more")])

    part = result_of(check, Verdict(), two_of_three, Work(1.0, 5), {})
    whole = result_of(check, Verdict(), three, Work(1.0, 5), {})

    assert part.evidence.control is not None
    assert not part.evidence.control.was_caught
    assert "CONTROL NOT CAUGHT" in outcome(part)
    assert whole.evidence.control is not None
    assert whole.evidence.control.was_caught


def test_a_control_that_must_show_nothing_controls_nothing() -> None:
    check = CountingCheck(Name.ORACLE)
    check.shows = ()

    found = result_of(check, Verdict(), Verdict(), Work(1.0, 5), {})

    assert found.evidence.control is not None
    assert not found.evidence.control.was_caught


def test_a_good_result_is_found_again_and_a_bad_one_is_run_again(tmp_path: Path) -> None:
    state = State(tmp_path, "digest")
    state.save(result(Name.ORACLE))
    state.save(result(Name.SOAK, passed=False))
    state.save(result(Name.GRID, caught=False))
    state.save(result(Name.TWO_BOOTS, control=False))

    assert state.load(Name.ORACLE) == result(Name.ORACLE)
    names = (Name.SOAK, Name.GRID, Name.TWO_BOOTS, Name.ABORT_STORM)
    assert [state.load(name) for name in names] == [None] * 4
    assert State(tmp_path, "another digest").load(Name.ORACLE) is None


def test_a_result_counts_for_a_day_and_one_of_the_future_never(tmp_path: Path) -> None:
    def at(now_s: float) -> State:
        return State(tmp_path, "digest", lambda: now_s)

    at(1000.0).save(result(Name.ORACLE))

    assert at(1000.0 + RESULT_AGE_MAX_S).load(Name.ORACLE) == result(Name.ORACLE)
    assert at(1001.0 + RESULT_AGE_MAX_S).load(Name.ORACLE) is None
    assert at(999.0).load(Name.ORACLE) is None


def test_a_result_without_a_time_is_run_again(tmp_path: Path) -> None:
    state = State(tmp_path, "digest")
    state.save(result(Name.ORACLE))
    path = tmp_path / "oracle.json"
    stored = json.loads(path.read_text())
    del stored["made_at_s"]
    path.write_text(json.dumps(stored))

    assert state.load(Name.ORACLE) is None


def test_results_sign_one_certificate_and_no_second_one(tmp_path: Path) -> None:
    tried = trial(tmp_path, all_results())
    for one in tried.results:
        tried.state.save(one)

    assert finish(order(tmp_path), tried, 0.0).certificate is not None

    assert [tried.state.load(one.evidence.check) for one in tried.results] == [None] * 4


def test_results_of_what_was_not_signed_are_kept(tmp_path: Path) -> None:
    tried = trial(tmp_path, all_results()[1:])
    for one in tried.results:
        tried.state.save(one)

    assert finish(order(tmp_path), tried, 0.0).certificate is None

    assert None not in [tried.state.load(one.evidence.check) for one in tried.results]


def test_code_that_judges_otherwise_has_another_digest(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("BOUND = 1")
    before = code_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("no code")

    assert code_digest(tmp_path) == before
    (tmp_path / "judge.py").write_text("BOUND = 2")
    assert code_digest(tmp_path) != before


def test_a_broken_state_file_is_run_again(tmp_path: Path) -> None:
    state = State(tmp_path, "digest")
    state.save(result(Name.ORACLE))
    (tmp_path / "oracle.json").write_text("{")

    assert state.load(Name.ORACLE) is None


def test_whatever_changes_what_is_proved_changes_the_digest() -> None:
    others = [
        subject_digest(Fingerprint({"version.vllm": "0.33.0"}), SUBJECT, SCALE),
        subject_digest(FINGERPRINT, SMOKE, SCALE),
        subject_digest(FINGERPRINT, SUBJECT, Scale(soak_s=11.0)),
        subject_digest(
            FINGERPRINT, replace(SUBJECT, envelope=replace(SUBJECT.envelope, ranks=4)), SCALE
        ),
    ]

    assert len({subject_digest(FINGERPRINT, SUBJECT, SCALE), *others}) == 5


def test_the_page_has_a_plot_of_each_curve_and_escapes_what_it_shows(tmp_path: Path) -> None:
    results = [result(Name.SOAK), result(Name.ORACLE)]
    results[1] = replace(results[1], problems=["<b>wrong</b>"])
    done = finish(order(tmp_path), trial(tmp_path, results), 0.0)

    shown = page(done.report.to_json())

    assert shown.count("<svg") == 3
    assert "CPU time a step by batch size" in shown
    assert "<b>wrong</b>" not in shown
    assert "&lt;b&gt;wrong" in shown
    assert "http" not in shown.replace("http://www.w3.org/2000/svg", "")


def test_a_plot_has_gaps_where_nothing_was_measured() -> None:
    curve = svg.Curve("rank 0", [(0.0, 1.0), (1.0, 2.0), (2.0, None), (3.0, 1.0), (4.0, 1.5)])

    drawn = svg.plot("t", "x", "y", [curve])

    assert drawn.count("<polyline") == 2
    assert svg.plot("t", "x", "y", []).startswith("<p>")


class Target:
    """A group that has run ten steps more whenever it is asked."""

    def __init__(self) -> None:
        self.steps = 0
        self.description = SimpleNamespace(epoch=1)

    def start_again(self) -> None:
        self.description = SimpleNamespace(epoch=2)
        self.steps = 0

    async def steps_run(self) -> int:
        self.steps += 10
        return self.steps


class CountingCheck:
    """A check that counts how often it ran, and can break off."""

    broken = "something"
    shows: Sequence[str] = ("wrong",)

    def __init__(self, name: Name, *, breaks_off: bool = False) -> None:
        self.name = name
        self.breaks_off = breaks_off
        self.ran = 0

    async def observe(self, bench: Bench) -> dict[str, Any]:
        if self.breaks_off:
            raise CheckBroken("the group has ended")
        self.ran += 1
        return {"good": True}

    async def observe_broken(self, bench: Bench) -> dict[str, Any]:
        return {"good": False}

    def judge(self, seen: dict[str, Any], subject: Subject, scale: Scale) -> Verdict:
        verdict = Verdict()
        verdict.require(seen["good"], "wrong", "it is wrong")
        return verdict


async def quiet() -> None:
    return


def bench() -> Bench:
    rig: Any = SimpleNamespace(target=Target(), quiet=quiet)
    return Bench(subject=SMOKE, scale=SCALE, rig=rig)


async def test_a_battery_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    state, said = State(tmp_path, "digest"), list[str]()
    first, second = CountingCheck(Name.ORACLE), CountingCheck(Name.SOAK, breaks_off=True)
    with pytest.raises(CheckBroken):
        await run_checks([first, second], bench(), state, said.append)

    second.breaks_off = False
    results = await run_checks([first, second], bench(), state, said.append)

    assert (first.ran, second.ran) == (1, 1)
    assert [found.evidence.replays for found in results] == [10, 10]
    assert all(found.evidence.control is not None for found in results)
    assert any("done before" in words for words in said)


async def test_a_check_that_passes_at_last_tells_how_often_it_failed(tmp_path: Path) -> None:
    class Flaky(CountingCheck):
        async def observe(self, bench: Bench) -> dict[str, Any]:
            self.ran += 1
            return {"good": self.ran == 3}

    state, check = State(tmp_path, "digest"), Flaky(Name.SOAK)

    told = [
        (await run_checks([check], bench(), state, lambda words: None))[0].evidence
        for _ in range(4)
    ]

    assert [evidence.passed for evidence in told] == [False, False, True, True]
    assert [evidence.figures.get(FAILED_BEFORE) for evidence in told] == [None, 1, 2, 2]
    assert check.ran == 3


async def test_a_control_that_is_switched_off_is_run_by_nobody_and_found_missing(
    tmp_path: Path,
) -> None:
    check = CountingCheck(Name.ORACLE)
    check.observe_broken = check.observe  # type: ignore[method-assign]  # nothing is broken

    found = (await run_checks([check], bench(), State(tmp_path, "d"), print))[0]

    assert found.evidence.passed
    assert found.evidence.control is not None
    assert not found.evidence.control.was_caught


async def test_steps_of_a_group_that_was_started_again_count_from_its_start(
    tmp_path: Path,
) -> None:
    class Rebooting(CountingCheck):
        async def observe(self, bench: Bench) -> dict[str, Any]:
            target: Any = bench.rig.target
            target.start_again()
            return {"good": True}

    long_running = bench()
    target: Any = long_running.rig.target
    target.steps = 10_000

    check = Rebooting(Name.TWO_BOOTS)
    found = (await run_checks([check], long_running, State(tmp_path, "d"), print))[0]

    assert found.evidence.replays == 10
