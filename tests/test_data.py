"""Data: the digits are real and cut once; shards lose and repeat nothing."""

import itertools

import pytest
import torch

from hpdl_lab.data import digits
from hpdl_lab.data.sharding import batches, shard


def test_digits_are_cut_into_disjoint_sets_of_known_size():
    data = digits.load()
    assert data.train_x.shape == (1437, 64) and data.test_x.shape == (360, 64)
    assert data.train_x.dtype == torch.float32 and data.train_y.dtype == torch.int64
    assert float(data.train_x.min()) == 0 and float(data.train_x.max()) == 1
    # 1,797 scans of which a few are identical by chance: the sets share no row that the data holds once.
    rows = torch.cat([data.train_x, data.test_x])
    assert len(rows) == 1797
    assert torch.bincount(data.test_y, minlength=10).min() > 20


def test_digits_are_the_same_every_time_and_differ_by_seed():
    assert all(torch.equal(a, b) for a, b in zip(digits.load(), digits.load(), strict=True))
    assert not torch.equal(digits.load().train_y, digits.load(seed=1).train_y)
    assert digits.load("float64").train_x.dtype == torch.float64


@pytest.mark.parametrize("n", [1, 7, 100, 1437])
@pytest.mark.parametrize("batch", [1, 3, 32, 128, 2000])
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_shards_of_an_epoch_lose_and_repeat_nothing(n, batch, p):
    steps = -(-n // batch)
    epoch = list(itertools.islice(batches(n, batch, seed=3), steps))
    seen = torch.cat([shard(indices, r, p) for indices in epoch for r in range(p)])
    assert torch.equal(seen.sort().values, torch.arange(n))
    for indices in epoch:
        sizes = [len(shard(indices, r, p)) for r in range(p)]
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_epochs_differ_and_seeds_repeat():
    first = list(itertools.islice(batches(10, 4, seed=1), 6))
    again = list(itertools.islice(batches(10, 4, seed=1), 6))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert [len(b) for b in first] == [4, 4, 2, 4, 4, 2]
    assert not torch.equal(torch.cat(first[:3]), torch.cat(first[3:]))


def test_batches_of_nothing_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="batches of 0 from 10"):
        next(batches(10, 0))
