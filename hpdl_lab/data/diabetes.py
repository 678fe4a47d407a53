"""Disease progression of 442 patients, predicted from two blood values; comes with scikit-learn (Efron et al. 2004)."""

import numpy as np

from .dataset import sklearn_table

CHOLESTEROL = [4, 5]  # the columns s1 and s2 of ten


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return two blood values per patient, and the progression of the disease.

    The values are total serum cholesterol and low-density lipoproteins.

    Returns: x (442, 2), y (442,): float64, every column with mean 0 and variance 1. The two columns of x are correlated
             (0.9), as blood values are, so that the bowl of the loss is a narrow valley.
    Raises:  DataError if scikit-learn does not have them.
    """
    rows, target = sklearn_table("diabetes_data_raw.csv.gz"), sklearn_table("diabetes_target.csv.gz")
    return _standardized(rows[:, CHOLESTEROL]), _standardized(target)


def _standardized(values: np.ndarray) -> np.ndarray:
    """Return the same values with mean 0 and variance 1 over the first dimension."""
    return (values - np.mean(values, axis=0)) / np.std(values, axis=0)
