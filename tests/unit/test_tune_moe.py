"""Tuning the expert kernel: what is tried, how it is dealt out, and what is chosen."""

import pytest

from bench.tune_moe import SHARED_BYTES_MAX, Config, Shape, best, candidates, shares, summary

FAST, SLOW, USUAL = {"BLOCK_SIZE_M": 16}, {"BLOCK_SIZE_M": 32}, {"BLOCK_SIZE_M": 64}


def shared_bytes(tile: Config) -> int:
    """Both operands' tiles in bf16, once a stage."""
    elements = tile["BLOCK_SIZE_K"] * (tile["BLOCK_SIZE_M"] + tile["BLOCK_SIZE_N"])
    return 2 * elements * tile["num_stages"]


def test_each_candidate_fits_an_sms_shared_memory_and_none_is_tried_twice() -> None:
    tiles = candidates()

    assert max(shared_bytes(tile) for tile in tiles) <= SHARED_BYTES_MAX == 232448
    assert len({tuple(sorted(tile.items())) for tile in tiles}) == len(tiles)
    assert len(tiles) > 100


def test_candidates_have_what_vllm_reads_from_its_file() -> None:
    names = "BLOCK_SIZE_M BLOCK_SIZE_N BLOCK_SIZE_K GROUP_SIZE_M num_warps num_stages"

    assert {tuple(tile) for tile in candidates()} == {tuple(names.split())}


def test_small_tiles_are_tried_for_few_rows_and_none_starves_its_warps() -> None:
    tiles = candidates()

    assert {tile["BLOCK_SIZE_M"] for tile in tiles} == {16, 32, 64}
    for tile in tiles:
        outputs_a_thread = tile["BLOCK_SIZE_M"] * tile["BLOCK_SIZE_N"] / (32 * tile["num_warps"])
        assert outputs_a_thread >= 8


@pytest.mark.parametrize("count", [1, 2, 7, 26, 1000])
def test_every_tile_is_dealt_to_exactly_one_process(count: int) -> None:
    tiles = candidates()

    dealt = shares(tiles, count)

    assert len(dealt) == count
    assert sorted(map(str, tiles)) == sorted(str(tile) for share in dealt for tile in share)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_the_fastest_tile_is_chosen_for_each_number_of_rows_apart() -> None:
    found = [(128, SLOW, 9.0), (128, FAST, 7.5), (256, FAST, 30.0), (256, SLOW, 20.0)]

    assert best(found) == {128: (FAST, 7.5), 256: (SLOW, 20.0)}
    assert best(found[::-1]) == best(found)
    assert best([]) == {}


def test_the_report_sets_the_choice_beside_the_usual_tile() -> None:
    chosen = {256: (SLOW, 20.04), 128: (FAST, 7.5)}
    before = {256: (USUAL, 41.26)}

    found = summary(chosen, {128: USUAL, 256: USUAL}, before)

    assert list(found) == ["128", "256"]
    assert found["256"] == {
        "default": USUAL, "default_us": 41.3, "tuned": SLOW, "tuned_us": 20.0,
    }  # fmt: skip
    assert found["128"]["default_us"] is None


def test_a_rank_holds_its_share_of_the_experts() -> None:
    assert Shape(experts=128, ranks=2, hidden=2048, intermediate=768, topk=8).local == 64
