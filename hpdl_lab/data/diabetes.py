"""Disease progression of 442 patients, predicted from two blood values; comes with scikit-learn (Efron et al. 2004)."""

import numpy as np


def load():
    """Two blood values per patient, total serum cholesterol and low-density lipoproteins, and how the disease went on.

    Returns: x (442, 2), y (442,): float64, every column with mean 0 and variance 1. The two columns of x are correlated
             (0.9), as blood values are, so that the bowl of the loss is a narrow valley.
    """
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
    columns = [bunch.feature_names.index(name) for name in ("s1", "s2")]
    x, y = bunch.data[:, columns], bunch.target
    return standardized(x), standardized(y)


def standardized(values):
    """The same values with mean 0 and variance 1 over the first dimension."""
    return (values - np.mean(values, axis=0)) / np.std(values, axis=0)
