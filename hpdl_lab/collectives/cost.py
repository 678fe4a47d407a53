"""What a collective costs on paper: steps, bytes and seconds, as functions of p ranks and n bytes per rank.

alpha: s per message; beta: s per byte sent; gamma: s per byte reduced. A test holds these numbers equal to what a
traced run of the collective of the same name did.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """steps: messages in sequence; nbytes: bytes sent by each rank; nbytes_reduced: bytes added by each rank."""

    steps: int
    nbytes: float
    nbytes_reduced: float = 0.0

    def seconds(self, alpha, beta, gamma=0.0):
        return self.steps * alpha + self.nbytes * beta + self.nbytes_reduced * gamma


def all_reduce_naive(p, n):
    """Whole vectors around the ring."""
    return Cost(p - 1, (p - 1) * n, (p - 1) * n)


def reduce_scatter(p, n):
    """Ring."""
    return Cost(p - 1, (p - 1) / p * n, (p - 1) / p * n)


def all_gather(p, n):
    """Ring; n is the size of the gathered vector."""
    return Cost(p - 1, (p - 1) / p * n)


def all_reduce(p, n):
    """Ring: reduce-scatter, then all-gather."""
    return Cost(2 * (p - 1), 2 * (p - 1) / p * n, (p - 1) / p * n)


def busbw_factor(collective, p):
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it: comparable with the speed of a link for any
    p.
    """
    factors = {
        "all_reduce": 2 * (p - 1) / p,
        "reduce_scatter": (p - 1) / p,
        "all_gather": (p - 1) / p,
        "all_to_all": (p - 1) / p,
        "broadcast": 1.0,
        "reduce": 1.0,
    }
    return factors[collective]


def fit_alpha_beta(sizes, seconds):
    """Fit seconds = alpha + beta * size to one-way message times, by least squares on relative errors.

    Relative errors, because small messages would not count otherwise.

    Args:    sizes: bytes; seconds: the same number of times, all > 0; at least two different sizes.
    Returns: (alpha s, beta s/byte), both at least 0.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ValueError(
            f"a line needs two different sizes and a time for each: got {len(sizes)} sizes, {len(seconds)} times"
        )
    weights = [1 / t**2 for t in seconds]
    total = sum(weights)
    mean_n = sum(w * n for w, n in zip(weights, sizes, strict=True)) / total
    mean_t = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, n in zip(weights, sizes, strict=True))
    slope = sum(w * (n - mean_n) * (t - mean_t) for w, n, t in zip(weights, sizes, seconds, strict=True)) / spread
    beta = max(slope, 0.0)
    return max(mean_t - beta * mean_n, 0.0), beta
