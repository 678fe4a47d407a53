"""Data that is made, of any size, with a known answer: the best loss that any model can reach on it."""

import math

import torch

from .dataset import Dataset

TEST_SHARE = 5  # the test set has a fifth of the examples of the training set, besides them


def teacher(
    n: int = 4096,
    shape: tuple[int, ...] = (64,),
    classes: int = 10,
    noise: float = 0.1,
    seed: int = 0,
    dtype: str = "float32",
) -> Dataset:
    """Return random examples that a linear teacher sorts into classes, but for a share `noise` with another class.

        y = argmax(W x)     x: (prod(shape),) standard normal numbers, W: (classes, prod(shape)) likewise

    Args:    n: examples in the training set; shape: of one example, such as (3, 32, 32) for images.
    Returns: Dataset of n and ceil(n / 5) examples. round(noise n) of n labels are wrong, evenly among other classes.
    Raises:  ValueError for sizes below 1, fewer than 2 classes, or a noise that is not in [0, 1).
    """
    if n < 1 or classes < 2 or min(shape, default=0) < 1:
        raise ValueError(f"cannot make {n} examples of shape {tuple(shape)} in {classes} classes")
    _check_noise(noise)
    generator = torch.Generator().manual_seed(seed)
    features = math.prod(shape)
    weights = torch.randn(classes, features, generator=generator, dtype=torch.float64)
    sets = []
    for count in (n, -(-n // TEST_SHARE)):
        x = torch.randn(count, features, generator=generator, dtype=torch.float64)
        y = (x @ weights.T).argmax(1)  # (count, features) @ (features, classes) -> (count,)
        wrong = torch.randperm(count, generator=generator)[: round(noise * count)]
        y[wrong] += torch.randint(1, classes, (len(wrong),), generator=generator)
        sets += [x.view(count, *shape).to(getattr(torch, dtype)), y % classes]
    return Dataset(*sets)


def copy(n: int = 4096, length: int = 8, vocabulary: int = 16, seed: int = 0) -> Dataset:
    """Return sequences of `length` random tokens, then the same again: only the second half can be predicted.

        3 7 1 | 3 7 1  ->  x: 3 7 1 3 7     y: 7 1 3 7 1        for length = 3: no one knows 7 and 1, all can know 3 7 1

    Returns: Dataset of n and ceil(n / 5) windows (2 length - 1,) int64 of tokens below `vocabulary`.
    Raises:  ValueError for sizes below 1, or a vocabulary below 2.
    """
    if n < 1 or length < 1 or vocabulary < 2:
        raise ValueError(f"cannot make {n} sequences of {length} tokens out of {vocabulary}")
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for count in (n, -(-n // TEST_SHARE)):
        tokens = torch.randint(vocabulary, (count, length), generator=generator).repeat(1, 2)  # (count, 2 length)
        sets += [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]
    return Dataset(*sets)


def _check_noise(noise: float) -> None:
    """Raise ValueError unless `noise` is a share of examples."""
    if not 0 <= noise < 1:
        raise ValueError(f"noise={noise!r} must be a share of the examples, in [0, 1)")
