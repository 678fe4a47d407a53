"""Answers to best_grid of notebook 11 that a check must reject or accept; CI proves both."""

import itertools

from . import WrongAnswer

# -- wrong -------------------------------------------------------------------------------------------------------------


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


def forgets_the_limit(ranks, predict, limit):
    return min(priced(ranks, predict), key=lambda f: (f[0].seconds, f[0].nbytes))[1]


def takes_the_smallest(ranks, predict, limit):
    found = priced(ranks, predict)
    fitting = [f for f in found if f[0].nbytes <= limit] or refuse(ranks, limit, found)
    return min(fitting, key=lambda f: f[0].nbytes)[1]


def only_powers_of_two(ranks, predict, limit):
    return fastest_among(ranks, predict, limit, lambda dp, pp, tp: pp & (pp - 1) == 0 and tp & (tp - 1) == 0)


def one_too_few_for_each_axis(ranks, predict, limit):
    """range(1, ranks), where range(1, ranks + 1) would do."""
    return fastest_among(ranks, predict, limit, lambda *grid: ranks == 1 or max(grid) < ranks)


def stumbles_over_the_impossible(ranks, predict, limit):
    grids = [g for g in itertools.product(range(1, ranks + 1), repeat=3) if g[0] * g[1] * g[2] == ranks]
    fitting = [(predict(*g).seconds, g) for g in grids if predict(*g).nbytes <= limit]
    return min(fitting)[1]


def without_pipelines(ranks, predict, limit):
    return fastest_among(ranks, predict, limit, lambda dp, pp, tp: pp == 1)


def tensor_parallel_up_to_8(ranks, predict, limit):
    """As many as a host has GPUs, as one often reads."""
    return fastest_among(ranks, predict, limit, lambda dp, pp, tp: tp <= 8)


def pipelines_up_to_8(ranks, predict, limit):
    return fastest_among(ranks, predict, limit, lambda dp, pp, tp: pp <= 8)


def at_least_two_stages_or_shards(ranks, predict, limit):
    """Never replicas alone, where that is not all there is."""
    return fastest_among(ranks, predict, limit, lambda dp, pp, tp: pp * tp > 1 or ranks < 3)


def leaves_ranks_idle(ranks, predict, limit):
    found = []
    for grid in itertools.product(range(1, ranks + 1), repeat=3):
        if grid[0] * grid[1] * grid[2] <= ranks:
            try:
                found.append((predict(*grid), grid))
            except ValueError:
                continue
    fitting = [f for f in found if f[0].nbytes <= limit] or refuse(ranks, limit, found)
    return min(fitting, key=lambda f: (f[0].seconds, f[0].nbytes))[1]


def in_another_order(ranks, predict, limit):
    return by_divisors(ranks, predict, limit)[::-1]


def must_be_below_the_limit(ranks, predict, limit):
    found = priced(ranks, predict)
    fitting = [f for f in found if f[0].nbytes < limit] or refuse(ranks, limit, found)
    return min(fitting, key=lambda f: (f[0].seconds, f[0].nbytes))[1]


def takes_the_last_of_equals(ranks, predict, limit):
    found = priced(ranks, predict)
    fitting = [f for f in found if f[0].nbytes <= limit] or refuse(ranks, limit, found)
    return min(fitting, key=lambda f: (f[0].seconds, -f[0].nbytes))[1]


def says_nothing_where_none_fits(ranks, predict, limit):
    fitting = [f for f in priced(ranks, predict) if f[0].nbytes <= limit]
    return min(fitting, key=lambda f: (f[0].seconds, f[0].nbytes))[1] if fitting else None


def refuses_with_the_last_one(ranks, predict, limit):
    found = priced(ranks, predict)
    if all(told.nbytes > limit for told, _ in found):
        last = max(found, key=lambda f: f[1][::-1])  # in the order of tp
        raise ValueError(f"nothing fits: {last[0].nbytes} bytes are needed")
    return fastest_among(ranks, predict, limit, lambda *grid: True)


def refuses_with_the_fastest(ranks, predict, limit):
    found = priced(ranks, predict)
    if all(told.nbytes > limit for told, _ in found):
        raise ValueError(f"nothing fits: {min(found)[0].nbytes} bytes are needed")
    return fastest_among(ranks, predict, limit, lambda *grid: True)


def refuses_without_numbers(ranks, predict, limit):
    fitting = [f for f in priced(ranks, predict) if f[0].nbytes <= limit]
    if not fitting:
        raise ValueError("no grid fits")
    return min(fitting, key=lambda f: (f[0].seconds, f[0].nbytes))[1]


def returns_the_time(ranks, predict, limit):
    return min(f[0].seconds for f in priced(ranks, predict) if f[0].nbytes <= limit)


# -- right -------------------------------------------------------------------------------------------------------------


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


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "11.4": (
        WrongAnswer(forgets_the_limit, "limit", "yours does not fit"),
        WrongAnswer(takes_the_smallest, "slow", "Both fit, so the faster one"),
        WrongAnswer(only_powers_of_two, "cover", "tp 4 needs 3,000,000,000 bytes, and fits"),
        WrongAnswer(one_too_few_for_each_axis, "cover", "counts, 9 in all, and you asked about 6"),
        WrongAnswer(stumbles_over_the_impossible, "impossible", "leave that grid out and go on"),
        WrongAnswer(without_pipelines, "cover", "every dp x pp x tp = 12 counts"),
        WrongAnswer(tensor_parallel_up_to_8, "cover", "your longest tp is 8"),
        WrongAnswer(pipelines_up_to_8, "cover", "your longest pp is 8"),
        WrongAnswer(at_least_two_stages_or_shards, "cover", "your longest dp is 3"),
        WrongAnswer(leaves_ranks_idle, "ranks", "all 12 have to have some"),
        WrongAnswer(in_another_order, "order", "The order is (dp, pp, tp)"),
        WrongAnswer(must_be_below_the_limit, "limit", "and the limit itself"),
        WrongAnswer(takes_the_last_of_equals, "ties", "leaves more room"),
        WrongAnswer(says_nothing_where_none_fits, "refuse", "returned None: raise a ValueError"),
        WrongAnswer(refuses_with_the_last_one, "refuse", "say how much the smallest grid needs"),
        WrongAnswer(refuses_with_the_fastest, "refuse", "say how much the smallest grid needs"),
        WrongAnswer(refuses_without_numbers, "refuse", "so that one knows what to buy"),
        WrongAnswer(returns_the_time, "returns", "three ints"),
    ),
}
RIGHT = {
    "11.4": (by_divisors, by_sorting),
}
