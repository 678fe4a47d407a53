"""The multi-layer perceptron: the smallest network that reads handwriting."""

import torch
from torch import nn


def mlp(sizes=(64, 128, 64, 10), seed=0, dtype="float32"):
    """Linear layers with ReLU between them; the same parameters wherever it is built with the same seed.

        x (b, 64) -> linear, relu (b, 128) -> linear, relu (b, 64) -> linear (b, 10) = logits

    Args:    sizes: features in, of each hidden layer, and out; seed, dtype: of the initial parameters.
    Returns: nn.Sequential with sum of (in + 1) * out parameters: 17,226 for (64, 128, 64, 10).
    """
    if len(sizes) < 2:
        raise ValueError(f"a network needs at least an input and an output size, got {tuple(sizes)}")
    layers = []
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random numbers as they were
        torch.manual_seed(seed)
        for n_in, n_out in zip(sizes, sizes[1:], strict=False):
            # Drawn in float64 and then rounded, so that every dtype starts from the same network.
            layers += [nn.Linear(n_in, n_out, dtype=torch.float64), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(getattr(torch, dtype))
