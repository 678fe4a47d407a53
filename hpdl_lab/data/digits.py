"""Handwritten digits: 1,797 real scans of 8 x 8 pixels that come with scikit-learn (UCI, NIST pre-processing)."""

import torch

from .dataset import DataError, Dataset

TEST_IMAGES = 360  # a fifth of all, as in most published results on this set


def load(dtype="float32", seed=0, images=False):
    """The digits, shuffled once by `seed` and cut into a training and a test set that share no image.

    Args:    images: False for rows of 64 pixels in [0, 1], True for images (n, 1, 8, 8).
    Returns: Dataset with 1,437 and 360 images, and labels 0 to 9.
    Raises:  DataError where scikit-learn does not have them.
    """
    try:
        from sklearn.datasets import load_digits

        bunch = load_digits()
    except (ImportError, OSError, ValueError, EOFError) as problem:
        raise DataError(
            "The handwritten digits come with scikit-learn, which did not give them: "
            f"{type(problem).__name__}: {problem}. Install it again: pip install --force-reinstall scikit-learn"
        ) from problem
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(seed))
    x = torch.from_numpy(bunch.data)[order].to(getattr(torch, dtype)) / 16
    y = torch.from_numpy(bunch.target).long()[order]
    if images:
        x = x.view(-1, 1, 8, 8)
    return Dataset(x[TEST_IMAGES:], y[TEST_IMAGES:], x[:TEST_IMAGES], y[:TEST_IMAGES])
