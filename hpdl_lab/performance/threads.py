"""The numbers of ranks and of their threads that train fastest on the cores of one node."""

import torch

from .. import models
from ..comm.base import Comm
from ..comm.sim.torch_state import one_thread
from ..measure import measure


def split_cores(
    cores: int,
    domain: int,
    examples: int,
    serial: float,
    arithmetic: float,
    memory: float,
    gradients: float,
    bandwidth: float,
) -> int:
    """Choose how many ranks a node runs; each of them has cores / ranks threads.

        1 rank x 4 threads            2 ranks x 2 threads
        thread 0  s#s#s#s#            rank 0, thread 0  s##s##A    s serial part
        thread 1  .#.#.#.#            rank 0, thread 1  .##.##.    # divided part
        thread 2  .#.#.#.#            rank 1, thread 0  s##s##A    A all-reduce
        thread 3  .#.#.#.#            rank 1, thread 1  .##.##.    . waits

    The ranks divide the examples equally. For each example of its share, one thread of
    a rank does the serial part alone. Then all threads of the rank share the arithmetic.
    At the same time, memory moves bytes. The example ends when arithmetic and memory
    are both done. A ring all-reduce of the gradients ends the step (04). All ranks send
    at once, and share `bandwidth`.

    Cores come in domains, each with its own memory. Rank 0 has the first cores, rank 1
    the next ones, and so on. All data of a rank lie in the domain of its first core,
    even if its threads use cores of other domains. Ranks with data in the same domain
    share its memory equally. The step waits for the slowest rank.

    Args:    cores: cores of the node; domain: cores of a domain, a divisor of cores;
             examples: examples of a step, all ranks together, a multiple of cores;
             serial: seconds of the serial part of one example;
             arithmetic: seconds of an example's arithmetic on one core;
             memory: seconds in which one domain's memory moves an example's bytes;
             gradients: bytes of all gradients;
             bandwidth: bytes/s that all ranks together send.
    Returns: the number of ranks, a divisor of cores, with the shortest step.
    """

    def seconds(ranks: int) -> float:
        threads = cores // ranks
        sharing = -(-domain // threads)
        example = serial + max(arithmetic / threads, memory * sharing)
        return examples / ranks * example + 2 * (ranks - 1) * gradients / bandwidth

    return min((r for r in range(1, cores + 1) if cores % r == 0), key=seconds)


def measure_step(comm: Comm, threads: int) -> tuple[float, float]:
    """Measure (seconds of forward and backward, seconds of the all-reduce) of a small GPT, 64 examples in a step."""
    model, tokens = models.build("gpt"), torch.zeros(64 // comm.size, 64, dtype=torch.long)
    gradients = torch.cat([torch.zeros(p.numel()) for p in model.parameters()])
    with one_thread(torch):  # afterwards torch has as many threads as before
        torch.set_num_threads(threads)
        computing = measure(lambda: model(tokens).sum().backward(), warmup=3, repeats=5, barrier=comm.barrier)
        exchange = measure(lambda: comm.all_reduce(gradients), warmup=3, repeats=5, barrier=comm.barrier)
    return computing.median, exchange.median


def two_cores(one: float, two: float, exchange: float) -> tuple[int, int, int, float, float, float, float, float]:
    """Return arguments of split_cores from seconds of forward and backward with one and two threads of one rank."""
    arithmetic = min(max(2 * (one - two), 1e-9), one) / 64  # two threads may be slower than one
    return 2, 2, 64, one / 64 - arithmetic, arithmetic, 0.0, exchange, 2.0  # an all-reduce of `exchange` s
