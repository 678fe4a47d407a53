"""Pairs that overlap on real ranks, whose all-to-alls run in the background: the gradients of one process."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpdl_lab import models, schedules
from hpdl_lab.parallel.pipeline.overlap import expert_step


def test_pairs_on_these_ranks_equal_one(comm):
    """A pipeline of one rank, which holds both stages of DualPipe-V, and experts on all of them."""
    if 6 % comm.size:
        pytest.skip(f"6 experts are not for {comm.size} ranks")
    fields = {
        "vocabulary": 11,
        "block": 4,
        "width": 16,
        "heads": 2,
        "n_routed_experts": 6,
        "n_group": 2,
        "topk_group": 2,
    }
    small = {
        "layers": 3,
        "hidden": 12,
        "moe_intermediate_size": 8,
        "q_lora_rank": 6,
        "kv_lora_rank": 4,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
    }
    plan = schedules.build("dualpipe_v", 1, 4)
    x, y = torch.randint(11, (2, 4, comm.size, 2, 4), generator=torch.Generator().manual_seed(0))
    whole = models.build("deepseek", dtype="float64", **fields, **small)
    cross_entropy(whole(x.flatten(0, 2)).flatten(0, 1), y.flatten()).backward()
    _, ours = expert_step(comm, plan, models.build("deepseek", dtype="float64", **fields, **small), x, y, {}, True)
    for (name, param), mine in zip(whole.named_parameters(), ours.parameters(), strict=True):
        if ".mlp.experts." in name:
            right = param.grad.chunk(comm.size)[comm.rank]
        else:
            right, mine.grad = param.grad, comm.all_reduce(mine.grad.contiguous())
        assert float((mine.grad - right).abs().max()) < 1e-12, name
