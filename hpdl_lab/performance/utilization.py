"""The share of the hardware that a training uses, from what papers state about it."""


def model_flops_utilization(
    parameters: float,
    layers: int,
    width: int,
    sequence: int,
    tokens_per_s: float,
    devices: int,
    peak: float,
    recomputed: float = 0.0,
) -> tuple[float, float]:
    """Compute MFU and HFU, the shares of the peak that training a transformer uses.

    Count multiplications and additions in matrix products, per token. Forward uses each
    parameter once. In each layer, attention also multiplies the token's query by the
    keys of all positions, and the scores by the values of all positions. Masked
    positions count, too. Backward takes two products for each product of forward.

    MFU, model FLOPs utilization, counts forward and backward once. HFU, hardware FLOPs
    utilization, also counts recomputed FLOPs: if activations were not kept, backward
    computes a part of forward again (08).

    Args:    parameters: number of parameters that one token uses;
             layers: number of layers; width: numbers in a query, all heads together;
             sequence: tokens in one sequence;
             tokens_per_s: tokens per second that all devices together train on;
             devices: number of devices; peak: dense FLOP/s of one device;
             recomputed: the share of forward that backward computes again, 0 to 1.
    Returns: (MFU, HFU), two fractions of what all devices could compute.
    Ref: Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B.
    """
    forward = 2 * parameters + 2 * 2 * layers * sequence * width
    share = forward * tokens_per_s / (devices * peak)
    return 3 * share, (3 + recomputed) * share
