"""Small real tables that come with scikit-learn, read as files: to import scikit-learn itself takes over a second."""

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np


def table(name: str, **options: Any) -> np.ndarray:
    """The numbers of one of scikit-learn's tables, rows by columns, float64.

    Args:    name: a file of sklearn/datasets/data, such as "digits.csv.gz"; options: of numpy.loadtxt.
    Raises:  DataError where scikit-learn does not have it, or not whole.
    """
    try:
        package = find_spec("sklearn")
        if package is None or package.origin is None:
            raise ImportError("no module named sklearn")
        with gzip.open(Path(package.origin).parent / "datasets" / "data" / name, "rt") as file:
            return np.loadtxt(file, **options)
    except (ImportError, OSError, ValueError, EOFError) as problem:
        from .dataset import DataError  # here, because it takes torch along

        raise DataError(
            f"The table {name} comes with scikit-learn, which did not give it: "
            f"{type(problem).__name__}: {problem}. Install it again: pip install --force-reinstall scikit-learn"
        ) from problem
