"""What a battery certifies of a started group: with a written envelope, and without."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any  # a rig that is none

import pytest

from splitwave.certify.battery import campaign, rig
from splitwave.certify.battery.bench import Bench, Subject
from splitwave.certify.battery.campaign import EnvelopeRefused, Order, subject_of, with_soak
from splitwave.certify.battery.cases import Case, Generated, certified_features
from splitwave.certify.battery.scale import Scale, scale_for
from splitwave.certify.battery.tokens import Oracle, edge_cases
from splitwave.certify.keys import SigningKey
from splitwave.core.envelope import Envelope, Traffic
from splitwave.core.evidence import Level
from splitwave.core.mode import Device, lookup
from splitwave.engine.port import GroupDescription, Role
from splitwave.engine.vllm.config import SettingsError, VllmGroupSettings
from splitwave.engine.vllm.switches import PROBE
from tests.unit.test_adapter_config import MODEL

SETTINGS = VllmGroupSettings(
    role=Role.DECODE, mode="decode_graph_ht_tbo", model_path=Path("m"), served_model="m",
    group_id="g", epoch=1, log_dir=Path("logs"), ranks=2,
)  # fmt: skip
GROUP = GroupDescription(
    group_id="g", epoch=1, role=Role.DECODE, mode=SETTINGS.mode, model="m", ranks=2,
    block_size_tokens=32, blocks_per_rank=64, seats_per_rank=64, model_len_max_tokens=1024,
    batch_max_tokens=64, block_bytes=1, kv_layout="k", capture_grid=(32, 64),
)  # fmt: skip


def order(tmp_path: Path) -> Order:
    return Order(
        level=Level.FULL, settings={Role.DECODE: SETTINGS}, targets=(Role.DECODE,), out=tmp_path,
        certificates=tmp_path, key=SigningKey.generate(),
    )  # fmt: skip


async def test_what_one_group_cannot_run_is_told_before_the_other_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    good = replace(
        SETTINGS, role=Role.PREFILL, mode="prefill_cpu_eager", model_path=tmp_path, ranks=1
    )
    bad = replace(SETTINGS, model_path=tmp_path, expert_parallel=False)
    built: list[str] = []

    async def boot(*_: Any) -> None:
        pytest.fail("a group was started")

    monkeypatch.setenv(PROBE, "")
    monkeypatch.setattr(rig, "boot", boot)
    monkeypatch.setattr(campaign, "check_build", lambda mode: built.append(mode.name))
    asked = replace(order(tmp_path), settings={Role.PREFILL: good, Role.DECODE: bad})

    with pytest.raises(SettingsError, match="rule experts_are_parallel"):
        await campaign.run(asked, lambda words: None)
    assert built == ["prefill_cpu_eager"]


@pytest.mark.parametrize(
    ("mode", "step_max_tokens", "floor"),
    [
        ("decode_graph_ht_tbo", 64, 32),
        ("decode_graph_ht_tbo", 16, 16),
        ("decode_graph_ht", 64, 0),
    ],
)
def test_the_floor_of_a_mode_is_certified_so_that_placement_knows_it(
    mode: str, step_max_tokens: int, floor: int, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, mode=mode)
    group = replace(GROUP, mode=mode, batch_max_tokens=step_max_tokens)

    envelope = subject_of(order(tmp_path), group, settings).envelope

    assert (envelope.step_min_tokens, envelope.step_max_tokens) == (floor, step_max_tokens)


def envelope(prompt: int, sequence: int, output: int, *sampling: str) -> Envelope:
    return Envelope(
        ranks=2, capture_grid=(32, 64), step_max_tokens=64, seats_max=64,
        prompt_max_tokens=prompt, sequence_max_tokens=sequence,
        traffic=Traffic(output_max_tokens=output, sampling=sampling),
    )  # fmt: skip


def test_sampling_that_no_check_runs_is_not_certified(tmp_path: Path) -> None:
    def asked(*sampling: str) -> Order:
        written = envelope(1023, 1024, 1023, *sampling)
        return replace(order(tmp_path), envelopes={Role.DECODE: written})

    with pytest.raises(EnvelopeRefused, match=r"traffic\.sampling: no check runs beam_search"):
        subject_of(asked("beam_search", "seed"), GROUP, SETTINGS)

    certified = subject_of(asked(*certified_features()), GROUP, SETTINGS)
    assert certified.envelope.traffic.sampling


@pytest.mark.parametrize(("asked", "longest"), [(None, 1023), (256, 256), (10**6, 1023)])
def test_an_envelope_that_nobody_wrote_is_all_that_the_group_can_run_or_what_was_asked_for(
    asked: int | None, longest: int, tmp_path: Path
) -> None:
    wanted = replace(order(tmp_path), output_max_tokens=asked)

    found = subject_of(wanted, GROUP, SETTINGS).envelope

    assert found.traffic.output_max_tokens == longest
    assert (found.prompt_max_tokens, found.sequence_max_tokens) == (1023, 1024)
    edges = edge_cases(subject("decode", found), Scale())
    assert max(case.new_tokens for case in edges) == longest, "it is run to its end"


def subject(role: str, found: Envelope, level: Level = Level.FULL) -> Subject:
    mode = lookup(f"{role}_cpu_eager")
    return Subject(mode=mode, level=level, envelope=found, dtype="float32", block_size_tokens=32)


@pytest.mark.parametrize(
    ("role", "found", "lengths"),
    [
        ("decode", envelope(1023, 1024, 1023), [(1, 1023), (1022, 2)]),
        ("decode", envelope(1023, 1024, 500), [(524, 500), (1022, 2)]),
        ("decode", envelope(100, 128, 27), [(100, 27)]),
        ("decode", envelope(100, 128, 60), [(68, 60), (100, 24)]),
        ("decode", envelope(120, 128, 300), [(1, 127), (120, 8)]),
        ("decode", envelope(64, 64, 4), [(60, 4), (62, 2)]),
        ("prefill", envelope(1023, 1024, 1023), [(1022, 2)]),
    ],
)
def test_the_edges_are_the_longest_prompt_output_and_sequence(
    role: str, found: Envelope, lengths: list[tuple[int, int]]
) -> None:
    edges = edge_cases(subject(role, found), Scale())

    assert [(len(case.token_ids), case.new_tokens) for case in edges] == lengths
    for case in edges:
        refusal = found.refuse_request(
            prompt_tokens=len(case.token_ids), output_max_tokens=case.new_tokens
        )
        assert refusal is None


@pytest.mark.parametrize(
    ("level", "longest", "ends_early", "problems"),
    [
        (Level.FULL, 1024, False, []),
        (Level.FULL, 1024, True, ["tokens", "edges"]),
        (Level.SMOKE, 39, False, []),
    ],
)
async def test_the_oracle_runs_to_the_edges_at_the_full_level(
    level: Level, longest: int, ends_early: bool, problems: list[str]
) -> None:
    ran: list[int] = []

    async def generate(case: Case, rank: int) -> Generated:
        ran.append(len(case.token_ids) + case.new_tokens)
        tokens = case.new_tokens - (ends_early and case.new_tokens > 100)
        return Generated((5,) * tokens, ({},) * tokens)

    async def plain(asked: Sequence[Case]) -> list[Generated]:
        return [Generated((5,) * case.new_tokens, ({},) * case.new_tokens) for case in asked]

    rig: Any = SimpleNamespace(ranks=lambda: range(2), generate=generate)
    scale = Scale() if level is Level.FULL else Scale(oracle_tokens=6, prompt_max_tokens=33)
    of = subject("decode", envelope(1023, 1024, 1023), level)
    bench = Bench(subject=of, scale=scale, rig=rig, plain=plain)

    seen = await Oracle().observe(bench)

    assert max(ran) == longest == seen["longest_sequence_tokens"]
    assert ran.count(1024) == (2 if level is Level.FULL else 0)
    assert seen["longest_output_tokens"] == (
        scale.oracle_tokens if level is Level.SMOKE else 1023 - ends_early
    )
    assert [problem.code for problem in Oracle().judge(seen, of, scale).problems] == problems


@pytest.mark.parametrize(("asked_s", "soak_s", "control_s"), [
    (None, 120.0, 24.0), (1800.0, 1800.0, 24.0), (60.0, 60.0, 12.0),
])  # fmt: skip
def test_a_soak_that_was_asked_for_has_a_control_of_a_fifth_at_most(
    asked_s: float | None, soak_s: float, control_s: float
) -> None:
    scale = with_soak(asked_s)(Scale())

    assert (scale.soak_s, scale.soak_control_s) == (soak_s, control_s)


@pytest.mark.parametrize(("asked_s", "share"), [(None, 0.2), (120.0, 0.2), (1800.0, 0.1)])
def test_a_long_soak_of_a_heavy_model_compares_tenths(asked_s: float | None, share: float) -> None:
    heavy = scale_for(Level.FULL, Device.CPU, weights_bytes=2**30)

    assert with_soak(asked_s)(heavy).drift_share == share
