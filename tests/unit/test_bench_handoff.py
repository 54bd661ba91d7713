"""What a handoff's figures are made of, without engines."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any  # results are JSON

import pytest

from bench.decode_modes.models import write
from bench.handoff import __main__ as handoff
from bench.handoff import fence
from bench.handoff.__main__ import blocks_of, parser, places, rates, through_host, ways
from bench.handoff.parent import SideFailed, Told
from bench.handoff.shapes import CACHES, sizes
from bench.handoff.side import chosen
from splitwave.core.mode import lookup
from splitwave.engine.vllm.config import NIXL_READS_BY_IPC

CPU = ("--device", "cpu", "--out", "x")
CUDA = ("--device", "cuda", "--out", "x")


def test_a_block_is_as_large_as_the_models_keys_and_values() -> None:
    assert CACHES["demo"].block_bytes("cpu") == 30 * 32 * 2 * 3 * 64 * 4
    assert CACHES["demo"].block_bytes("cuda") == 30 * 32 * 2 * 3 * 64 * 2
    assert CACHES["deepseek_v2_lite"].block_bytes("cuda") == 27 * 64 * 576 * 2


@pytest.mark.parametrize("name", CACHES)
def test_the_model_of_a_cache_has_its_layers_and_heads(name: str, tmp_path: Path) -> None:
    cache = CACHES[name]
    config = json.loads((write(cache.shape(name, "cuda"), tmp_path) / "config.json").read_text())

    assert config["num_hidden_layers"] == cache.layers
    assert config["num_key_value_heads"] == cache.attention.kv_heads
    if cache.attention.kv_rank:
        assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == 576


def test_sizes_go_from_one_block_to_the_most() -> None:
    assert sizes(4096) == [1, 4, 16, 64, 256, 1024, 4096]
    assert sizes(100) == [1, 4, 16, 64, 100]
    assert sizes(1) == [1]


def test_as_many_blocks_are_handed_over_as_fit() -> None:
    asked = parser().parse_args([*CPU, "--gib-max", "1"])

    most = blocks_of(CACHES["demo"], asked)

    assert most == 2**30 // CACHES["demo"].block_bytes("cpu") - 64
    assert blocks_of(CACHES["demo"], parser().parse_args([*CPU, "--blocks-max", "16"])) == 16


def test_scattered_blocks_are_each_once_never_the_placeholder_and_in_no_order() -> None:
    blocks = chosen(200, 300, "scattered", 1)

    assert len(set(blocks)) == 200
    assert 0 not in blocks
    assert blocks != sorted(blocks)
    assert chosen(3, 300, "row", 1) == [1, 2, 3]


def test_each_side_sees_both_gpus_its_own_first() -> None:
    found = places(parser().parse_args([*CUDA, "--prefill-device", "2"]), {"UCX_TLS": "x"})

    assert (found["prefill"].order, found["decode"].order) == ("2,1", "1,2")
    assert found["prefill"].port != found["decode"].port
    assert found["decode"].environment == {**NIXL_READS_BY_IPC, "UCX_TLS": "x"}, "as engines read"


def test_on_the_cpu_sides_have_their_modes_environment() -> None:
    found = places(parser().parse_args(CPU), {})

    assert found["prefill"].environment == lookup("prefill_cpu_eager").env


def test_rates_are_of_the_median_and_of_the_best() -> None:
    found = rates([0.2, 0.1, 0.4], 10**9)

    assert (found["gb_per_s_p50"], found["gb_per_s_best"]) == (5.0, 10.0)
    assert (found["ms_p50"], found["ms_best"]) == (200.0, 100.0)


def result(best: float, control: float | None, **side: object) -> dict[str, Any]:
    told = {"host_buffer": False, "memory": "VRAM"} | side
    found: dict[str, Any] = {
        "sides": {"prefill": told, "decode": told},
        "rows": [{"gb_per_s_best": best / 2}, {"gb_per_s_best": best}],
    }
    if control is not None:
        found["control"] = {"rows": [{"gb_per_s_best": control}]}
    return found


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (result(200.0, 12.0), "no: 200.0 GB/s, 12.0 with cuda_ipc forbidden"),
        (result(14.0, 12.0), "perhaps: 14.0 GB/s"),
        (result(200.0, None), "not known"),
        (result(200.0, 12.0, host_buffer=True), "yes"),
        (result(200.0, 12.0, memory="DRAM"), "yes"),
    ],
)
def test_that_nothing_went_through_the_host_is_said_only_where_a_control_shows_it(
    found: dict[str, Any], said: str
) -> None:
    assert through_host(found, "cuda").startswith(said)
    assert through_host(found, "cpu") == "all memory here is the host's"


def test_the_ways_that_ucx_has_chosen_are_read_from_each_sides_log(tmp_path: Path) -> None:
    table = (
        "[1.2] | remote memory read by ucp_get*(multi) into cuda/GPU1 from cuda |\n"
        "[1.2] +--------+-------------+-----------+\n"
        "[1.2] | 0..inf | zero-copy   | cuda_ipc/cuda |\n"
        "[1.2] | active message by ucp_am_send* from host memory |\n"
        "[1.2] | 0..inf | multi-frag copy-in | tcp/lo |\n"
    )
    (tmp_path / "decode.log").write_text(table)
    (tmp_path / "prefill.log").write_text("")

    assert ways(tmp_path) == {"prefill": [], "decode": ["cuda_ipc"]}


def test_what_was_measured_is_kept_before_what_comes_next_can_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    kept: list[dict[str, Any]] = []

    def measured(_name: str, _asked: object, folder: Path, _more: object) -> dict[str, Any]:
        if folder.name == "control":
            kept.append(json.loads(out.read_text()))
            raise SideFailed("no control")
        return {"rows": [], "sides": {"prefill": {"host_buffer": True}}}

    def no_link(*_: object) -> dict[str, Any]:
        kept.append(json.loads(out.read_text()))
        raise TimeoutError

    monkeypatch.setattr(handoff, "measure", measured)
    monkeypatch.setattr(fence, "cost", lambda *_: ["a fence"])
    monkeypatch.setattr(handoff, "provenance", lambda *_, **__: {})  # No torch may be here.
    monkeypatch.setattr(handoff, "link", no_link)
    with pytest.raises(TimeoutError):
        handoff.main(
            ["--device", "cuda", "--caches", "demo", "--out", str(out),
             "--work-dir", str(tmp_path)]
        )  # fmt: skip

    before, after = (one["rows"]["demo"] for one in kept)
    assert before["status"] == "without control"
    assert (after["status"], after["control_failed"]) == ("done", "no control")
    assert kept[1]["fence"] == ["a fence"]


def test_a_side_that_ends_before_it_is_told_something_fails_that_cache_alone() -> None:
    class Pipe:
        def write(self, _words: bytes) -> None:
            raise BrokenPipeError

    side = Told.__new__(Told)
    side.place = places(parser().parse_args(CPU), {})["prefill"]
    side.process = SimpleNamespace(stdin=Pipe())  # type: ignore[assignment]  # that has ended
    side.log_path = Path("/dev/null")

    with pytest.raises(SideFailed, match="prefill: has ended"):
        side.say(do="fill")
