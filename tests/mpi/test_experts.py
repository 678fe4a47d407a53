"""Experts that real ranks share: the steps of one process, with an expert that gets nothing."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpdl_lab import models
from hpdl_lab.parallel.experts import expert_parallel, mixtures_of, update_biases
from hpdl_lab.parallel.tensor.cuts import add_partial_gradients, gather_parameters, tensors_of

EXACT = 1e-10
STEPS, BATCH, BLOCK = 3, 7, 6


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_these_ranks_equal_one(comm, capacity):
    if 12 % comm.size:
        pytest.skip(f"12 experts are not for {comm.size} ranks")
    sizes = {
        "vocabulary": 11,
        "block": BLOCK,
        "layers": 2,
        "heads": 2,
        "width": 16,
        "hidden": 8,
        "n_routed_experts": 12,
    }
    whole = models.build(
        "deepseek", dtype="float64", moe_intermediate_size=8, q_lora_rank=4, kv_lora_rank=4, qk_rope_head_dim=2, **sizes
    )
    for layer in mixtures_of(whole):
        layer.router.bias[5] = -1.0
    ours, alone = expert_parallel(comm, whole, capacity), comm.split(comm.rank)
    for layer in mixtures_of(whole):
        layer.capacity = capacity
    x, y = torch.randint(11, (2, STEPS, BATCH, BLOCK), generator=torch.Generator().manual_seed(1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (whole, ours)]
    for some, answers in zip(x, y, strict=True):
        parts = (some, answers), tuple(t.tensor_split(comm.size)[comm.rank] for t in (some, answers))
        losses = []
        for model, optimizer, (tokens, truth) in zip((whole, ours), optimizers, parts, strict=True):
            optimizer.zero_grad()
            loss = cross_entropy(model(tokens).flatten(0, 1), truth.flatten(), reduction="sum") / answers.numel()
            loss.backward()
            add_partial_gradients(comm, model) if model is ours else None
            optimizer.step()
            update_biases(alone, model, 0.01)
            losses.append(loss.detach())
        assert (comm.all_reduce(losses[1]) - losses[0]).abs() < EXACT
        loads = next(mixtures_of(ours)).loads
        assert loads.shape == (comm.size, 12) and loads.sum() == 2 * BATCH * BLOCK and not loads[:, 5].any()
    for tensor, (known, true) in zip(gather_parameters(comm, ours).values(), tensors_of(whole), strict=True):
        assert (tensor - true).abs().max() < EXACT, known
