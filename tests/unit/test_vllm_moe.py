"""Mapping routed experts to those of one rank."""

import torch

from splitwave.engine.vllm.cpu.moe import to_local_experts


def test_remote_experts_become_the_first_local_one_with_no_weight() -> None:
    here = torch.tensor([-1, -1, 0, 1])
    weights = torch.tensor([[0.7, 0.3], [0.6, 0.4]])
    ids = torch.tensor([[0, 2], [3, 2]], dtype=torch.int32)

    local_weights, local_ids = to_local_experts(weights, ids, here)

    assert local_ids.tolist() == [[0, 0], [1, 0]]
    assert local_ids.dtype == torch.int32
    assert torch.equal(local_weights, torch.tensor([[0.0, 0.3], [0.6, 0.4]]))


def test_ranks_together_give_each_slot_its_weight_once() -> None:
    weights = torch.rand((16, 2))
    ids = torch.randint(0, 4, (16, 2))
    maps = [torch.tensor([0, 1, -1, -1]), torch.tensor([-1, -1, 0, 1])]

    shares = [to_local_experts(weights, ids, expert_map)[0] for expert_map in maps]

    assert torch.equal(shares[0] + shares[1], weights)
