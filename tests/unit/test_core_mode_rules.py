"""What may not go together in a mode is refused by the rule's name, with the fix."""

import dataclasses
from typing import Any  # a test's keywords

import pytest

from splitwave.core.mode import MODES, Mode, lookup
from splitwave.core.mode_rules import FEATURES, RULES, Combination, breaches


def fitting(mode: Mode, **changes: Any) -> Combination:
    """A combination that keeps every rule of a mode, with changes."""
    step = mode.capture_step_tokens or 1
    grid = tuple(range(step, 64 + 1, step)) if mode.has_grid else ()
    fields: dict[str, Any] = {
        "role": mode.role,
        "ranks": 2,
        "expert_parallel": True,
        "seats_max": 64,
        "step_max_tokens": 64,
        "capture_grid": grid,
        "cudagraph_mode": "FULL_DECODE_ONLY" if mode.captures_graphs else "NONE",
        "microbatches": bool(mode.vllm_args.get("enable_dbo")),
        "arguments": mode.vllm_args,
    }
    return Combination(**(fields | changes))


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_each_mode_has_a_combination_that_may_run(mode: Mode) -> None:
    assert breaches(lookup(mode.name), fitting(mode)) == []


FORBIDDEN: list[tuple[str, dict[str, Any], str, str]] = [
    ("decode_graph_ht", {"role": "prefill"}, "role_matches", "begins with prefill_"),
    ("prefill_cpu_eager", {"role": "decode"}, "role_matches", "begins with decode_"),
    (
        "decode_graph_ht", {"features": frozenset({"breakable_graphs"})},
        "no_breakable_graphs", "unset VLLM_USE_BREAKABLE_CUDAGRAPH",
    ),
    (
        "decode_graph_ht_tbo", {"features": frozenset({"breakable_graphs"})},
        "no_breakable_graphs", "unset VLLM_USE_BREAKABLE_CUDAGRAPH",
    ),
    (
        "decode_cpu_eager", {"features": frozenset({"prefix_caching"})},
        "no_prefix_caching", "switch prefix_caching off",
    ),
    ("prefill_eager_ht", {"features": frozenset({"eplb"})}, "no_eplb", "switch eplb off"),
    ("decode_graph_ag", {"features": frozenset({"lora"})}, "no_lora", "switch lora off"),
    (
        "decode_graph_ag", {"features": frozenset({"speculative_decoding"})},
        "no_speculative_decoding", "take the speculative",
    ),
    (
        "prefill_cpu_eager", {"features": frozenset({"pipeline_parallel"})},
        "no_pipeline_parallel", "set pipeline parallelism to 1",
    ),
    ("decode_graph_ll", {"expert_parallel": False}, "experts_are_parallel", "switch expert_"),
    ("decode_cpu_eager", {"ranks": 1}, "experts_need_ranks", "at least 2 ranks"),
    (
        "prefill_cpu_eager", {"cudagraph_mode": "PIECEWISE"},
        "eager_has_no_graphs", "leave it NONE",
    ),
    (
        "prefill_eager_ht", {"cudagraph_mode": "FULL_DECODE_ONLY"},
        "eager_has_no_graphs", "a decode_graph mode for a decode group",
    ),
    ("decode_cpu_eager", {"capture_grid": (8,)}, "eager_has_no_graphs", "leave them out"),
    (
        "decode_cpu_compiled", {"cudagraph_mode": "FULL"},
        "eager_has_no_graphs", "leave it NONE",
    ),
    (
        "decode_graph_ht", {"cudagraph_mode": "NONE"},
        "graphs_hold_whole_steps", "must be FULL_DECODE_ONLY",
    ),
    (
        "decode_graph_ag", {"cudagraph_mode": "FULL_AND_PIECEWISE"},
        "graphs_hold_whole_steps", "must be FULL_DECODE_ONLY",
    ),
    ("decode_graph_ht", {"microbatches": True}, "microbatches_are_named", "switch enable_dbo off"),
    ("decode_graph_ht_tbo", {"microbatches": False}, "microbatches_are_named", "switch it on"),
    ("prefill_eager_ht", {"microbatches": True}, "microbatches_are_named", "switch enable_dbo off"),
    ("prefill_eager_ht_dbo", {"microbatches": False}, "microbatches_are_named", "switch it on"),
    (
        "prefill_eager_ht_dbo", {"arguments": {"dbo_prefill_token_threshold": 64}},
        "arguments_are_the_modes", "nothing but the mode sets it",
    ),
    ("decode_graph_ag", {"capture_grid": ()}, "grid_is_there", "name some"),
    ("decode_cpu_compiled", {"capture_grid": ()}, "grid_is_there", "name some"),
    ("decode_graph_ag", {"capture_grid": (16, 8, 64)}, "grid_ascends", "ascending"),
    ("decode_graph_ag", {"capture_grid": (8, 8, 64)}, "grid_ascends", "ascending"),
    ("decode_graph_ag", {"capture_grid": (0, 8, 64)}, "grid_ascends", "ascending"),
    ("decode_graph_ag", {"capture_grid": (8, 12, 64)}, "grid_is_aligned", "use 8 or 16"),
    ("decode_graph_ag", {"capture_grid": (4, 64)}, "grid_is_aligned", "use 8"),
    ("decode_graph_ht_tbo", {"capture_grid": (32, 48, 64)}, "grid_is_aligned", "use 32 or 64"),
    ("decode_graph_ht_tbo", {"capture_grid": (32, 96), "seats_max": 96}, "grid_is_dense", "add 64"),
    ("decode_graph_ht_tbo", {"capture_grid": (64,)}, "grid_is_dense", "add 32"),
    (
        "decode_cpu_compiled", {"capture_grid": (1, 2, *range(4, 65))},
        "grid_is_dense", "every size is warmed up",
    ),
    ("decode_graph_ag", {"seats_max": 65}, "seats_fit_the_grid", "set seats_max to 64 or less"),
    ("decode_graph_ag", {"seats_max": 60}, "seats_are_captured", "set seats_max to 64 or 56"),
    ("decode_graph_ag", {"seats_max": 5}, "seats_are_captured", "set seats_max to 8"),
    (
        "decode_cpu_compiled", {"step_max_tokens": 65},
        "compiled_steps_fit_the_grid", "set it to 64",
    ),
    (
        "prefill_cpu_eager", {"arguments": {"enforce_eager": False}},
        "arguments_are_the_modes", "nothing but the mode sets it",
    ),
    (
        "decode_graph_ll", {"arguments": {"all2all_backend": "naive"}},
        "arguments_are_the_modes", "nothing but the mode sets it",
    ),
    (
        "decode_graph_ag", {"arguments": {"compilation_config": {"mode": 3}}},
        "arguments_are_the_modes", "nothing but the mode sets it",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "rule", "fix"), FORBIDDEN, ids=[f"{x[0]}-{x[2]}" for x in FORBIDDEN]
)
def test_what_may_not_go_together_is_refused_by_rule_and_fix(
    name: str, changes: dict[str, Any], rule: str, fix: str
) -> None:
    mode = lookup(name)
    found = breaches(mode, fitting(mode, **changes))

    assert [breach.rule for breach in found] == [rule]
    assert f"rule {rule}" in str(found[0])
    assert fix in found[0].fix


def test_a_part_of_an_argument_is_named() -> None:
    mode = lookup("decode_graph_ag")

    (found,) = breaches(mode, fitting(mode, arguments={"compilation_config": {"mode": 3}}))

    assert found.setting == "compilation_config.mode"
    assert "is 3; mode decode_graph_ag has 0" in found.problem


def test_every_rule_and_feature_is_broken_above() -> None:
    broken = {rule for _, _, rule, _ in FORBIDDEN}

    assert broken == RULES.keys() - {"no_excluded_feature"} | {f"no_{name}" for name in FEATURES}


def test_every_exclusion_of_the_table_is_known() -> None:
    assert {name for mode in MODES.values() for name in mode.excludes} <= FEATURES.keys()


def test_seats_on_the_largest_size_are_within_and_sizes_without_microbatches_may_leap() -> None:
    mode = lookup("decode_graph_ag")

    assert breaches(mode, fitting(mode, capture_grid=(8, 64))) == []


def test_all_breaches_are_told_not_the_first_alone() -> None:
    mode = lookup("decode_graph_ht_tbo")
    bad = dataclasses.replace(
        fitting(mode), seats_max=400, cudagraph_mode="NONE", features=frozenset({"lora"})
    )

    assert [breach.rule for breach in breaches(mode, bad)] == [
        "no_lora", "graphs_hold_whole_steps", "seats_fit_the_grid",
    ]  # fmt: skip


def test_only_modes_with_a_grid_or_graphs_align_to_one() -> None:
    for mode in MODES.values():
        if mode.capture_step_tokens is not None:
            assert mode.capture_step_tokens % mode.capture_alignment_tokens == 0
        else:
            assert mode.capture_alignment_tokens == 1
