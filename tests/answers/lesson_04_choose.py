"""Answers to exercise 4.5 that the check must reject or accept; CI proves both."""

import math

from . import WrongAnswer

# -- choose: wrong -----------------------------------------------------------------------------------------------------


def always_the_ring(costs, p, nbytes, alpha, beta):
    return "ring"


def small_is_below_8_KiB(costs, p, nbytes, alpha, beta):
    return "tree" if nbytes < 8192 else "ring"


def fewest_steps(costs, p, nbytes, alpha, beta):
    return min(costs, key=lambda name: costs[name](p, nbytes).steps)


def fewest_bytes(costs, p, nbytes, alpha, beta):
    return min(costs, key=lambda name: costs[name](p, nbytes).nbytes)


def takes_the_slowest(costs, p, nbytes, alpha, beta):
    return max(costs, key=lambda name: costs[name](p, nbytes).seconds(alpha, beta))


def mixes_up_alpha_and_beta(costs, p, nbytes, alpha, beta):
    return min(costs, key=lambda name: costs[name](p, nbytes).seconds(beta, alpha))


def returns_the_time(costs, p, nbytes, alpha, beta):
    return min(cost(p, nbytes).seconds(alpha, beta) for cost in costs.values())


def knows_two_names(costs, p, nbytes, alpha, beta):
    ring, tree = (costs[name](p, nbytes).seconds(alpha, beta) for name in ("ring", "tree"))
    return "ring" if ring < tree else "tree"


def for_four_ranks(costs, p, nbytes, alpha, beta):
    return min(costs, key=lambda name: costs[name](4, nbytes).seconds(alpha, beta))


def chooses_and_forgets(costs, p, nbytes, alpha, beta):
    min(costs, key=lambda name: costs[name](p, nbytes).seconds(alpha, beta))


def returns_the_cost_function(costs, p, nbytes, alpha, beta):
    return min(costs.values(), key=lambda cost: cost(p, nbytes).seconds(alpha, beta))


# -- choose: right -----------------------------------------------------------------------------------------------------


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


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "4.5": (
        WrongAnswer(always_the_ring, "cost", "The steps decide here"),
        WrongAnswer(small_is_below_8_KiB, "cost", "With 2 ranks, 256 bytes and shared memory"),
        WrongAnswer(fewest_steps, "cost", "The bytes decide here"),
        WrongAnswer(fewest_bytes, "cost", "The steps decide here"),
        WrongAnswer(takes_the_slowest, "cost", "4 bytes and shared memory"),
        WrongAnswer(mixes_up_alpha_and_beta, "cost", "you say ring"),
        WrongAnswer(returns_the_time, "returns", "return the name, such as 'ring'"),
        WrongAnswer(knows_two_names, "cost", "recursive_doubling takes"),
        WrongAnswer(for_four_ranks, "cost", "With 2 ranks"),
        WrongAnswer(chooses_and_forgets, "returns", "returned nothing: return a name"),
        WrongAnswer(returns_the_cost_function, "returns", "return the name"),
    ),
}
RIGHT = {
    "4.5": (in_one_line, with_a_loop),
}
