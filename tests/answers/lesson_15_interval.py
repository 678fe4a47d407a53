"""Answers to exercise 15.1 that the check must reject or accept; CI proves both."""

import math

import numpy as np


def by_daly(write_s, rank_mtbf_s, ranks, slowdown=1.0):
    cost, mtbf = slowdown * write_s, rank_mtbf_s / ranks
    x = cost / (2 * mtbf)
    best = np.sqrt(2 * cost * mtbf) * (1 + np.sqrt(x) / 3 + x / 9) - cost
    return np.maximum(best, write_s) if slowdown < 1 else best


def by_the_expected_loss(write_s, rank_mtbf_s, ranks, slowdown=1.0):
    """Minimize, step by step, what writes and failures take of the time."""

    def loss(interval):
        wall = interval + write_s * (slowdown == 1)
        return slowdown * write_s / wall + wall / 2 / (rank_mtbf_s / ranks)

    interval = write_s
    while loss(1.01 * interval) < loss(interval):
        interval *= 1.01
    return interval


def by_a_coarse_search(write_s, rank_mtbf_s, ranks, slowdown=1.0):
    failures = ranks / rank_mtbf_s
    tried = [write_s * 1.25**k for k in range(60)]
    return min(tried, key=lambda s: slowdown * write_s / s + failures * s / 2)


def by_exponential_failures(write_s, rank_mtbf_s, ranks, slowdown=1.0):
    """Maximize the share of a cycle that survives, if failures have no memory."""
    mtbf, stop = rank_mtbf_s / ranks, write_s if slowdown == 1 else 0
    seconds = np.geomspace(write_s, 1000 * write_s, 5000)
    useful = seconds if stop else seconds - slowdown * write_s
    return float(seconds[np.argmax(useful / mtbf / np.expm1((seconds + stop) / mtbf))])


def in_whole_minutes(write_s, rank_mtbf_s, ranks, slowdown=1.0):
    seconds = max(write_s, math.sqrt(2 * write_s * slowdown * rank_mtbf_s / ranks))
    return int(60 * round(seconds / 60))


WRONG = {
    "15.1": """
ranks: the MTBF of one rank
    rank_mtbf_s / ranks => rank_mtbf_s
ranks: Does a larger job fail less often
    rank_mtbf_s / ranks => rank_mtbf_s * ranks
ranks: divided by the ranks twice
    math.sqrt(2 * standstill_s * mtbf_s) => math.sqrt(2 * standstill_s * rank_mtbf_s) / ranks
loss: that lose a whole interval
    2 * standstill_s => standstill_s
loss: a quarter of an interval
    math.sqrt(2 * standstill_s * mtbf_s) => 2 * math.sqrt(standstill_s * mtbf_s)
loss: lose two intervals
    2 * standstill_s * mtbf_s => standstill_s * mtbf_s / 2
root: seconds times seconds
    math.sqrt(2 * standstill_s * mtbf_s) => 2 * standstill_s * mtbf_s
root: in proportion to the MTBF
    math.sqrt(2 * standstill_s * mtbf_s) => math.sqrt(2 * standstill_s) * mtbf_s
root: in proportion to the write time
    math.sqrt(2 * standstill_s * mtbf_s) => write_s * math.sqrt(2 * slowdown * mtbf_s)
mtbf: once per failure
    math.sqrt(2 * standstill_s * mtbf_s) => mtbf_s
write: Your interval is the write time
    return max(best, write_s) => return write_s
slowdown: Does training stop here
    slowdown * write_s => write_s
slowdown: of the speed that is left
    slowdown * write_s => (1 - slowdown) * write_s
slowdown: counts twice
    math.sqrt(2 * standstill_s * mtbf_s) => slowdown * math.sqrt(2 * write_s * mtbf_s)
slowdown: the more often you write
    slowdown * write_s => write_s / slowdown
overlap: when does the first one end
    return max(best, write_s) => return best
period: Why do you add the write
    return max(best, write_s) => return best + write_s
period: Why do you add the write
    return max(best, write_s) => return max(best, write_s) + write_s
period: Why do you subtract the write
    return max(best, write_s) => return max(best - write_s, write_s)
units: Those are minutes
    return max(best, write_s) => return best / 60
units: Those are minutes
    return max(best, write_s) => return max(best, write_s) / 60
units: Those are hours
    return max(best, write_s) => return best / 3600
units: Those are milliseconds
    return max(best, write_s) => return 1000 * max(best, write_s)
rate: checkpoints per second
    return max(best, write_s) => return 1 / best
write: With twice the `write_s`
    slowdown * write_s => slowdown * 300
ranks: With twice the `ranks`
    rank_mtbf_s / ranks => rank_mtbf_s / 16_384
mtbf: With twice the `rank_mtbf_s`
    rank_mtbf_s / ranks => 1e6 / ranks
constant: the same for all 8 jobs
    return max(best, write_s) => return 3600
returns: a number above 0
    return max(best, write_s) => return -best
returns: return a number of seconds
    return max(best, write_s) => return None
returns: return a number of seconds
    return max(best, write_s) => return best if slowdown == 1 else math.inf
short: How much training does one write cost
    2 * standstill_s => 0.2 * standstill_s
long: How much does one failure lose
    max(best, write_s) => max(best, write_s) + 600
""",
}
RIGHT = {
    "15.1": (
        by_daly,
        by_the_expected_loss,
        by_a_coarse_search,
        by_exponential_failures,
        in_whole_minutes,
    )
}
COMPLETED = {
    "15.1": ["rank_mtbf_s / ranks", "2 * cost_s * mtbf_s"],
}
