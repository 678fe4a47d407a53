"""Tensor parallel training on engines: two replicas of two shards, a refusal, and the engines are usable afterwards."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpdl_lab import models
from hpdl_lab.engines.errors import RunFailed
from hpdl_lab.mesh import DeviceMesh
from hpdl_lab.parallel.tensor.cuts import add_partial_gradients, cuts_of, joined
from hpdl_lab.parallel.tensor.model import tensor_parallel

FIELDS = {"vocabulary": 11, "block": 6, "layers": 1, "heads": 4, "width": 8, "dtype": "float64"}


def batch():
    tokens = torch.arange(4 * 7).view(4, 7) ** 2 % 11
    return tokens[:, :-1], tokens[:, 1:]


def grads_of(comm, model, sequence):
    mesh = DeviceMesh(comm, dp=2, tp=2)
    mine = tensor_parallel(mesh["tp"], model, sequence=sequence)
    x, y = (part.chunk(2)[mesh.coordinates["dp"]] for part in batch())
    loss = cross_entropy(mine(x).flatten(0, 1), y.flatten()) / 2
    loss.backward()
    add_partial_gradients(mesh["tp"], mine)
    cuts = cuts_of(mine)
    return {n: joined(mesh["tp"], mesh["dp"].all_reduce(q.grad), cuts[n]) for n, q in mine.named_parameters()}


@pytest.mark.parametrize("sequence", [False, True])
def test_two_replicas_of_two_shards_then_a_refusal_then_again(cluster, sequence):
    model = models.build("gpt", **FIELDS)
    one = copy.deepcopy(model)
    x, y = batch()
    cross_entropy(one(x).flatten(0, 1), y.flatten()).backward()
    for fields in ({}, {"heads": 1}, {}):
        mine = models.build("gpt", **{**FIELDS, **fields})
        if fields:
            with pytest.raises(RunFailed, match="ranks 0-3: ValueError: 1 heads of a width of 8 cannot be shared"):
                cluster.run(grads_of, mine, sequence)
            continue
        for grads in cluster.run(grads_of, mine, sequence):
            assert all((grads[name] - q.grad).abs().max() < 1e-10 for name, q in one.named_parameters())
