"""Notebook 14: how many ranks train fastest, judged by the step of each choice on nodes that the text does not show."""

import math

from ...performance.threads import split_cores
from ...trace import seconds_text
from ...units import counted
from ..ranks import alone, numbers_of
from ..record import Answer, Broken, Exercise, Passed, Reason

PASSES = 0.05  # regret: how much longer a step takes than with the best split, as a share
Node = tuple[int, int, int, float, float, float, float, float]  # the arguments of split_cores, in its order
NODES: dict[str, Node] = {  # cores and domains of real processors; the other numbers are made up
    "a laptop": (4, 4, 64, 2e-3, 15e-3, 2e-3, 5e6, 4e9),
    "a small board": (4, 4, 32, 1e-3, 40e-3, 10e-3, 100e6, 1e9),
    "A64FX": (48, 12, 384, 2e-3, 40e-3, 1e-3, 20e6, 20e9),
    "two Xeon Platinum 8280": (56, 28, 448, 4e-3, 100e-3, 4e-3, 100e6, 10e9),
    "two EPYC 7551": (64, 8, 512, 0.2e-3, 20e-3, 4e-3, 100e6, 20e9),
    "two EPYC 7551, a larger model": (64, 8, 512, 0.02e-3, 40e-3, 0.6e-3, 200e6, 20e9),
    "EPYC 9554": (64, 16, 1024, 0.05e-3, 20e-3, 1e-3, 400e6, 40e9),
    "Xeon Phi 7250": (68, 68, 1088, 0.4e-3, 12e-3, 0.1e-3, 25e6, 5e9),
    "Grace": (72, 72, 576, 1.3e-3, 20e-3, 0.2e-3, 60e6, 50e9),
    "EPYC 9654": (96, 24, 960, 0.02e-3, 2e-3, 0.5e-3, 20e6, 50e9),
    "two Grace": (144, 72, 1152, 0.02e-3, 20e-3, 0.1e-3, 400e6, 40e9),
}


def _parts(node: Node, ranks: int) -> tuple[float, float, float, float]:
    """Return the seconds of the serial part, of arithmetic, of memory and of the all-reduce on the slowest rank."""
    cores, domain, examples, serial, arithmetic, memory, gradients, bandwidth = node
    sharing, exchange = math.ceil(domain * ranks / cores), 2 * (ranks - 1) * gradients / bandwidth
    return examples / ranks * serial, examples / cores * arithmetic, examples / ranks * memory * sharing, exchange


def _steps(node: Node) -> dict[int, float]:
    """Return {ranks: seconds of a step} for each split."""
    return {r: s + max(a, m) + x for r in range(1, node[0] + 1) if node[0] % r == 0 for s, a, m, x in [_parts(node, r)]}


def _check_split_cores(fn: Answer) -> Passed:
    where = {name: f"On {name} ({', '.join(f'{value:g}' for value in node)})" for name, node in NODES.items()}
    chosen = {name: _choice(fn, node, where[name]) for name, node in NODES.items()}
    regrets = {name: _steps(node)[chosen[name]] / min(_steps(node).values()) - 1 for name, node in NODES.items()}
    name = max(regrets, key=lambda name: regrets[name])
    if regrets[name] > PASSES:
        node, took = NODES[name], _steps(NODES[name])
        pair = chosen[name], min(took, key=lambda ranks: took[ranks])
        failed, _, why = _reason_of([*chosen.values()], node, *pair).partition(": ")
        yours, best = (f"{counted(r, 'rank')} x {counted(node[0] // r, 'thread')}, {took[r]:.3g} s" for r in pair)
        raise Broken(f"""{failed}: {where[name]}, you choose {yours} per step. The best split is {best}. Your regret is
            {regrets[name]:.0%}, and at most {PASSES:.0%} passes. {why}""")
    found = f"regret: on {len(NODES)} nodes, a step takes at most {regrets[name]:.1%} longer than with the best split"
    return Passed(f"{found}; numbers of ranks: {', '.join(map(str, sorted(set(chosen.values()))))}")


def _choice(fn: Answer, node: Node, where: str) -> int:
    (ranks,) = numbers_of(alone(fn, *node, where=where), 1, where, "the number of ranks")
    if ranks not in _steps(node):
        raise Broken(f"divisors: {where}, you choose {ranks:.6g} ranks, and {node[0]} is no multiple of that.")
    return int(ranks)


def _reason_of(chosen: list[int], node: Node, yours: int, best: int) -> Reason:
    """Return the mistake that explains the choices on all nodes, or else the part that costs most on this one."""
    seen = [({r: _mistaken(n, r) for r in _steps(n)}, r) for n, r in zip(NODES.values(), chosen, strict=True)]
    for i, (_, why) in enumerate(_mistaken(node, yours)):
        if all(math.isclose(rows[r][i][0], min(row[i][0] for row in rows.values())) for rows, r in seen):
            return why
    (s, a, m, x), (s0, a0, m0, x0) = _parts(node, yours), _parts(node, best)
    lost, part = max((s - s0, "serial part"), (max(a, m) - max(a0, m0), "memory"), (x - x0, "all-reduce"))
    return f"{part.split()[0]}: Most of the difference is in the {part}: {seconds_text(lost)}."


def _mistaken(node: Node, r: int) -> list[tuple[float, Reason]]:
    """Return (what a mistake minimizes, why it is wrong) of r ranks, for each mistake."""
    (cores, domain, examples, _, _, memory, *_), (s, a, m, x), right = node, _parts(node, r), _steps(node)
    return [
        (r, "ranks: You always choose one rank. Which examples would each of two ranks compute?"),
        (s + max(a, m), "all-reduce: You assume that the all-reduce takes no time. What do all ranks send?"),
        (abs(r * domain - cores) + 1, "domains: You always choose one rank per domain. What would more ranks change?"),
        (right[cores // r], "threads: Those are the threads of a rank: return the number of ranks."),
        (max(a, m) + x, "serial: You assume that the serial part takes equally long in all splits. Who waits?"),
        (s + max(a, m) + x / r, "all-reduce: You assume that each rank has `bandwidth`. All ranks share it."),
        (s + max(a, m) + x * r, "all-reduce: You assume that ranks send all gradients in each step of the ring."),
        (s + max(a, m) + x / 2, "all-reduce: You count the first half of a ring all-reduce. What comes after it (04)?"),
        (s + a + x, "memory: You assume that all domains of a rank have its data. In how many do the data lie?"),
        (s + max(a, memory * examples / r) + x, "memory: You assume a memory for each rank. Which ranks share one?"),
        (s + m + x, "roofs: You assume that memory moves bytes after the arithmetic, not during it."),
        (math.inf if r & (r - 1) else right[r], "divisors: You try powers of two only. What else divides 72?"),
        (math.inf if r == cores else right[r], "divisors: One rank per core is a split, too."),
        (math.inf if r == 1 else right[r], "divisors: One rank is a split, too."),
    ]


EXERCISES = (Exercise("14.3", "how many ranks, how many threads", split_cores, 2, _check_split_cores),)
