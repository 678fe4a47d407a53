"""What every data set is: four tensors, the same on every rank."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DataError(RuntimeError):
    """A data set that is not there or is damaged: one sentence that says what to do."""


class Dataset(NamedTuple):
    """Examples and what is to be said about them; the training and the test set share none.

    Rows (n, features) or images (n, c, h, w) of floats have one answer each, y (n,) int64; windows of tokens (n, block)
    int64 have one at every position, y (n, block) int64: the token that follows.
    """

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor

    def __deepcopy__(self, memo: dict) -> Dataset:
        """The same: ranks only read it, so a thousand simulated ones share it."""
        return self

    @property
    def classes(self) -> int:
        """How many different answers there are: labels are 0 to classes - 1."""
        return 1 + max(int(y.max()) for y in (self.train_y, self.test_y) if y.numel())

    @property
    def positions(self) -> int:
        """Answers per example: 1, or block for windows of tokens."""
        return self.train_y.shape[1:].numel()
