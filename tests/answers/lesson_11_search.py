"""Answers to best_grid of notebook 11 that a check must reject or accept; CI proves both."""

import itertools


def priced(ranks, predict, among=lambda dp, pp, tp: True):
    """[(prediction, grid)] of every grid that can be."""
    found = []
    for grid in itertools.product(range(1, ranks + 1), repeat=3):
        if grid[0] * grid[1] * grid[2] == ranks and among(*grid):
            try:
                found.append((predict(*grid), grid))
            except ValueError:
                continue
    return found


def refuse(ranks, limit, found):
    raise ValueError(f"no grid of {ranks} ranks fits into {limit:,}: the least is {min(p.nbytes for p, _ in found):,}")


def fastest_among(ranks, predict, limit, among):
    found = priced(ranks, predict, among)
    fitting = [f for f in found if f[0].nbytes <= limit] or refuse(ranks, limit, found)
    return min(fitting, key=lambda f: (f[0].seconds, f[0].nbytes))[1]


def by_divisors(ranks, predict, limit):
    """With loops, keeping the best so far."""
    best = least = None
    for tp in range(1, ranks + 1):
        for pp in range(1, ranks // tp + 1):
            dp, rest = divmod(ranks, tp * pp)
            if rest:
                continue
            try:
                told = predict(dp, pp, tp)
            except ValueError:
                continue
            least = told.nbytes if least is None else min(least, told.nbytes)
            if told.nbytes <= limit and (best is None or (told.seconds, told.nbytes) < best[0]):
                best = (told.seconds, told.nbytes), (dp, pp, tp)
    if best is None:
        raise ValueError(f"{ranks} ranks: nothing fits into {limit} bytes, the smallest takes {least}")
    return best[1]


def by_sorting(ranks, predict, limit):
    found = priced(ranks, predict)
    for told, grid in sorted(found, key=lambda f: (f[0].seconds, f[0].nbytes)):
        if told.nbytes <= limit:
            return list(grid)
    refuse(ranks, limit, found)


WRONG = {
    "11.3": """
limit: yours does not fit
    return min(priced(ranks, predict), key=lambda f: (f[0].seconds, f[0].nbytes))[1]
slow: Both fit, so return the faster one
    found = priced(ranks, predict)
    fitting = [f for f in found if f[0].nbytes <= limit] or refuse(ranks, limit, found)
    return min(fitting, key=lambda f: f[0].nbytes)[1]
cover: tp 4 needs 3,000,000,000 bytes, and fits
    return fastest_among(ranks, predict, limit, lambda dp, pp, tp: pp & (pp - 1) == 0 and tp & (tp - 1) == 0)
cover: counts, 9 in all, and you asked about 6
    return fastest_among(ranks, predict, limit, lambda *grid: ranks == 1 or max(grid) < ranks)
impossible: leave that grid out and go on
    grids = [g for g in itertools.product(range(1, ranks + 1), repeat=3) if g[0] * g[1] * g[2] == ranks]
    fitting = [(predict(*g).seconds, g) for g in grids if predict(*g).nbytes <= limit]
    return min(fitting)[1]
cover: every dp x pp x tp = 12 counts
    return fastest_among(ranks, predict, limit, lambda dp, pp, tp: pp == 1)
cover: your longest tp is 8
    return fastest_among(ranks, predict, limit, lambda dp, pp, tp: tp <= 8)
cover: your longest pp is 8
    return fastest_among(ranks, predict, limit, lambda dp, pp, tp: pp <= 8)
cover: your longest dp is 3
    return fastest_among(ranks, predict, limit, lambda dp, pp, tp: pp * tp > 1 or ranks < 3)
ranks: not for all 12
    found = []
    for grid in itertools.product(range(1, ranks + 1), repeat=3):
        if grid[0] * grid[1] * grid[2] <= ranks:
            try:
                found.append((predict(*grid), grid))
            except ValueError:
                continue
    fitting = [f for f in found if f[0].nbytes <= limit] or refuse(ranks, limit, found)
    return min(fitting, key=lambda f: (f[0].seconds, f[0].nbytes))[1]
order: The order is (dp, pp, tp)
    return by_divisors(ranks, predict, limit)[::-1]
limit: exactly the limit fits
    found = priced(ranks, predict)
    fitting = [f for f in found if f[0].nbytes < limit] or refuse(ranks, limit, found)
    return min(fitting, key=lambda f: (f[0].seconds, f[0].nbytes))[1]
ties: needs less memory
    found = priced(ranks, predict)
    fitting = [f for f in found if f[0].nbytes <= limit] or refuse(ranks, limit, found)
    return min(fitting, key=lambda f: (f[0].seconds, -f[0].nbytes))[1]
refuse: returned None: raise a ValueError
    fitting = [f for f in priced(ranks, predict) if f[0].nbytes <= limit]
    return min(fitting, key=lambda f: (f[0].seconds, f[0].nbytes))[1] if fitting else None
refuse: says how much the smallest grid needs
    found = priced(ranks, predict)
    if all(told.nbytes > limit for told, _ in found):
        last = max(found, key=lambda f: f[1][::-1])  # in the order of tp
        raise ValueError(f"nothing fits: {last[0].nbytes} bytes are needed")
    return fastest_among(ranks, predict, limit, lambda *grid: True)
refuse: says how much the smallest grid needs
    found = priced(ranks, predict)
    if all(told.nbytes > limit for told, _ in found):
        raise ValueError(f"nothing fits: {min(found)[0].nbytes} bytes are needed")
    return fastest_among(ranks, predict, limit, lambda *grid: True)
refuse: so that one knows what to buy
    fitting = [f for f in priced(ranks, predict) if f[0].nbytes <= limit]
    if not fitting:
        raise ValueError("no grid fits")
    return min(fitting, key=lambda f: (f[0].seconds, f[0].nbytes))[1]
returns: three ints
    return min(f[0].seconds for f in priced(ranks, predict) if f[0].nbytes <= limit)
""",
}
RIGHT = {
    "11.3": (by_divisors, by_sorting),
}
COMPLETED = {
    "11.3": [
        "if found.nbytes <= limit and (best is None or (found.seconds, found.nbytes) < best[:2]):\n"
        "    best = found.seconds, found.nbytes, (dp, pp, tp)",
        'f"no grid of {ranks} ranks fits into {limit:,} bytes per rank: the least is {least:,}"',
    ],
}
