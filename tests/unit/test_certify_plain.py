"""Oracles are asked for each case once, and cases that run alone are of every sort."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any  # groups that are none

import pytest

from splitwave.certify.battery import plain, rig
from splitwave.certify.battery.bench import Subject
from splitwave.certify.battery.cases import cases
from splitwave.certify.battery.drive import Flight
from splitwave.certify.battery.plain import PlainOracle
from splitwave.certify.battery.rig import Rig
from splitwave.certify.battery.scale import scale_for
from splitwave.certify.battery.tokens import alone_cases, edge_cases, oracle_cases
from splitwave.certify.battery.verdict import CheckBroken
from splitwave.core.evidence import Level
from splitwave.core.mode import Device, lookup
from splitwave.engine.port import EngineRequest, Role
from splitwave.engine.vllm.aggregated import AggregatedFailed, Answer, PlainSettings, Question
from splitwave.engine.vllm.config import VllmGroupSettings
from tests.unit.test_certify_judges import ENVELOPE, SUBJECT

HEAVY = scale_for(Level.FULL, Device.CPU, weights_bytes=15 * 10**8)


def settings(dtype: str = "float32") -> VllmGroupSettings:
    return VllmGroupSettings(
        role=Role.DECODE, mode="decode_cpu_eager", model_path=Path("m"), served_model="m",
        group_id="g", epoch=1, log_dir=Path("logs"), dtype=dtype,
    )  # fmt: skip


async def test_what_was_answered_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    async def answer(of: PlainSettings, questions: Sequence[Question]) -> list[Answer]:
        asked.append([len(question.token_ids) for question in questions])
        return [Answer(tuple(x.token_ids), ()) for x in questions]

    monkeypatch.setattr(plain, "answer", answer)
    oracle = PlainOracle()
    few, more = cases([2, 5], 3, 1), cases([2, 5, 9], 3, 1)

    first = await oracle.of(settings())(few)
    second = await oracle.of(settings())(more)
    again = await oracle.of(settings())(more)
    await oracle.of(settings("bfloat16"))(few)
    await oracle.of(settings())(cases([2, 5], 4, 1))

    assert asked == [[2, 5], [9], [2, 5], [2, 5]]
    assert [found.token_ids for found in second] == [case.token_ids for case in more]
    assert second[:2] == first
    assert again == second


async def test_a_plain_engine_that_dies_ends_the_check_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answer(*_: object) -> list[Answer]:
        raise AggregatedFailed("it ended without a word")

    monkeypatch.setattr(plain, "answer", answer)

    with pytest.raises(CheckBroken, match="the plain engine cannot answer: it ended without"):
        await PlainOracle().of(settings())(cases([2], 3, 1))


async def test_a_boot_of_the_prefill_group_is_not_asked_again_and_the_next_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    class Prefill:
        description = SimpleNamespace(epoch=1)

        async def run(self, request: EngineRequest) -> Flight:
            asked.append(len(request.token_ids))
            return Flight()

        async def close(self) -> None:
            pass

    async def started(_: VllmGroupSettings) -> Any:  # an engine that is none
        return None

    group: Any = Prefill()
    case = cases([5], 3, 1)[0]
    standing = Rig(Role.PREFILL, group, group)

    first, second = await standing.whole(case), await standing.whole(case)
    assert (first is second, asked) == (True, [5])

    monkeypatch.setattr(rig, "start_group", started)
    monkeypatch.setattr(rig, "Group", lambda _: group)
    await standing.reboot(settings(), lambda words: None)
    await standing.whole(case)
    assert asked == [5, 5]


def test_cases_that_run_alone_are_some_of_the_oracles_plain_and_sampled() -> None:
    asked = oracle_cases(SUBJECT, HEAVY)
    alone = alone_cases(SUBJECT, HEAVY)

    assert len(alone) == HEAVY.alone_cases < len(asked)
    assert [case in asked for case in alone] == [True] * len(alone)
    assert {case.features is None for case in alone} == {True, False}


def test_both_subjects_of_a_battery_have_the_same_longest_prompt() -> None:
    decode = Subject(
        mode=lookup("decode_cpu_eager"), level=Level.FULL, envelope=ENVELOPE, dtype="float32",
        block_size_tokens=32,
    )  # fmt: skip
    prefill = Subject(
        mode=lookup("prefill_cpu_eager"), level=Level.FULL, envelope=ENVELOPE, dtype="float32",
        block_size_tokens=32,
    )  # fmt: skip

    assert edge_cases(prefill, HEAVY)[-1] == edge_cases(decode, HEAVY)[-1]
