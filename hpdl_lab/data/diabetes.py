"""Disease progression of 442 patients, predicted from two blood values; comes with scikit-learn (Efron et al. 2004)."""

import numpy as np

from .dataset import table

CHOLESTEROL = [4, 5]  # the columns s1 and s2 of ten


def load() -> tuple[np.ndarray, np.ndarray]:
    """Two blood values per patient, total serum cholesterol and low-density lipoproteins, and how the disease went on.

    Returns: x (442, 2), y (442,): float64, every column with mean 0 and variance 1. The two columns of x are correlated
             (0.9), as blood values are, so that the bowl of the loss is a narrow valley.
    Raises:  DataError where scikit-learn does not have them.
    """
    rows, target = table("diabetes_data_raw.csv.gz"), table("diabetes_target.csv.gz")
    return standardized(rows[:, CHOLESTEROL]), standardized(target)


def standardized(values: np.ndarray) -> np.ndarray:
    """The same values with mean 0 and variance 1 over the first dimension."""
    return (values - np.mean(values, axis=0)) / np.std(values, axis=0)
