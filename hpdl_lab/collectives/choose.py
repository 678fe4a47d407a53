"""Choose an algorithm by what it costs on paper."""


def choose(costs, p, nbytes, alpha, beta):
    """Name the algorithm that takes the least time for this number of ranks, this size, and this network.

        algorithm      steps in a row    bytes in a row
        ring           2(p - 1)          2(p - 1)/p * nbytes      many short steps
        tree           2 log2(p)         2 log2(p) * nbytes       few long steps

    Args:    costs: {name: cost}, where cost(p, nbytes) returns a record with .steps and .nbytes, those of one rank
             from the begin to the end, such as {"ring": ring_cost, "tree": tree_cost}.
             p: ranks; nbytes: bytes per rank; alpha: s per step; beta: s per byte.
    Returns: the name with the least steps * alpha + bytes * beta.
    """
    seconds = {}
    for name, cost in costs.items():
        seconds[name] = cost(p, nbytes).steps * alpha + cost(p, nbytes).nbytes * beta
    return min(seconds, key=seconds.get)
