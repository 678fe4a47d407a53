"""Answers to exercise 4.5 that the check must reject or accept; CI proves both."""

import math


def in_one_line(costs, p, nbytes, alpha, beta):
    return min(costs, key=lambda name: costs[name](p, nbytes).seconds(alpha, beta))


def with_a_loop(costs, p, nbytes, alpha, beta):
    best, least = None, math.inf
    for name in costs:
        cost = costs[name](p, nbytes)
        seconds = cost.steps * alpha + cost.nbytes * beta
        if seconds <= least:
            best, least = name, seconds
    return best


WRONG = {
    "4.5": """
cost @in_one_line: The steps decide here
    min(costs, key=lambda name: costs[name](p, nbytes).seconds(alpha, beta)) => 'ring'
cost @in_one_line: With 2 ranks, 256 bytes and shared memory
    min(costs, key=lambda name: costs[name](p, nbytes).seconds(alpha, beta)) => 'tree' if nbytes < 8192 else 'ring'
cost: The bytes decide here
    return min(costs, key=lambda name: costs[name](p, nbytes).steps)
cost: The steps decide here
    return min(costs, key=lambda name: costs[name](p, nbytes).nbytes)
cost @in_one_line: 4 bytes and shared memory
    min => max
cost @in_one_line: you say ring
    (alpha, beta) => (beta, alpha)
returns: return the name, such as 'ring'
    return min(cost(p, nbytes).seconds(alpha, beta) for cost in costs.values())
cost: recursive_doubling takes
    ring, tree = (costs[name](p, nbytes).seconds(alpha, beta) for name in ("ring", "tree"))
    return "ring" if ring < tree else "tree"
cost @in_one_line: With 2 ranks
    [name](p, nbytes) => [name](4, nbytes)
returns @in_one_line: returned nothing: return a name
    return min => min
returns: return the name
    return min(costs.values(), key=lambda cost: cost(p, nbytes).seconds(alpha, beta))
""",
}
RIGHT = {
    "4.5": (in_one_line, with_a_loop),
}
COMPLETED = {
    "4.5": ["seconds.get"],
}
