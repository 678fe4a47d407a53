"""Attention of a sequence that real ranks share is full attention, and a model's gradients are those of one process."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpdl_lab import models
from hpdl_lab.models.attention import Causal
from hpdl_lab.parallel.context import context_parallel, ring_attention, sequence_part


@pytest.mark.parametrize("zigzag", [False, True])
def test_the_ring_of_these_ranks_is_full_attention(comm, zigzag):
    generator, s = torch.Generator().manual_seed(4), 6 * comm.size
    shapes = (2, 4, s, 5), (2, 2, s, 5), (2, 2, s, 3), (2, 4, s, 3)
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    mine = [sequence_part(comm, x, 2, zigzag) for x in tensors]
    found = []
    for (*qkv, grad), attend in ((tensors, Causal()), (mine, lambda *x: ring_attention(comm, *x, zigzag=zigzag))):
        leaves = [x.clone().requires_grad_(True) for x in qkv]
        out = attend(*leaves)
        out.backward(grad)
        found.append([out.detach(), *(x.grad for x in leaves)])
    for whole, part in zip(*found, strict=True):
        assert (sequence_part(comm, whole, 2, zigzag) - part).abs().max() < 1e-10


@pytest.mark.parametrize("how", ["zigzag", "ulysses"])
def test_a_gpt_whose_sequences_are_shared_equals_one_process(comm, how):
    s = 4 * comm.size
    whole = models.build("gpt", dtype="float64", vocabulary=11, block=s, layers=2, heads=comm.size, width=6 * comm.size)
    model = context_parallel(comm, copy.deepcopy(whole), how)
    tokens = torch.randint(11, (2, s + 1), generator=torch.Generator().manual_seed(5))
    cross_entropy(whole(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    x, y = (sequence_part(comm, part, 1, how == "zigzag") for part in (tokens[:, :-1], tokens[:, 1:]))
    cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    for mine, one in zip(model.parameters(), whole.parameters(), strict=True):
        assert (comm.all_reduce(mine.grad) / comm.size - one.grad).abs().max() < 1e-10
