"""Answers to partition of notebook 10 that a check must reject or accept; CI proves both."""

from itertools import combinations

import numpy as np

from hpdl_lab.parallel.pipeline.split import partition


def require_layers(costs, stages):
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be shared by {stages} stages")


def starts(sizes):
    """(first layer, size) of every part."""
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def by_bisection(costs, stages):
    """The smallest of all possible parts with which filling from the left needs no more than `stages` parts."""
    require_layers(costs, stages)
    n = len(costs)
    possible = sorted({sum(costs[i:j]) for i in range(n) for j in range(i + 1, n + 1)})
    return next(sizes for most in possible if (sizes := filled(costs, stages, most)))


def filled(costs, stages, most):
    """Sizes of parts that cost `most` at most, each as full as it can be while others get a layer; None if too many."""
    sizes, layer = [], 0
    for left in reversed(range(stages)):
        size, held = 0, 0
        while layer + size < len(costs) - left and held + costs[layer + size] <= most:
            held += costs[layer + size]
            size += 1
        if size == 0:
            return None
        sizes.append(size)
        layer += size
    return sizes if layer == len(costs) else None


def by_trying_all(costs, stages):
    require_layers(costs, stages)

    def slowest(cuts):
        places = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in zip(places, places[1:], strict=False))

    places = [0, *min(combinations(range(1, len(costs)), stages - 1), key=slowest), len(costs)]
    return [b - a for a, b in zip(places, places[1:], strict=False)]


def as_an_array(costs, stages):
    return np.array(partition(costs, stages))


WRONG = {
    "10.6": """
balance: Equal numbers of layers are not equal work
    require_layers(costs, stages)
    small, extra = divmod(len(costs), stages)
    return [small + (i < extra) for i in range(stages)]
balance: has piled up in the last one
    require_layers(costs, stages)
    sizes, held, layer = [], 0, 0
    for left in range(stages - 1, 0, -1):
        size = 1
        held = costs[layer]
        while layer + size < len(costs) - left and held + costs[layer + size] <= sum(costs) / stages:
            held += costs[layer + size]
            size += 1
        sizes.append(size)
        layer += size
    return [*sizes, len(costs) - layer]
empty: a rank would do nothing
    require_layers(costs, stages)
    sizes, held = [0], 0
    for cost in costs:
        if held >= sum(costs) / stages and len(sizes) < stages:
            sizes.append(0)
            held = 0
        sizes[-1] += 1
        held += cost
    return sizes + [0] * (stages - len(sizes))
balance: and 6 is possible
    require_layers(costs, stages)
    parts = [list(costs)]
    while len(parts) < stages:
        i = max((i for i, part in enumerate(parts) if len(part) > 1), key=lambda i: sum(parts[i]))
        part = parts[i]
        cut = min(range(1, len(part)), key=lambda c: max(sum(part[:c]), sum(part[c:])))
        parts[i : i + 1] = [part[:cut], part[cut:]]
    return [len(part) for part in parts]
form: would be in no stage
    require_layers(costs, stages)
    return [len(costs) // stages] * (stages - 1) + [1]
form: layers in all, and there are 6
    return np.cumsum(partition(costs, stages)).tolist()
form: 2 parts for 3 stages
    sizes = partition(costs, stages)
    return [sizes[0] + sizes[1], *sizes[2:]] if stages > 1 else sizes
form: sizes are a list of whole numbers
    return [list(range(size)) for size in partition(costs, stages)]
input: your function changed costs
    sizes = partition(costs, stages)
    while costs:
        costs.pop()
    return sizes
refusal: 2 layers cannot be shared by 3 stages
    return partition(costs, stages) if stages <= len(costs) else [1] * stages
refusal: say both numbers
    if stages > len(costs):
        raise ValueError("too many stages")
    return partition(costs, stages)
balance: is possible
    require_layers(costs, stages)
    low, high = max(costs), sum(costs)
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if filled(costs, stages, middle) else (middle, high)
    whole = [size for most in (low, high) if (size := filled(costs, stages, most))]
    return whole[0]
timeout: Is there a loop that never ends?
    require_layers(costs, stages)
    most = 0
    while most != max(sum(costs[i : i + size]) for i, size in starts(partition(costs, stages))):
        most += 1
    return partition(costs, stages)
""",
}
RIGHT = {
    "10.6": (by_bisection, by_trying_all, as_an_array),
}
COMPLETED = {
    "10.6": ["sum(costs[j:i])", "i - j"],
}
