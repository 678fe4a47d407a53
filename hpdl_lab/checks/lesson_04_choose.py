"""Notebook 04, choose by size: the algorithm with the least cost on paper."""

from ..collectives import choose as reference
from ..collectives import cost
from ..trace import seconds_text
from .ranks import capital, simulate
from .record import Broken, Exercise, Passed

NETWORKS = {  # name: (alpha s, beta s/byte)
    "shared memory": (1e-6, 1e-10),
    "InfiniBand": (2e-6, 2.5e-11),
    "1 Gbit/s Ethernet": (5e-5, 8e-9),
    "a long line": (1e-2, 8e-10),
}
RANKS = (4, 2, 3, 8, 13, 64, 1024)
SIZES = tuple(4**k for k in range(1, 15))  # bytes, 4 B to 256 MiB
TIE = 0.01  # relative: closer than that, either is right; the model is not better than that


SETS = (
    {"ring": cost.all_reduce, "tree": cost.tree},
    {"recursive_doubling": cost.recursive_doubling, "tree": cost.tree, "ring": cost.all_reduce},
    {"tree": cost.tree},
)


def check_choose(fn, runner=None):
    cases = [(p, n, where) for where in NETWORKS for p in RANKS for n in SIZES]
    for costs in SETS:
        algorithms = f"with {' and '.join(costs)} to choose from"
        (names,) = simulate(
            1, lambda comm, c: [fn(c, p, n, *NETWORKS[w]) for p, n, w in cases], costs, where=algorithms
        )
        for name, case in zip(names, cases, strict=True):
            check_name(name, costs, *case)
    small, large = SIZES[0], SIZES[-1]
    turns = [at_which_size(fn, p) for p in (4, 64)]
    return Passed(
        (
            f"the least cost in {len(SETS) * len(cases):,} cases: {len(NETWORKS)} networks, {min(RANKS)} to "
            f"{max(RANKS):,} ranks, {small} bytes to {large // 2**20} MiB",
            f"on 1 Gbit/s Ethernet the tree is best for 4 ranks up to {turns[0]:,} bytes, for 64 up to {turns[1]:,}",
        )
    )


def at_which_size(fn, p):
    """The largest power of 2, in bytes, for which the answer still names the tree on 1 Gbit/s Ethernet."""
    sizes = [2**k for k in range(2, 28)]
    return max(n for n in sizes if fn(dict(SETS[0]), p, n, *NETWORKS["1 Gbit/s Ethernet"]) == "tree")


def check_name(name, costs, p, nbytes, where):
    """Raise Broken unless `name` costs the least of `costs`, or as much."""
    alpha, beta = NETWORKS[where]
    case = f"with {p:,} ranks, {nbytes:,} bytes and {where} (alpha {alpha:g} s, beta {beta:g} s/byte)"
    if name is None:
        raise Broken("returns", f"{capital(case)} your function returned nothing: return a name.")
    if not isinstance(name, str):
        message = f"{capital(case)} your function returned {name!r}: return the name, such as 'ring'."
        raise Broken("returns", message)
    if name not in costs:
        known = ", ".join(map(repr, costs))
        raise Broken("name", f"{capital(case)} you say {name!r}, but costs has only {known}: choose out of costs.")
    seconds = {other: price(p, nbytes).seconds(alpha, beta) for other, price in costs.items()}
    best = min(seconds, key=seconds.get)
    if seconds[name] > seconds[best] * (1 + TIE):
        taken, least = costs[name](p, nbytes), costs[best](p, nbytes)
        message = (
            f"{capital(case)} you say {name}, which takes {seconds_text(seconds[name])}: {taken.steps} steps and "
            f"{taken.nbytes:,.0f} bytes. {best} takes {seconds_text(seconds[best])}: {least.steps} steps and "
            f"{least.nbytes:,.0f} bytes."
        )
        steps, moved = (taken.steps - least.steps) * alpha, (taken.nbytes - least.nbytes) * beta
        why = (
            "The steps decide here: each costs an alpha, however short." if steps > moved else "The bytes decide here."
        )
        raise Broken("cost", f"{message} {why}")


LAST_HINT = (
    "seconds = {name: cost(p, nbytes).steps * alpha + cost(p, nbytes).nbytes * beta\n"
    "           for name, cost in costs.items()}\n"
    "return min(seconds, key=...)"
)

EXERCISES = (
    Exercise(
        id="4.5",
        title="choose by size",
        reference=reference.choose,
        stars=2,
        check=check_choose,
        parallel=False,
        explanation=(
            "Where alpha decides, few steps win; where beta decides, few bytes; and the border moves with p and with "
            "the network. That is why every library carries a table of sizes, and why a good one fills it by measuring "
            "on the machine on which it runs: lab.tune does that."
        ),
    ),
)
