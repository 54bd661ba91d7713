"""Settings of groups that share GPUs, in the docs and in the checks, seen to work without a GPU."""

import argparse
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any  # settings by name

import pytest

from bench import split_gpu_model
from bench.split_gpu_check import LENGTHS, TOKENS
from bench.split_gpu_stack import add_arguments, mode_of, plan_of, settings_of
from services.cli.stack_config import StackConfig
from splitwave.core.mode import lookup
from splitwave.core.mode_rules import breaches
from splitwave.engine.port import Role
from splitwave.engine.vllm.check import check
from splitwave.engine.vllm.combination import asked as asked_for
from splitwave.engine.vllm.config import VllmGroupSettings, engine_arguments, environment
from splitwave.runtime.config import build, load

ROOT = Path(__file__).parents[2]
ROLES = ("prefill", "decode")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(
        json.dumps(split_gpu_model.config(split_gpu_model.Sizes()))
    )
    return tmp_path


def group(role: str, mode: str, model: Path, more: Mapping[str, str]) -> VllmGroupSettings:
    fixed: dict[str, Any] = {
        "role": Role(role), "mode": mode, "model_path": model, "served_model": "m",
        "group_id": "g", "epoch": 1, "log_dir": model,
    }  # fmt: skip
    said = {"ranks": "2", "expert_parallel": "true", "side_channel_port": "8100"}
    made = build(VllmGroupSettings, said | dict(more), "engine_settings", fixed)
    assert isinstance(made, VllmGroupSettings)
    return made


def asked(tmp_path: Path) -> argparse.Namespace:
    made = argparse.ArgumentParser()
    add_arguments(made)
    return made.parse_args(["--device", "cuda", "--out", "x", "--work-dir", str(tmp_path)])


def test_the_documented_settings_of_a_shared_split_are_taken(model: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs/decode-graphs.md").read_text()
    text = re.search(r"```toml\n(.*?)```", page, re.S)
    assert text is not None
    file = tmp_path / "shared.toml"
    file.write_text(text[1].replace("MODEL_DIR", str(model)))

    config, _ = load(StackConfig, "up", ["--config", str(file)], {})

    said = tomllib.loads(text[1])
    for role in ROLES:
        settings = group(role, said[f"{role}_mode"], model, said[f"{role}_setting"])
        assert getattr(config, f"{role}_setting") == said[f"{role}_setting"]
        assert check(settings, {}).role == role


@pytest.mark.parametrize("role", ROLES)
def test_the_checks_groups_can_work_and_keep_every_rule(role: str, model: Path) -> None:
    name = mode_of(asked(model), role)
    settings = group(role, name, model, settings_of(asked(model), role))

    mode = check(settings, {})

    assert breaches(mode, asked_for(settings, mode, {})) == []
    assert environment(settings, mode)["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert engine_arguments(settings, mode)["gpu_memory_utilization"] == 0.3
    assert lookup(name) is mode


def test_both_groups_leave_room_for_each_other(model: Path) -> None:
    shares = [float(settings_of(asked(model), role)["gpu_memory_share"]) for role in ROLES]

    assert sum(shares) < 0.9


def test_the_longest_prompts_fit_and_are_long_enough_for_microbatches(model: Path) -> None:
    prefill = group("prefill", "prefill_eager_ht_dbo", model, settings_of(asked(model), "prefill"))
    least = lookup("prefill_eager_ht_dbo").vllm_args["dbo_prefill_token_threshold"]
    assert isinstance(least, int)

    assert max(LENGTHS["cuda"]) + TOKENS < prefill.model_len_max_tokens
    assert max(LENGTHS["cuda"]) <= prefill.batch_max_tokens
    assert sum(length >= least for length in LENGTHS["cuda"]) >= 4, "two a rank and way at least"


def test_ports_of_the_two_groups_do_not_meet(model: Path) -> None:
    plan = plan_of(asked(model), model)
    first = {role: int(plan.engine_settings(role)["side_channel_port"]) for role in ROLES}

    assert first["decode"] == first["prefill"] + 2
    assert len(set(plan.listening().values())) == len(plan.listening())


def test_the_model_for_gpus_is_whole_and_its_tokens_are_text(tmp_path: Path) -> None:
    sizes = split_gpu_model.Sizes(hidden=64, layers=1, heads=2, kv_heads=1, head_dim=32,
                                  feed_forward=32, experts=4, top_k=2)  # fmt: skip
    found = dict(split_gpu_model.tensors(sizes))

    assert len(found) == 3 + 2 + 4 + 1 + 3 * 4
    assert found["model.layers.0.block_sparse_moe.experts.3.w2.weight"].shape == (64, 32)
    head = found["lm_head.weight"][:, 0]
    assert head[ord("A")] == 0.0
    assert head[0] < 0
    built = split_gpu_model.build(tmp_path / "m", sizes)
    before = (built / "model.safetensors").stat().st_mtime_ns
    split_gpu_model.build(tmp_path / "m", sizes)
    assert (built / "model.safetensors").stat().st_mtime_ns == before, "it is there already"
    assert (built / "tokenizer.json").exists()
