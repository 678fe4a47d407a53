"""Which algorithm of the table a function is like: by its virtual time, which messages and their order decide."""

from functools import partial

import torch

from ..comm import sim
from ..comm.network import Switch
from ..predict.messages import evaluate
from .selector import NATIVE, Selection
from .table import ALGORITHMS, find

PROBES = ((5, 1001), (8, 4096))  # ranks, elements: chunks that differ, and chunks that are equal
SAME = 1e-3  # chunks that differ by an element
NETWORK = Switch(alpha=3e-6, beta=1e-9)


def lookalike(all_reduce):
    """algorithm(nbytes), which gives the Algorithm whose schedule stands for `all_reduce`; None where none does.

    A function of the table stands for itself, a Selection for those that it selects. Any other function is run on a few
    simulated ranks: where it takes as long as an algorithm of the table, to a thousandth, that one stands for it.
    """
    if isinstance(all_reduce, Selection):
        names = {part.name: "ring" if part.name == NATIVE else part.name for part in all_reduce.ranges}
        return lambda nbytes: find(names[all_reduce.name_for(nbytes)])
    every = [algorithm for algorithm in ALGORITHMS if algorithm.collective == "all_reduce"]
    function, options = all_reduce, {}
    if isinstance(all_reduce, partial) and not all_reduce.args:
        function, options = all_reduce.func, all_reduce.keywords
    found = [with_options(algorithm, options) for algorithm in every if algorithm.function is function]
    if not found:
        times = [sim.run(p, all_reduce, torch.zeros(n), network=NETWORK, trace=False).seconds for p, n in PROBES]
        found = [algorithm for algorithm in every if alike(times, [schedule_time(algorithm, *at) for at in PROBES])]
    return (lambda nbytes: found[0]) if found else None


def with_options(algorithm, options):
    """The Algorithm with these options, such as servers=2, which all that it has takes by keyword."""
    return algorithm._replace(steps=partial(algorithm.steps, **options), cost=partial(algorithm.cost, **options))


def alike(times, others):
    return all(abs(a - b) <= SAME * b for a, b in zip(times, others, strict=True))


def schedule_time(algorithm, p, n, network=NETWORK):
    """Virtual s of an all-reduce of n float32 elements among p ranks."""
    return evaluate(algorithm.steps(p, n), p, 4, network).seconds
