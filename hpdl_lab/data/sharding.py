"""Which example goes into which step, on which rank: nothing is lost and nothing repeated.

    epoch of n = 10 examples, shuffled     7 2 9 0 | 4 1 8 3 | 6 5        batches of 4; the last one is shorter
    batch on p = 3 ranks                   7 2 . 9 . 0                    contiguous shards; the longer ones first

A shard is empty where a batch has fewer examples than there are ranks: its rank adds a gradient of zeros. The last
batch of an epoch may be such; training with no other ones is refused, see `check_batch`.
"""

from collections.abc import Iterator

import torch


def batches(n: int, batch: int, seed: int = 0, start: int = 0) -> Iterator[torch.Tensor]:
    """Yield the indices of one global batch after another, epoch after epoch, for ever. The same on every rank.

    What a step gets depends on the seed and the number of the step alone, so that a training can go on at step `start`,
    on whatever number of ranks, as if it had not been interrupted.

    Args:    n: examples in the training set; batch: examples per step, over all ranks; seed: of the shuffling.
             start: how many batches are left out at the beginning.
    Yields:  (batch,) int64 tensor of indices in [0, n); the last one of an epoch holds the n mod batch that remain.
    Raises:  ValueError if n or batch is less than 1, or start less than 0.
    """
    if n < 1 or batch < 1 or start < 0:
        raise ValueError(
            f"cannot make batches of {batch} from {n} examples after step {start}: both must be at least 1, start 0"
        )
    generator = torch.Generator().manual_seed(seed)
    epochs, steps = divmod(start, -(-n // batch))
    for _ in range(epochs):
        torch.randperm(n, generator=generator)  # moves the generator on, as the epoch did
    while True:
        yield from torch.randperm(n, generator=generator).split(batch)[steps:]
        steps = 0


def shard(indices: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The part of a global batch that belongs to `rank` of `size`: sizes differ by one at most, the longer ones first.

    Args:    indices: (b,) tensor, the same on every rank.
    Returns: view of it, (ceil(b / size),) at most. The shards of all ranks, one after the other, are `indices`.
    """
    return indices.tensor_split(size)[rank]


def check_batch(n: int, batch: int, size: int) -> None:
    """Raise ValueError if some of `size` ranks would never see an example: n in the training set, `batch` in a step."""
    if min(n, batch) < size:
        few = f"a batch of {batch}" if batch <= n else f"a training set of {n}"
        raise ValueError(
            f"{few} examples is too small for {size} ranks: some of them would never see an example. "
            f"Take at most {min(n, batch)} ranks, or {'a larger batch' if batch <= n else 'more data'}"
        )
