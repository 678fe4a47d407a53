"""Handwritten digits: 1,797 real scans of 8 x 8 pixels that come with scikit-learn (UCI, NIST pre-processing)."""

from typing import NamedTuple

import torch

TEST_IMAGES = 360  # a fifth of all, as in most published results on this set


class Digits(NamedTuple):
    """Images as rows of 64 pixels in [0, 1], labels 0 to 9 (int64). The same on every rank."""

    train_x: torch.Tensor  # (1437, 64)
    train_y: torch.Tensor  # (1437,)
    test_x: torch.Tensor  # (360, 64)
    test_y: torch.Tensor  # (360,)


def load(dtype="float32", seed=0):
    """The digits, shuffled once by `seed` and cut into a training and a test set that share no image."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(seed))
    x = torch.from_numpy(bunch.data)[order].to(getattr(torch, dtype)) / 16
    y = torch.from_numpy(bunch.target).long()[order]
    return Digits(x[TEST_IMAGES:], y[TEST_IMAGES:], x[:TEST_IMAGES], y[:TEST_IMAGES])
