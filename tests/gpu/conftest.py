"""Tests that need a GPU: each is skipped with the reason where something is missing. Run by `make test-gpu`."""

import pytest

from hpdl_lab.features import Missing, gpu


@pytest.fixture(scope="session", autouse=True)
def a_gpu():
    """The first GPU, as torch names it."""
    if reason := gpu.why_no_gpu():
        pytest.skip(reason)
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} finds no GPU")
    return "cuda:0"


@pytest.fixture(scope="session")
def cuda():
    """The compiled module."""
    try:
        return gpu.cuda_module()
    except Missing as error:
        pytest.skip(str(error))
