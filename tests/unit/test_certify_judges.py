"""What each check holds against what it saw: good passes, each planted fault is named."""

from dataclasses import replace
from typing import Any  # observations are JSON

import pytest

from splitwave.certify.battery.bench import Check, Subject
from splitwave.certify.battery.campaign import CHECKS
from splitwave.certify.battery.cases import Generated, certified_features, compare
from splitwave.certify.battery.limits import reasons_of
from splitwave.certify.battery.scale import Scale, scale_for
from splitwave.certify.battery.verdict import Verdict
from splitwave.core.envelope import Envelope, Traffic
from splitwave.core.evidence import Check as Name
from splitwave.core.evidence import Level
from splitwave.core.generation import FEATURES
from splitwave.core.mode import MODES, Device

SCALE = Scale(soak_s=10.0)
ENVELOPE = Envelope(
    ranks=2,
    capture_grid=(1, 2, 4),
    step_max_tokens=4,
    seats_max=4,
    prompt_max_tokens=63,
    sequence_max_tokens=64,
    traffic=Traffic(output_max_tokens=63),
)
SUBJECT = Subject(
    mode=MODES["decode_cpu_compiled"],
    level=Level.FULL,
    envelope=ENVELOPE,
    dtype="float32",
    block_size_tokens=32,
)
SAME = {"case": "a", "first_token": None, "logprob": 1e-5, "near_ties": 0}
REFUSALS = [
    {"why": why, "reason": reason, "tokens": 0} for why, reason in reasons_of("decode").items()
]
WALK = [1, 1, 2, 1, 4, 2, 2, 4, 4, 1]

GOOD: dict[Name, dict[str, Any]] = {
    Name.ORACLE: {
        "oracle": "plain",
        "differences": [SAME, SAME],
        "longest_prompt_tokens": 63,
        "longest_sequence_tokens": 64,
        "longest_output_tokens": 63,
    },
    Name.TWO_BOOTS: {"differences": [SAME]},
    Name.PADDING_POISON: {"differences": [SAME]},
    Name.GRID: {"sizes": [1, 2, 4], "executed": [WALK, WALK], "differences": [SAME]},
    Name.RAGGED_HAMMER: {"raggedness": 0.9, "executed": [[1], [4]], "differences": [SAME]},
    Name.WAVE_STORM: {"took_s": [0.1, 0.2], "gaps": 8, "waves": 7},
    Name.ABORT_STORM: {
        "by_stage": {"prefill": 1, "pull": 1, "decode": 1, "never": 1},
        "late_outputs": 0,
        "short": 0,
        "settled": True,
        "held": {"blocks": 0, "leases": 0},
    },
    Name.SOAK: {
        "seconds": 10.0,
        "requests": 9,
        "failures": 0,
        "kinds": {"compiled": 1600},
        "steps": [[(4, 0.01)] * 800] * 2,
        "memory": [[{"host_bytes": 10**9, "device_bytes": 0}] * 60] * 2,
    },
    Name.REPEATED_LARGE: {"requests": [[(1, 0.01)] * 6] * 20, "prompt_tokens": 60},
    Name.OVER_ENVELOPE: {
        "refusals": REFUSALS,
        "steps_for_refused": 0,
        "cap_tokens": 4,
        "crowd": 16,
        "served": 16,
        "largest_step_tokens": 4,
    },
}

LEAKING = [{"host_bytes": 10**9 + place * 10**7, "device_bytes": 0} for place in range(60)]
ON_GPU = [{"host_bytes": 10**9, "device_bytes": 10**9 + place * 10**7} for place in range(60)]
SLOW_END = [[(4, 0.01)] * 720 + [(4, 0.02)] * 80]
WRONG = SAME | {"first_token": 3}
OFF = SAME | {"logprob": 0.002}

PLANTED: list[tuple[Name, dict[str, Any], str]] = [
    (Name.ORACLE, {"differences": [SAME, WRONG]}, "tokens"),
    (Name.ORACLE, {"differences": [SAME, OFF]}, "logprob"),
    (Name.ORACLE, {"differences": []}, "empty"),
    (Name.ORACLE, {"longest_prompt_tokens": 61}, "edges"),
    (Name.ORACLE, {"longest_sequence_tokens": 63}, "edges"),
    (Name.ORACLE, {"longest_output_tokens": 62}, "edges"),
    (Name.TWO_BOOTS, {"differences": [OFF]}, "logprob"),
    (Name.PADDING_POISON, {"differences": [WRONG]}, "tokens"),
    (Name.GRID, {"executed": [WALK, WALK[:-1]]}, "orders"),
    (Name.GRID, {"executed": [WALK, [*WALK, 3]]}, "strays"),
    (Name.GRID, {"differences": [OFF]}, "logprob"),
    (Name.RAGGED_HAMMER, {"raggedness": 0.4}, "even"),
    (Name.RAGGED_HAMMER, {"differences": [WRONG]}, "tokens"),
    (Name.RAGGED_HAMMER, {"differences": [OFF]}, "logprob"),
    (Name.WAVE_STORM, {"took_s": [0.1, 6.5]}, "slow"),
    (Name.WAVE_STORM, {"waves": 1}, "no_waves"),
    (Name.ABORT_STORM, {"held": {"blocks": 1, "leases": 0}}, "held"),
    (Name.ABORT_STORM, {"held": {"blocks": 0, "leases": 1}}, "held"),
    (Name.ABORT_STORM, {"settled": False}, "held"),
    (Name.ABORT_STORM, {"short": 1}, "short"),
    (Name.ABORT_STORM, {"late_outputs": 1}, "late"),
    (Name.SOAK, {"kinds": {"compiled": 999, "eager": 1}}, "kinds"),
    (Name.SOAK, {"kinds": {"compiled": 999, "compiled_unwarmed": 1}}, "kinds"),
    (Name.SOAK, {"steps": SLOW_END}, "drift"),
    (Name.SOAK, {"steps": [[(4, 0.01)] * 20]}, "few"),
    (Name.SOAK, {"memory": [LEAKING]}, "memory"),
    (Name.SOAK, {"memory": [ON_GPU]}, "memory"),
    (Name.SOAK, {"failures": 1}, "failures"),
    (Name.REPEATED_LARGE, {"requests": [[(1, 0.01)] * 6] * 10 + [[(1, 0.02)] * 6] * 10}, "slower"),
    (Name.REPEATED_LARGE, {"requests": [[(1, 0.01)]] * 3}, "few"),
    (Name.OVER_ENVELOPE, {"refusals": [REFUSALS[0] | {"reason": None}, *REFUSALS[1:]]}, "let_in"),
    (Name.OVER_ENVELOPE, {"refusals": [REFUSALS[0] | {"tokens": 1}, *REFUSALS[1:]]}, "let_in"),
    (Name.OVER_ENVELOPE, {"refusals": [REFUSALS[0] | {"reason": "x"}, *REFUSALS[1:]]}, "odd"),
    (Name.OVER_ENVELOPE, {"refusals": REFUSALS[1:]}, "unasked"),
    (Name.OVER_ENVELOPE, {"refusals": []}, "unasked"),
    (Name.OVER_ENVELOPE, {"steps_for_refused": 1}, "computed"),
    (Name.OVER_ENVELOPE, {"largest_step_tokens": 5}, "crowd"),
    (Name.OVER_ENVELOPE, {"served": 15}, "lost"),
]


def judged(name: Name, **changes: Any) -> Verdict:
    return CHECKS[name].judge(GOOD[name] | changes, SUBJECT, SCALE)


@pytest.mark.parametrize("name", GOOD)
def test_what_is_good_passes(name: Name) -> None:
    verdict = judged(name)

    assert verdict.passed, verdict.said()
    assert verdict.figures


@pytest.mark.parametrize(("name", "changes", "code"), PLANTED)
def test_each_planted_fault_is_named(name: Name, changes: dict[str, Any], code: str) -> None:
    assert [problem.code for problem in judged(name, **changes).problems] == [code]


@pytest.mark.parametrize(("widest", "codes"), [(20, []), (33, ["strays"])])
def test_rows_of_a_graph_are_padded_up_to_its_size(widest: int, codes: list[str]) -> None:
    envelope = replace(ENVELOPE, capture_grid=(8, 32), step_max_tokens=32, seats_max=32)
    graphs = replace(SUBJECT, mode=MODES["decode_graph_ag"], envelope=envelope)
    walked = [3, widest, 8, 8, 32, 32, 8]
    seen = {"sizes": [8, 32], "executed": [walked, walked], "differences": [SAME]}

    problems = CHECKS[Name.GRID].judge(seen, graphs, SCALE).problems

    assert [problem.code for problem in problems] == codes


def test_a_look_or_two_at_memory_tell_nothing_of_growth() -> None:
    few = [{"host_bytes": 10**9, "device_bytes": 0}] * 9

    assert [problem.code for problem in judged(Name.SOAK, memory=[few]).problems] == ["few"]


@pytest.mark.parametrize(("share", "passes"), [(0.45, True), (0.2, False)])
def test_ranks_of_one_seat_differ_by_idleness_alone(share: float, passes: bool) -> None:
    one_seat = replace(SUBJECT, envelope=replace(ENVELOPE, capture_grid=(1,), seats_max=1))
    seen = GOOD[Name.RAGGED_HAMMER] | {"raggedness": share}

    assert CHECKS[Name.RAGGED_HAMMER].judge(seen, one_seat, SCALE).passed is passes


def test_each_check_of_a_rig_has_its_control_among_the_planted_faults() -> None:
    planted = {(name, code) for name, _, code in PLANTED}

    assert set(CHECKS) == set(Name) - {Name.ACCURACY} == set(GOOD)
    assert {(name, code) for name, check in CHECKS.items() for code in check.shows} <= planted
    assert all(check.broken and check.shows for check in CHECKS.values())


def test_a_control_must_be_noticed_for_what_was_broken() -> None:
    oracle: Check = CHECKS[Name.ORACLE]
    wrong_tokens = judged(Name.ORACLE, differences=[WRONG])

    assert not wrong_tokens.passed
    assert not all(wrong_tokens.shows(code) for code in oracle.shows)


def generated(tokens: list[int], *rows: dict[int, float]) -> Generated:
    return Generated(tuple(tokens), rows)


def test_equal_tokens_are_compared_by_their_log_probabilities() -> None:
    right = generated([5, 6], {5: -0.1, 6: -2.5}, {6: -0.2, 7: -1.0})
    ours = generated([5, 6], {5: -0.1004, 6: -2.5}, {6: -0.2, 8: -9.0})

    found = compare(ours, right, dtype="float32")

    assert found.first_token is None
    assert found.logprob == pytest.approx(0.0004)


def test_in_float32_there_are_no_ties() -> None:
    right = generated([5], {5: -0.7000, 6: -0.7005})
    ours = generated([6], {5: -0.7005, 6: -0.7000})

    assert compare(ours, right, dtype="float32").first_token == 0
    near = compare(ours, right, dtype="bfloat16")
    assert (near.first_token, near.near_ties) == (None, 1)


def test_a_token_that_the_oracle_has_far_away_is_no_tie_in_any_precision() -> None:
    right = generated([5], {5: -0.1, 6: -2.9})
    ours = generated([6], {6: -0.2, 5: -1.9})
    unknown = generated([9], {9: -0.2, 5: -1.9})

    assert compare(ours, right, dtype="bfloat16").first_token == 0
    assert compare(unknown, right, dtype="bfloat16").first_token == 0


def test_a_generation_that_ends_early_differs() -> None:
    right = generated([5, 6], {5: -0.1}, {6: -0.1})

    found = compare(generated([5], {5: -0.1}), right, dtype="bfloat16")

    assert found.first_token == 1
    assert found.logprob == 0.0, "else a request that broke off would pass for a wrong weight"


def test_the_oracle_runs_every_sampling_feature() -> None:
    assert certified_features() == FEATURES


def test_a_gpu_is_held_to_the_tighter_bound_and_a_heavy_model_does_less_on_a_cpu() -> None:
    gpu = scale_for(Level.FULL, Device.GPU, weights_bytes=10**12)
    light = scale_for(Level.FULL, Device.CPU, weights_bytes=4 * 10**6)
    heavy = scale_for(Level.FULL, Device.CPU, weights_bytes=15 * 10**8)
    smoke = scale_for(Level.SMOKE, Device.CPU, weights_bytes=15 * 10**8)

    assert (gpu.drift_max, light.drift_max) == (1.05, 1.25)
    assert heavy.hammer_steps < light.hammer_steps < gpu.hammer_steps
    assert smoke.oracle_cases < heavy.oracle_cases
    assert smoke.alone_cases == 1 <= heavy.alone_cases < light.alone_cases
    assert smoke.crowd_share > 1.0
    assert heavy.accuracy_items >= 120
    assert replace(heavy, soak_s=1800.0) != heavy
