"""Recomputation: gradients bit by bit those without, fewer bytes, a third more arithmetic."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hpdl_lab.comm import sim
from hpdl_lab.mesh import DeviceMesh
from hpdl_lab.models import gpt
from hpdl_lab.models.transformer import Attention, Block
from hpdl_lab.parallel.data_parallel import DataParallel
from hpdl_lab.parallel.hybrid.model import HybridParallel
from hpdl_lab.parallel.recompute import Watch, compare, recompute, recomputed
from hpdl_lab.parallel.training import train_step
from hpdl_lab.parallel.zero import ZeRO3
from tests.wording import raises

TOKENS = torch.randint(20, (4, 8), generator=torch.Generator().manual_seed(0))


def small(dropout=0.0):
    model = gpt.build(gpt.GPTConfig(20, 8, 3, 2, 16), seed=1)
    for block in model.blocks:
        block.mlp.append(nn.Dropout(dropout))
    return model


def gradients(model):
    torch.manual_seed(3)
    model(TOKENS).square().sum().backward()
    return [p.grad for p in model.parameters()], torch.rand(2)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("by", [None, recomputed], ids=["torch", "own"])
@pytest.mark.parametrize("kinds", [(Block,), (Attention,), (Attention, nn.Dropout)], ids=str)
def test_gradients_are_bit_equal_and_names_stay(kinds, by, dropout):
    if by and nn.Dropout in kinds:
        kinds = (Attention,)
    plain, model = small(dropout), small(dropout)
    assert recompute(model, *kinds, by=by) == sum(isinstance(m, kinds) for m in plain.modules())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    model = pickle.loads(pickle.dumps(copy.deepcopy(model)))  # as engines get it
    (want, later), (got, later_too) = gradients(plain), gradients(model)
    assert all(map(torch.equal, want, got)) and torch.equal(later, later_too)


def test_bytes_and_flops():
    model = gpt.build(gpt.GPTConfig(20, 32, 6, 2, 32), seed=1)
    x = torch.randint(20, (4, 32), generator=torch.Generator().manual_seed(0))
    choices = {"kept": (), "attention": (Attention,), "torch": (Block,), "own": (Block, recomputed)}
    costs = compare(model, x, choices)
    flops = {name: watch.flops / costs["kept"].flops for name, watch in costs.items()}
    ends = flops_of_ends(model, x) / costs["kept"].flops
    assert flops["own"] == pytest.approx(1 + (1 - ends) / 3, rel=1e-12)  # 4/3 of all but embeddings and logits
    assert 1 < flops["attention"] < flops["torch"] < flops["own"]
    assert costs["own"].most < costs["kept"].most / 3 and costs["torch"].most < costs["kept"].most / 3
    assert costs["torch"].most < costs["attention"].most < costs["kept"].most
    assert all(watch.held() < costs["kept"].most / 10 for watch in costs.values())  # all is released in the end


def flops_of_ends(model, x):
    """FLOPs, forward and backward, of what is in no block."""
    blocks, model = model.blocks, copy.deepcopy(model)
    model.blocks = nn.Identity()
    with Watch() as watch:
        model(x).sum().backward()
    assert len(blocks)
    return watch.flops


def test_it_composes_with_data_parallel_and_pipelines():
    def trained(comm, again):
        model, strategy = small(), DataParallel()
        if again:
            recompute(model, Attention)
        strategy.start(comm, model)
        train_step(comm, model, strategy, torch.optim.SGD(model.parameters(), lr=0.1), TOKENS, TOKENS, 8)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def piped(comm, again):
        model = small()
        if again:
            recompute(model, Attention)
        hybrid = HybridParallel(model, DeviceMesh(comm, pp=2), TOKENS, micro_batches=2, costs=[1] * 7, recompute=again)
        hybrid.step(TOKENS, TOKENS)
        return [p.grad.clone() for p in hybrid.parameters() if p.grad is not None]

    for fn in (trained, piped):
        plain, again = sim.run(2, fn, False), sim.run(2, fn, True)
        for want, got in zip(plain, again, strict=True):
            assert all(map(torch.equal, want, got)) and len(want)


def test_the_second_forward_uses_what_zero_has_gathered_for_backward():
    def trained(comm, again):
        model, strategy = small(), ZeRO3()
        if again:
            recompute(model, Block)
        strategy.start(comm, model)
        optimizer = strategy.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
        for _ in range(2):
            train_step(comm, model, strategy, optimizer, TOKENS, TOKENS, 8)
        strategy.finish(comm, model)
        strategy.stop()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    plain, again = (sim.run(2, trained, again, threads=True) for again in (False, True))
    sent = [sum(e.nbytes for e in run.events if e.rank == 0 and "send" in e.op) for run in (plain, again)]
    assert sent[0] == sent[1] > 0
    assert torch.equal(plain[0], again[0]) and torch.equal(again[0], again[1])


def test_what_cannot_be_is_said():
    with raises(ValueError, "GPT", "Conv2d"):
        recompute(small(), nn.Conv2d)
    with raises(ValueError, "Block", "three times"):
        recompute(small(), Block, Attention)
    with raises(ValueError, "Sequential", "statistics"):
        recompute(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Sequential)
