"""The accuracy task, what the harness leaves of it, and agreement item by item."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any  # JSON

import pytest

from splitwave.certify.accuracy.check import (
    CONTROL_ITEMS,
    AccuracyCheck,
    Gateway,
    judge,
    judge_control,
    rows_of,
    text_of,
)
from splitwave.certify.accuracy.gateway import (
    Command,
    GatewayFailed,
    read_fingerprints,
    stack_environment,
)
from splitwave.certify.accuracy.lm_eval import HarnessFailed, Sample, read_samples
from splitwave.certify.accuracy.task import (
    ITEMS_MIN,
    STOP,
    Item,
    Task,
    few_shot,
    gsm8k,
    is_right,
    items,
    write,
)
from splitwave.certify.battery.run import Work, is_good
from splitwave.certify.battery.scale import Scale
from splitwave.core.fingerprint import Fingerprint
from splitwave.demo_model import DemoModelOptions, Variant, build
from splitwave.text.tokenizer import Tokenizer
from tests.unit.test_certify_judges import SUBJECT

SUBJECT_IS = Fingerprint({"env.OMP_NUM_THREADS": "1"})
SCALE = Scale()
TASK = few_shot(9, 1)


def test_the_same_seed_gives_the_same_items_and_another_others() -> None:
    chosen = items(126, 6)

    assert chosen == items(126, 6)
    assert {item.prompt for item in chosen} != {item.prompt for item in items(126, 7)}
    assert len({item.prompt for item in chosen}) == len(chosen) >= ITEMS_MIN


def test_kinds_are_even_and_each_answer_is_one_line_behind_a_space() -> None:
    chosen = items(126, 6)

    counts = {kind: sum(item.kind == kind for item in chosen) for kind in ("copy", "sort", "cloze")}
    assert min(counts.values()) >= 30
    for item in chosen:
        assert item.answer.startswith(" ")
        assert STOP not in item.answer
        assert not item.prompt.endswith((" ", STOP))


def test_a_sorted_answer_is_sorted_and_a_copy_is_a_copy() -> None:
    for item in items(60, 1):
        asked = item.prompt.splitlines()[-1].partition(": ")[2].removesuffix(" =>").split()
        if item.kind == "sort":
            assert item.answer.split() == sorted(asked)
        if item.kind == "copy":
            assert item.answer.split() == asked


def test_the_harness_is_given_every_item(tmp_path: Path) -> None:
    data = write(tmp_path / "task", TASK)

    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [item.prompt for item in TASK.items]
    text = (tmp_path / "task" / f"{TASK.name}.yaml").read_text()
    assert 'doc_to_text: "{{prompt}}"' in text
    assert f"until: [{json.dumps(STOP)}]" in text


def sample_row(place: int, text: str, right: bool) -> str:
    row = {"doc_id": place, "filtered_resps": [text], "exact_match": float(right)}
    return json.dumps(row) + "\n"


def test_samples_are_read_in_the_items_order(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / f"samples_{TASK.name}_2026.jsonl"
    path.write_text(sample_row(1, " b", False) + sample_row(0, " a", True))

    assert read_samples(tmp_path, TASK) == [Sample(0, " a", True), Sample(1, " b", False)]
    with pytest.raises(HarnessFailed, match="no samples"):
        read_samples(tmp_path / "model" / "none", TASK)


def seen(count: int, *, differing: int = 0, right: float = 0.5) -> dict[str, Any]:
    asked = [Item("copy", str(place), " x") for place in range(count)]
    theirs = [" x" if place < right * count else " y" for place in range(count)]
    ours = [" z" if place < differing else text for place, text in enumerate(theirs)]
    samples = [Sample(place, text, text == " x") for place, text in enumerate(ours)]
    return rows_of(replace(TASK, items=tuple(asked)), theirs, samples)


def test_agreement_of_every_item_passes_and_the_score_is_told() -> None:
    verdict = judge(seen(126), SCALE)

    assert verdict.passed
    assert verdict.figures["agreement"] == 1.0
    assert verdict.figures["score_of_the_aggregated_run"] == 0.5
    assert verdict.figures["score_is_telling"] is True


@pytest.mark.parametrize(("differing", "passes"), [(1, True), (2, False), (20, False)])
def test_one_item_in_a_hundred_may_differ(differing: int, passes: bool) -> None:
    assert judge(seen(126, differing=differing), SCALE).passed is passes


def test_one_wrong_item_is_enough_to_catch_the_control() -> None:
    verdict = judge(seen(CONTROL_ITEMS, differing=1), SCALE)

    assert verdict.shows("agreement")


@pytest.mark.parametrize(
    ("right", "shows"),
    [
        (seen(CONTROL_ITEMS), "agreement"),
        (seen(CONTROL_ITEMS, differing=1), "unshifted"),
        ({"items_asked": CONTROL_ITEMS, "items": []}, "unshifted"),
    ],
)
def test_a_shift_is_caught_only_if_the_same_run_passes_without_it(
    right: dict[str, Any], shows: str
) -> None:
    verdict = judge_control(seen(CONTROL_ITEMS, differing=9), right, SCALE)

    assert [problem.code for problem in verdict.problems] == [shows]
    assert verdict.figures["items_unshifted"] == len(right["items"])


@dataclass(slots=True, kw_only=True)
class Ran(AccuracyCheck):
    """Answers as its stacks would."""

    stacks: list[tuple[str, str]] = field(default_factory=list)
    differs_unshifted: bool = False
    """Whether the control's model answers otherwise without the shift, too."""

    async def _aggregated_all(self, model_path: Path, tasks: Sequence[Task]) -> list[list[str]]:
        return [[" x"] * len(asked.items) for asked in tasks]

    async def _through(
        self, command: Command, environment: Mapping[str, str], tasks: Sequence[Task], _: Path
    ) -> tuple[list[list[Sample]], int]:
        shift = environment.get("SPLITWAVE_FAULTS", "")
        self.stacks.append((command.model_path, shift))
        self._ran = {"decode": SUBJECT_IS}
        wrong = shift or (self.differs_unshifted and command is self.gateway.control)
        text = " y" if wrong else " x"
        return [[Sample(n, text, True) for n in range(len(t.items))] for t in tasks], 10


def ran(tmp_path: Path, *, control: str) -> Ran:
    settings: Any = None
    commands = [
        Command(words=[], http="", metrics=[], model=name, model_path=name)
        for name in ("identical", control)
    ]
    stacks = Gateway(main=commands[0], control=commands[1], lm_eval_python=tmp_path)
    return Ran(settings=settings, gateway=stacks, directory=tmp_path, environment={})


async def test_the_control_s_model_is_asked_without_the_shift_too(tmp_path: Path) -> None:
    check = ran(tmp_path, control="distinct")

    found = await check(SUBJECT, SUBJECT_IS, SCALE, lambda words: None)

    shift = "shift_routing"
    assert check.stacks == [("identical", ""), ("distinct", ""), ("distinct", shift)]
    assert found.evidence.passed
    assert found.evidence.control is not None
    assert found.evidence.control.was_caught
    assert found.evidence.control.figures["agreement_unshifted"] == 1.0
    assert found.evidence.replays == 10, "of the check's own run"


async def test_a_control_that_fails_without_the_shift_is_not_caught(tmp_path: Path) -> None:
    check = ran(tmp_path, control="distinct")
    check.differs_unshifted = True

    found = await check(SUBJECT, SUBJECT_IS, SCALE, lambda words: None)

    assert found.evidence.passed
    assert found.evidence.control is not None
    assert not found.evidence.control.was_caught
    assert not is_good(found), "it is not signed, and is run again"
    assert "without the shift it fails as well: 24 of 24 answers" in found.noticed[0]


async def test_a_model_whose_experts_differ_needs_no_stack_more(tmp_path: Path) -> None:
    check = ran(tmp_path, control="identical")

    found = await check(SUBJECT, SUBJECT_IS, SCALE, lambda words: None)

    assert check.stacks == [("identical", ""), ("identical", "shift_routing")]
    assert is_good(found)


def test_items_that_the_harness_did_not_score_are_missed() -> None:
    lost = seen(126)
    lost["items"] = lost["items"][:100]

    assert judge(lost, SCALE).shows("few")


@pytest.mark.parametrize("asked", [0, CONTROL_ITEMS])
def test_no_answer_is_neither_agreement_nor_a_control_that_was_noticed(asked: int) -> None:
    verdict = judge({"items_asked": asked, "items": []}, SCALE)

    assert [problem.code for problem in verdict.problems] == ["few"]


CAUGHT = judge_control(seen(CONTROL_ITEMS, differing=9), seen(CONTROL_ITEMS), SCALE)


@pytest.mark.parametrize(
    ("ran", "differs"),
    [
        ({"decode": SUBJECT_IS}, []),
        ({"decode": Fingerprint({"env.OMP_NUM_THREADS": "2"})}, ["env.OMP_NUM_THREADS"]),
        ({"prefill": SUBJECT_IS}, ["it did not say"]),
    ],
)
async def test_a_gateway_before_other_engines_proves_nothing(
    tmp_path: Path, ran: dict[str, Fingerprint], differs: list[str]
) -> None:
    settings: Any = None
    command = Command(words=[], http="", metrics=[], model="m", model_path="")
    stacks = Gateway(main=command, control=command, lm_eval_python=tmp_path)
    check = AccuracyCheck(
        settings=settings, gateway=stacks, directory=tmp_path, environment={},
        _done={SCALE: (seen(126), CAUGHT, Work(1.0, 5))}, _ran=ran,
    )  # fmt: skip

    found = await check(SUBJECT, SUBJECT_IS, SCALE, lambda words: None)

    assert found.evidence.passed is not bool(differs)
    assert all(name in problem for name, problem in zip(differs, found.problems, strict=True))


def test_a_stack_that_did_not_say_what_it_runs_has_failed(tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    command = Command(
        words=[], http="", metrics=[], model="m", model_path="", fingerprints={"decode": str(file)}
    )
    with pytest.raises(GatewayFailed, match="the decode worker did not say"):
        read_fingerprints(command)

    file.write_text(json.dumps(dict(SUBJECT_IS.values)))

    assert read_fingerprints(command) == {"decode": SUBJECT_IS}


def test_a_stack_has_the_users_variables_but_none_of_the_battery_or_of_up() -> None:
    kept = {"VLLM_CPU_KVCACHE_SPACE": "1", "SPLITWAVE_DECODE_MODE": "m", "HOME": "/"}

    given = kept | {"SPLITWAVE_PROBE": "1", "SPLITWAVE_UP_CERTIFY": "smoke"}

    assert stack_environment(given) == kept


def test_a_score_near_the_ends_is_said_to_tell_little() -> None:
    assert judge(seen(126, right=1.0), SCALE).figures["score_is_telling"] is False


def test_the_aggregated_text_ends_before_the_stop_string(tmp_path: Path) -> None:
    build(tmp_path / "tiny", DemoModelOptions(variant=Variant.TINY), lambda line: None)
    tokenizer = Tokenizer.load(tmp_path / "tiny")

    assert text_of(tokenizer, [1, 2], [*b" ab\ncd"], STOP) == " ab"
    assert text_of(tokenizer, [1, 2], [*b" ab", *tokenizer.eos_token_ids], STOP) == " ab"


def problems(folder: Path) -> Task | None:
    for name, count in (("train", 6), ("test", 3)):
        rows = [
            {"question": f"{name} {n}?", "answer": f"It is <<{n}>>{n}.\n#### 1,0{n}"}
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return gsm8k(folder, 2)


def test_word_problems_are_asked_where_their_data_is(tmp_path: Path) -> None:
    assert gsm8k(tmp_path, 2) is None

    task = problems(tmp_path)

    assert task is not None
    assert len(task.items) == 2
    assert task.items[0].prompt.count("Answer:") == 4
    assert task.items[0].prompt.endswith("Question: test 0?\nAnswer:")
    assert is_right(task.items[0], " I say 7, no: 100")
    assert not is_right(task.items[0], " 1000")
    assert not is_right(task.items[0], " none")


def test_word_problems_that_come_out_otherwise_fail_the_check() -> None:
    found = seen(126)
    found["gsm8k"] = {"items": [{"ours": " 1", "theirs": " 2", "right": False}]}

    assert judge(found, SCALE).shows("gsm8k")
    found["gsm8k"]["items"][0]["ours"] = " 2"
    assert judge(found, SCALE).passed
