"""The roofline with its two roofs: the FLOP/s that a processor reaches at best."""


def attainable(m: int, k: int, n: int, bytes_each: int, peak: float, bandwidth: float) -> tuple[float, str]:
    """Compute the FLOP/s that a matrix product reaches at best, and what bounds it.

        FLOP/s
         peak |          ____________   "compute": arithmetic takes longer
              |        /
              |      /                  "memory": moving bytes takes longer
              |____/_________________
                     FLOPs per byte

    Multiply x (m, k) by weights (k, n). A multiplication and the addition after it are
    two FLOPs. Both operands are read from memory once, and then stay on the chip. The
    result is written to memory once. Bytes move while the processor computes.

    Args:    m: rows of x (in decoding, the batch);
             k, n: rows and columns of the weights;
             bytes_each: bytes of one number, the same in all three matrices;
             peak: FLOP/s of the processor; bandwidth: bytes/s of its memory.
    Returns: (FLOP/s, bound); bound is "compute" or "memory". If both take equally long,
             either is right.
    Ref: Williams, Waterman & Patterson 2009, Roofline, doi:10.1145/1498765.1498785.
    """
    flops = 2 * m * k * n
    nbytes = bytes_each * (m * k + k * n + m * n)
    compute, memory = flops / peak, nbytes / bandwidth
    return flops / max(compute, memory), "compute" if compute > memory else "memory"
