"""Which example goes into which step, on which rank: nothing is lost and nothing repeated.

    epoch of n = 10 examples, shuffled     7 2 9 0 | 4 1 8 3 | 6 5        batches of 4; the last one is shorter
    batch on p = 3 ranks                   7 2 . 9 . 0                    contiguous shards; the longer ones first

A shard is empty where a batch has fewer examples than there are ranks.
"""

import torch


def batches(n, batch, seed=0):
    """Yield the indices of one global batch after another, epoch after epoch, for ever. The same on every rank.

    Args:    n: examples in the training set; batch: examples per step, over all ranks; seed: of the shuffling.
    Yields:  (batch,) int64 tensor of indices in [0, n); the last one of an epoch holds the n mod batch that remain.
    Raises:  ValueError if n or batch is less than 1.
    """
    if n < 1 or batch < 1:
        raise ValueError(f"cannot make batches of {batch} from {n} examples: both must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(n, generator=generator).split(batch)


def shard(indices, rank, size):
    """The part of a global batch that belongs to `rank` of `size`: sizes differ by one at most, the longer ones first.

    Args:    indices: (b,) tensor, the same on every rank.
    Returns: view of it, (ceil(b / size),) at most. The shards of all ranks, one after the other, are `indices`.
    """
    return indices.tensor_split(size)[rank]
