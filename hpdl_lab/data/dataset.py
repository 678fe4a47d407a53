"""The form of every data set, four tensors, the same on every rank; and the smallest one, handwritten digits."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch


class DataError(RuntimeError):
    """A data set that is not there or is damaged: one sentence that says what to do."""


class Dataset(NamedTuple):
    """Examples and their answers; the training and the test set share none.

    Rows (n, features) or images (n, c, h, w) of floats have one answer each, y (n,) int64; windows of tokens (n, block)
    int64 have one at every position, y (n, block) int64: the token that follows.
    """

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor

    def __deepcopy__(self, memo: dict[int, object]) -> Dataset:
        """Return the same: ranks only read it, so a thousand simulated ones share it."""
        return self

    @property
    def classes(self) -> int:
        """Number of different answers: labels are 0 to classes - 1."""
        return 1 + max(int(y.max()) for y in (self.train_y, self.test_y) if y.numel())

    @property
    def positions(self) -> int:
        """Answers per example: 1, or block for windows of tokens."""
        return self.train_y.shape[1:].numel()


def sklearn_table(name: str, delimiter: str | None = None) -> np.ndarray:
    """Return the numbers of one of scikit-learn's tables, rows by columns, float64.

    Args:    name: a file of sklearn/datasets/data, such as "digits.csv.gz"; delimiter: None: spaces.
    Raises:  DataError if scikit-learn does not have it, or not whole.
    """
    try:
        package = find_spec("sklearn")
        if package is None or package.origin is None:
            raise ImportError("no module named sklearn")
        with gzip.open(Path(package.origin).parent / "datasets" / "data" / name, "rt") as file:
            return np.loadtxt(file, delimiter=delimiter)
    except (ImportError, OSError, ValueError, EOFError) as problem:
        raise DataError(
            f"The table {name} comes with scikit-learn, which did not give it: "
            f"{type(problem).__name__}: {problem}. Install it again: pip install --force-reinstall scikit-learn"
        ) from problem


TEST_IMAGES = 360  # a fifth of all, as in most published results on this set


def digits(dtype: str = "float32", seed: int = 0, images: bool = False) -> Dataset:
    """Return the digits, shuffled once by `seed` and cut into a training and a test set that share no image.

    Args:    images: False for rows of 64 pixels in [0, 1], True for images (n, 1, 8, 8).
    Returns: Dataset with 1,437 and 360 images, and labels 0 to 9.
    Raises:  DataError if scikit-learn does not have them.
    """
    rows = sklearn_table("digits.csv.gz", delimiter=",")  # 64 pixels from 0 to 16, and the digit that they show
    pixels, digit = torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, -1]).long()
    order = torch.randperm(len(digit), generator=torch.Generator().manual_seed(seed))
    x = pixels[order].to(getattr(torch, dtype)) / 16
    y = digit[order]
    if images:
        x = x.view(-1, 1, 8, 8)
    return Dataset(x[TEST_IMAGES:], y[TEST_IMAGES:], x[:TEST_IMAGES], y[:TEST_IMAGES])
