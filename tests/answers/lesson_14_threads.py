"""Answers to exercise 14.3 that the check must reject or accept; CI proves both."""

import math

import numpy as np


def in_arrays(cores, domain, examples, serial, arithmetic, memory, gradients, bandwidth):
    """All memories in use serve all ranks together; arithmetic takes equally long in each split."""
    ranks = np.array([r for r in range(1, cores + 1) if cores % r == 0])
    moving = np.maximum(memory / np.minimum(ranks, cores / domain) - arithmetic / cores, 0)
    return ranks[np.argmin(examples * (serial / ranks + moving) + 2 * gradients * ranks / bandwidth)]


def by_threads(cores, domain, examples, serial, arithmetic, memory, *link):
    fastest = math.inf, None
    for threads in (t for t in range(1, cores + 1) if not cores % t):
        example = serial + max(arithmetic / threads, memory * math.ceil(domain / threads))
        sent = cores / threads * link[0] * 2 * (cores / threads - 1) / (cores / threads)
        fastest = min(fastest, (examples * threads / cores * example + sent / link[1], cores / threads))
    return fastest[1]


def by_square_root(cores, domain, examples, serial, arithmetic, memory, gradients, bandwidth):
    domains, wanted = cores // domain, math.sqrt(examples * serial * bandwidth / (2 * gradients))
    wanted = max(wanted, min(domains, memory * cores / arithmetic))
    whole = [r for r in range(1, cores + 1) if cores % r == 0 and (r % domains == 0 or domains % r == 0)]
    return min(whole, key=lambda r: abs(math.log(r / wanted)))


WRONG = {
    "14.3": """
ranks: each of two ranks
    return 1
ranks: each of two ranks
    examples / ranks * example => examples * example
all-reduce: takes no time
    2 * (ranks - 1) * gradients / bandwidth => 2 * gradients / bandwidth
all-reduce: All ranks share it
    2 * (ranks - 1) * gradients => 2 * (ranks - 1) / ranks * gradients
all-reduce: in each step of the ring
    2 * (ranks - 1) * gradients => 2 * (ranks - 1) * ranks * gradients
all-reduce: half of a ring
    2 * (ranks - 1) * gradients => (ranks - 1) * gradients
all-reduce: Most of the difference
    2 * (ranks - 1) * gradients => (ranks - 1) * gradients / 4
serial: Who waits
    serial + max => serial / threads + max
memory: Most of the difference
    2 * (ranks - 1) * gradients => 2 * (ranks - 1) * gradients * 8
memory: In how many do
    max(arithmetic / threads, memory * sharing) => arithmetic / threads
memory: Which ranks share one
    memory * sharing => memory
roofs: after the arithmetic
    max(arithmetic / threads, memory * sharing) => arithmetic / threads + memory * sharing
domains: one rank per domain
    return cores // domain
threads: return the number of ranks
    return min( => return cores // min(
divisors: powers of two only
    cores % r == 0 => cores % r == 0 and r & r - 1 == 0
divisors: One rank per core
    range(1, cores + 1) => range(1, cores)
divisors: One rank is a split
    range(1, cores + 1) => range(2, cores + 1)
divisors: you choose 6 ranks
    cores % r == 0 => r
returns: your function returned None
    print(end='')
returns: return the number of ranks
    return (8, cores // 8)
""",
}
RIGHT = {"14.3": (in_arrays, by_threads, by_square_root)}
COMPLETED = {
    "14.3": ["-(-domain // threads)", "2 * (ranks - 1) * gradients"],
}
