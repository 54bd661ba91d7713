"""Runs checks in order, each with its positive control, and remembers what is done.

A check's result lies in a file of its own, so that a battery that was stopped goes on where it
was: results count for a day, while fingerprint, envelope, level, scale and the battery's own code
are the same, and until a certificate is signed with them.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any  # JSON

from splitwave.certify.battery.bench import Bench, Check, Named, Subject
from splitwave.certify.battery.scale import Scale
from splitwave.certify.battery.verdict import Observed, Verdict
from splitwave.core.evidence import Check as CheckName
from splitwave.core.evidence import Control, Evidence
from splitwave.core.fingerprint import Fingerprint

BATTERY = 1
"""Raised whenever the same scale means other work; results of older batteries then do not count."""

RESULT_AGE_MAX_S = 86400.0
"""Older results do not count: a certificate says of now what its checks saw."""
FAILED_BEFORE = "failed_runs_before"
"""Figure of a check that failed and was run again: that it did not hold each time is told."""
CODE = Path(__file__).parents[1]
"""What makes and judges results."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One check with its control."""

    evidence: Evidence
    problems: Sequence[str]
    """What the check found wrong, in words."""
    noticed: Sequence[str]
    """What it found wrong with the broken variant."""
    seen: Observed = field(default_factory=dict)
    """What the check saw, for the report."""

    def to_json(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "evidence": self.evidence.to_json(),
            "problems": list(self.problems),
            "noticed": list(self.noticed),
            "seen": self.seen,
        }


async def run_check(check: Check, bench: Bench) -> Result:
    """Run a check and its control. Raises CheckBroken, and EngineDied, if either cannot end."""
    began_s, began = time.monotonic(), await _steps(bench)
    seen = await check.observe(bench)
    verdict = check.judge(seen, bench.subject, bench.scale)
    await bench.rig.quiet()
    ended = await _steps(bench)
    # A group that was started again counts from 0.
    steps = ended.steps - (began.steps if ended.epoch == began.epoch else 0)
    broken = check.judge(await check.observe_broken(bench), bench.subject, bench.scale)
    await bench.rig.quiet()
    work = Work(time.monotonic() - began_s, steps)
    return result_of(check, verdict, broken, work, seen)


@dataclass(frozen=True, slots=True)
class _Count:
    """Steps of all ranks of the group under test, since the start of its epoch."""

    epoch: int
    steps: int


async def _steps(bench: Bench) -> _Count:
    target = bench.rig.target
    return _Count(target.description.epoch, await target.steps_run())


@dataclass(frozen=True, slots=True)
class Work:
    """What a check took: wall seconds with its control, steps of all ranks without."""

    seconds: float
    steps: int


def result_of(
    check: Named, verdict: Verdict, broken: Verdict, work: Work, seen: Observed
) -> Result:
    """Sum up a check: its control counts as caught only if it showed all that it must show."""
    return Result(
        evidence=Evidence(
            check=check.name,
            passed=verdict.passed,
            seconds=round(work.seconds, 3),
            replays=work.steps,
            figures=verdict.figures,
            control=Control(
                broken=check.broken,
                was_caught=bool(check.shows) and all(map(broken.shows, check.shows)),
                figures=broken.figures,
            ),
        ),
        problems=[problem.words for problem in verdict.problems],
        noticed=[problem.words for problem in broken.problems],
        seen=seen,
    )


def subject_digest(fingerprint: Fingerprint, subject: Subject, scale: Scale) -> str:
    """What a stored result must be of, to count."""
    parts = {
        "battery": BATTERY,
        "code": code_digest(CODE),
        "fingerprint": fingerprint.digest,
        "mode": subject.mode.name,
        "level": subject.level,
        "envelope": subject.envelope.to_json(),
        "scale": asdict(scale),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def code_digest(directory: Path) -> str:
    """Of the Python files below a directory: with other code the same check is another one."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        digest.update(str(path.relative_to(directory)).encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class State:
    """Results in a directory, a file a check, each written whole or not at all."""

    def __init__(
        self, directory: Path, digest: str, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock`: seconds since 1970."""
        self._directory, self._digest, self._clock = directory, digest, clock
        directory.mkdir(parents=True, exist_ok=True)

    def load(self, name: str) -> Result | None:
        """A good result of the same subject, of the last day; None otherwise: it is run again."""
        result = self._stored(name)
        return result if result is not None and is_good(result) else None

    def failed_runs(self, name: str) -> int:
        """How often the check has failed in a row on the same subject, in the last day."""
        result = self._stored(name)
        if result is None or is_good(result):
            return 0
        return int(result.evidence.figures.get(FAILED_BEFORE) or 0) + 1

    def save(self, result: Result) -> None:
        """Keep a result."""
        path = self._path(result.evidence.check)
        part = path.with_suffix(".part")
        stored = {
            "digest": self._digest,
            "made_at_s": self._clock(),
            "result": result.to_json(),
        }
        part.write_text(json.dumps(stored))
        part.replace(path)

    def clear(self) -> None:
        """Forget all results: the next certificate is signed for what runs then."""
        for name in CheckName:
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.json"

    def _stored(self, name: str) -> Result | None:
        try:
            stored = json.loads(self._path(name).read_text())
            age_s = self._clock() - stored["made_at_s"]
            if stored["digest"] != self._digest or not 0.0 <= age_s <= RESULT_AGE_MAX_S:
                return None
            return read_result(stored["result"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def is_good(result: Result) -> bool:
    """True if the check passed and noticed its control."""
    control = result.evidence.control
    return result.evidence.passed and control is not None and control.was_caught


def with_failed_runs(result: Result, count: int) -> Result:
    """The result, which tells how often the same check failed before it."""
    if not count:
        return result
    figures = {**result.evidence.figures, FAILED_BEFORE: count}
    return replace(result, evidence=replace(result.evidence, figures=figures))


def read_result(value: Mapping[str, Any]) -> Result:
    """The inverse of `to_json`. Raises KeyError, TypeError or JsonError (a ValueError)."""
    from splitwave.core.evidence import read_evidence

    return Result(
        evidence=read_evidence(value["evidence"], "evidence"),
        problems=value["problems"],
        noticed=value["noticed"],
        seen=value["seen"],
    )


async def run_checks(checks: Sequence[Check], bench: Bench, state: State, say: Say) -> list[Result]:
    """Run those checks that have no good result yet; goes on after one that failed."""
    results = []
    for place, check in enumerate(checks, 1):
        who = f"{bench.subject.mode.name}: {check.name} ({place} of {len(checks)})"
        result = state.load(check.name)
        if result is None:
            say(f"{who} ...")
            failed = state.failed_runs(check.name)
            result = with_failed_runs(await run_check(check, bench), failed)
            state.save(result)
            say(f"{who}: {outcome(result)}")
        else:
            say(f"{who}: done before, {outcome(result)}")
        results.append(result)
    return results


def outcome(result: Result) -> str:
    """A result in one line."""
    evidence, control = result.evidence, result.evidence.control
    words = "passed" if evidence.passed else f"FAILED: {'; '.join(result.problems)}"
    if control is None:
        caught = "NO CONTROL RAN"
    elif control.was_caught:
        caught = "control caught"
    else:
        caught = f"CONTROL NOT CAUGHT ({control.broken})"
    return f"{words}, {caught}, {evidence.seconds:.1f} s, {evidence.replays} steps"
