"""The hammer's reference and check: right rows pass, and each way to be wrong is seen."""

import dataclasses

import pytest
import torch

from bench.hammer.rows import Rows, tolerance
from bench.hammer.settings import Settings, parse
from splitwave.certify.hammer.walk import Step

CPU = torch.device("cpu")
ARGUMENTS = ["--dry", "--sizes", "8,16", "--hidden", "32", "--experts", "16", "--topk", "4"]
STEP = Step(size=16, tokens=(11, 5), entries=(2, 3), factor=-0.5)


def settings(*more: str) -> Settings:
    return parse([*ARGUMENTS, *more])


def plain(rows: Rows, step: Step, rank: int, layers: int) -> torch.Tensor:
    """Token by token and slot by slot, with a rounding wherever a transport has one."""
    n, entry, pool = step.tokens[rank], step.entries[rank], rows.pool
    out = (pool.x[entry, :n].float() * step.factor).bfloat16()
    for layer in range(layers):
        for t in range(n):
            partial = [torch.zeros(out.shape[1]) for _ in range(2)]
            for slot in range(pool.ids.shape[-1]):
                expert = int(pool.ids[rank, entry, layer, t, slot])
                gain = pool.weights[entry, layer, t, slot] * pool.scale[expert]
                partial[expert // rows.local] += gain * out[t].float()
            out[t] = partial[0].bfloat16() + partial[1].bfloat16()
    return out


def checked(
    rows: Rows, step: Step, out: torch.Tensor, load: torch.Tensor | None = None
) -> dict[str, int]:
    rows.stage(step)
    rows.out[: len(out)] = out
    rows.load[:, : rows.local] = rows.expected_load(step) if load is None else load
    rows.check(step, replay=5)
    return rows.tally.read()


@pytest.mark.parametrize("layers", [1, 2, 6])
def test_rows_rounded_at_every_hop_are_right(layers: int) -> None:
    for rank in (0, 1):
        rows = Rows(settings("--layers", str(layers)), rank, CPU)
        found = checked(rows, STEP, plain(rows, STEP, rank, layers))

        assert found["wrong_rows"] == 0
        assert found["replay"] == -1


def test_what_lies_in_padding_rows_is_nobodys_business() -> None:
    rows = Rows(settings(), 0, CPU)
    out = torch.full((16, 32), torch.nan).bfloat16()
    out[:11] = plain(rows, STEP, 0, 2)

    assert checked(rows, STEP, out)["wrong_rows"] == 0


@pytest.mark.parametrize("kind", ["swapped", "stale", "nan", "zero", "one_element"])
def test_a_wrong_row_is_found_and_named(kind: str) -> None:
    rows = Rows(settings(), 0, CPU)
    out = plain(rows, STEP, 0, 2)
    if kind == "swapped":
        out[[3, 4]] = out[[4, 3]]
    elif kind == "stale":
        out[3] *= 2  # The same tokens of another replay.
    elif kind == "nan":
        out[3, 7] = torch.nan
    elif kind == "zero":
        out[3] = 0
    else:
        out[3, 31] *= 1.06

    found = checked(rows, STEP, out)

    assert found["wrong_replays"] == 1
    assert found["wrong_rows"] == (2 if kind == "swapped" else 1)
    assert (found["replay"], found["row"]) == (5, 3)


def test_the_slot_that_weighs_least_is_missed() -> None:
    one = settings("--layers", "1", "--experts", "128", "--topk", "8")
    rows = Rows(one, 0, CPU)
    step = dataclasses.replace(STEP, tokens=(16, 5))
    ids, weights = rows.pool.ids[0, 2, 0], rows.pool.weights[2, 0]
    least = (weights * rows.pool.scale[ids]).argmin(dim=1)
    share = (weights * rows.pool.scale[ids]).gather(1, least[:, None]) / rows.pool.gain[0, 2][
        :, None
    ]
    out = plain(rows, step, 0, 1).float() * (1 - share)

    assert share.min() > 3 * tolerance(1)
    assert checked(rows, step, out.bfloat16())["wrong_rows"] == 16


def test_only_the_first_wrong_replay_is_named() -> None:
    rows = Rows(settings(), 0, CPU)
    bad = torch.tensor([False, True, True])
    for replay in (3, 4, 9):
        rows.tally.rows(bad if replay > 3 else ~bad & False, replay)

    assert rows.tally.read() == {
        "wrong_replays": 2, "wrong_rows": 4, "replay": 4, "row": 1,
        "wrong_loads": 0, "load_replay": -1,
    }  # fmt: skip


def test_an_expert_that_got_a_row_too_many_is_found() -> None:
    rows = Rows(settings(), 0, CPU)
    load = rows.expected_load(STEP)
    load[1, 2] += 1

    found = checked(rows, STEP, plain(rows, STEP, 0, 2), load)

    assert (found["wrong_loads"], found["load_replay"], found["wrong_rows"]) == (1, 5, 0)


def test_loads_add_up_to_every_slot_of_every_real_token() -> None:
    loads = [Rows(settings(), rank, CPU).expected_load(STEP) for rank in (0, 1)]

    assert (loads[0].sum(dim=1) + loads[1].sum(dim=1)).tolist() == [(11 + 5) * 4] * 2


def test_staging_leaves_poison_in_every_padding_row() -> None:
    rows = Rows(settings(), 1, CPU)
    rows.stage(dataclasses.replace(STEP, tokens=(16, 16)))
    rows.stage(STEP)

    assert torch.equal(rows.x[:5], (rows.pool.x[3, :5] * -0.5))
    assert rows.x[5:].isnan().all()
    assert rows.weights[:, 5:].isnan().all()
    assert rows.padding.flatten().isnan().tolist() == [False] * 5 + [True] * 11
    assert (rows.ids[:, 5:] == -1).all()
    assert (rows.ids[:, :5] >= 0).all()
    assert rows.out.isnan().all()


def test_an_idle_rank_stages_nothing_but_poison() -> None:
    rows = Rows(settings(), 1, CPU)
    step = dataclasses.replace(STEP, tokens=(11, 0))
    rows.stage(step)

    assert (rows.ids == -1).all()
    assert checked(rows, step, torch.empty((0, 32)).bfloat16())["wrong_rows"] == 0


def test_ranks_agree_on_routing_and_differ_in_rows() -> None:
    a, b = (Rows(settings(), rank, CPU).pool for rank in (0, 1))

    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.scale, b.scale)
    assert not torch.equal(a.x, b.x)


def test_tokens_choose_distinct_experts_and_some_entries_crowd_one_rank() -> None:
    pool = Rows(settings(), 0, CPU).pool
    chosen = pool.ids.sort(dim=-1).values

    assert (chosen[..., 1:] != chosen[..., :-1]).all()
    assert (pool.ids[:, 1] < 8).all()
    assert (pool.ids[:, 2] >= 8).all()
    assert 0.3 < (pool.ids[:, 0] < 8).float().mean() < 0.7


def test_padding_past_the_count_is_not_believed_and_a_stale_id_is_without_one() -> None:
    rows = Rows(settings(), 0, CPU)
    x = torch.ones((3, 32)).bfloat16()
    ids = torch.tensor([[0, -1], [1, 2], [3, 3]])
    weights = torch.tensor([[1.0, torch.nan], [1.0, 1.0], [1.0, 1.0]])

    y, believed = rows.expert(x, ids, weights, torch.tensor([2]))
    _, naive = rows.expert(x, ids, weights, None)

    assert believed.tolist() == [[0, -1], [1, 2], [-1, -1]]
    assert torch.equal(naive, ids)
    scale = rows.pool.scale
    assert y[:, 0].tolist() == pytest.approx(
        [float(scale[0]), float(scale[1] + scale[2]), 0], rel=0.01
    )


def test_what_a_synchronised_dispatch_must_bring_is_counted() -> None:
    rows = [Rows(settings(), rank, CPU) for rank in (0, 1)]
    crowded = dataclasses.replace(STEP, entries=(1, 1))

    assert [r.received_rows(crowded, (11, 5)) for r in rows] == [16, 0]
    both = [r.received_rows(STEP, (11, 5)) for r in rows]
    assert 16 <= sum(both) <= 32
