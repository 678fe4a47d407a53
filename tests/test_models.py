"""Models: the same seed is the same network, in every dtype and on every rank."""

from pathlib import Path

import pytest
import torch

from hpdl_lab.models.mlp import mlp


def test_same_seed_same_network_and_the_callers_random_numbers_stay():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    a, b = mlp(seed=1), mlp(seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a[0].weight, mlp(seed=2)[0].weight)


def test_dtypes_start_from_the_same_network():
    assert torch.equal(mlp(dtype="float64")[0].weight.float(), mlp()[0].weight)


def test_shapes_and_the_count_in_the_docstring():
    model = mlp()
    assert model(torch.zeros(5, 64)).shape == (5, 10)
    assert sum(p.numel() for p in model.parameters()) == 17_226


def test_too_few_sizes_are_refused():
    with pytest.raises(ValueError, match="input and an output"):
        mlp((64,))


def test_notebook_04_states_the_number_of_weights():
    weights = sum(p.numel() for p in mlp().parameters())
    source = Path(__file__).resolve().parent.parent / "notebooks" / "source" / "04_ring_all_reduce.py"
    assert f"{weights:,} weights" in source.read_text()
