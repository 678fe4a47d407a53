"""Handwritten digits: 1,797 real scans of 8 x 8 pixels that come with scikit-learn (UCI, NIST pre-processing)."""

import torch

from .dataset import Dataset
from .scikit_learn import table

TEST_IMAGES = 360  # a fifth of all, as in most published results on this set


def load(dtype: str = "float32", seed: int = 0, images: bool = False) -> Dataset:
    """The digits, shuffled once by `seed` and cut into a training and a test set that share no image.

    Args:    images: False for rows of 64 pixels in [0, 1], True for images (n, 1, 8, 8).
    Returns: Dataset with 1,437 and 360 images, and labels 0 to 9.
    Raises:  DataError where scikit-learn does not have them.
    """
    rows = table("digits.csv.gz", delimiter=",")  # 64 pixels from 0 to 16, and which digit they show
    pixels, digit = torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, -1]).long()
    order = torch.randperm(len(digit), generator=torch.Generator().manual_seed(seed))
    x = pixels[order].to(getattr(torch, dtype)) / 16
    y = digit[order]
    if images:
        x = x.view(-1, 1, 8, 8)
    return Dataset(x[TEST_IMAGES:], y[TEST_IMAGES:], x[:TEST_IMAGES], y[:TEST_IMAGES])
