"""Notebook 11, the search: the fastest grid whose fullest rank has room for what it holds."""

import math
import random
from typing import NamedTuple

from ..parallel.grid import search as reference
from .ranks import capital, count, describe_error, tried
from .record import Broken, Exercise, Passed

MODEL = "a made-up model of 12 layers and 12 heads"
RANKS = (12, 8, 1, 6, 16)
RANDOM = 12  # more price lists, in which nothing can be guessed
AXES = ("dp", "pp", "tp")


class Price(NamedTuple):
    seconds: float  # of a step
    nbytes: int  # of the fullest rank


class Prices:
    """predict(dp, pp, tp), which also notes what it was asked. table: {grid: Price}, of grids that can be."""

    def __init__(self, ranks, price):
        self.ranks, self.asked, self.table = ranks, [], {}
        for grid in grids(ranks):
            told = price(*grid)
            if told is not None:
                self.table[grid] = told

    def __call__(self, dp, pp, tp):
        self.asked.append((dp, pp, tp))
        if dp * pp * tp != self.ranks:
            return Price(0.0, 0)  # too good to be true
        if (dp, pp, tp) not in self.table:
            raise ValueError(f"dp {dp} x pp {pp} x tp {tp} cannot be: layers or heads do not divide")
        return self.table[dp, pp, tp]

    def best(self, limit):
        """The grid that is asked for, or None."""
        fitting = [grid for grid, price in self.table.items() if price.nbytes <= limit]
        return min(fitting, key=lambda grid: self.table[grid], default=None)


def grids(ranks):
    return [
        (ranks // pp // tp, pp, tp)
        for tp in range(1, ranks + 1)
        for pp in range(1, ranks + 1)
        if ranks % tp == 0 and ranks // tp % pp == 0
    ]


def model(dp, pp, tp):
    """The price of MODEL on a grid: 24 GB of weights and such, shared by tp and pp; None where it cannot be."""
    if 12 % tp or pp > 12:
        return None
    bubble, chatter = (pp - 1) / 8, 0.12 * (tp - 1)
    seconds = 24 / (dp * pp * tp) * (1 + bubble) * (1 + chatter) + 0.8 * (dp - 1) / dp / pp / tp
    return Price(round(seconds, 3), round(24e9 / pp / tp + 1e9))


def random_price(seed):
    """A price list: seconds with many ties, bytes without, and every fifth grid impossible."""
    generator = random.Random(seed)

    def price(dp, pp, tp):
        told = Price(generator.randint(1, 4) / 2, generator.randint(1, 10**6) * 1000)
        return None if generator.random() < 0.2 and (dp, pp, tp) != (dp, 1, 1) else told

    return price


def price_by(axis):
    """A price list in which the grid wins that gives all ranks to one axis: 0 for dp, 1 for pp, 2 for tp."""
    return lambda *grid: Price(round(24 / grid[axis], 3), 10**9)


def cases():
    """(description, Prices, limit): from the plain ones on; limits that exclude some, that just fit, and none."""
    for ranks in RANKS:
        prices = Prices(ranks, model)
        sizes = sorted({price.nbytes for price in prices.table.values()})
        for limit in (sizes[len(sizes) // 2], sizes[-1], sizes[0]):
            yield f"for {MODEL} on {count(ranks, 'rank')} with {limit / 1e9:.3g} GB each,", prices, limit
    for seed in range(RANDOM):
        prices = Prices(12, random_price(seed))
        sizes = sorted(price.nbytes for price in prices.table.values())
        yield f"for price list {seed} of 12 ranks with {limit_told(sizes[-3])},", prices, sizes[-3]
    for ranks in (16, 12):
        for axis, name in enumerate(AXES):
            yield f"for {ranks} ranks and a step whose time falls with {name},", Prices(ranks, price_by(axis)), 10**9


def limit_told(limit):
    return f"a limit of {limit:,} bytes"


def check_best_grid(fn, runner=None):
    n = 0
    for where, prices, limit in cases():
        check_grid(called(fn, prices, limit, where), prices, limit, capital(where))
        n += 1
    check_nothing_fits(fn)
    prices = Prices(16, model)
    roomy, tight = (fn(16, prices, limit) for limit in (1e12, 4e9))
    return Passed(
        (
            f"the fastest grid that fits in {n} cases, ties and grids that cannot be among them; none fits: refused",
            f"{MODEL} on 16 ranks: dp {roomy[0]} x pp {roomy[1]} x tp {roomy[2]} where memory is plenty, dp {tight[0]} "
            f"x pp {tight[1]} x tp {tight[2]} with 4 GB",
        )
    )


def called(fn, prices, limit, where):
    """What fn says where there is a grid that fits, or Broken, also where it refuses."""
    prices.asked.clear()
    got, error = tried(fn, prices.ranks, prices, limit, where=where)
    if error is None:
        return got
    if not isinstance(error, ValueError):
        raise Broken("raises", describe_error(error, where))
    if "cannot be" in str(error):
        message = (
            f"{capital(where)} your function stopped at a grid that cannot be: {error}. predict says so by a "
            "ValueError: leave that grid out and go on with the others."
        )
        raise Broken("impossible", message)
    best = prices.best(limit)
    head = (
        f"{capital(where)} your function refused ({error}), but dp {best[0]} x pp {best[1]} x tp {best[2]} needs "
        f"{prices.table[best].nbytes:,} bytes, and fits"
    )
    if best not in prices.asked:
        raise Broken("cover", f"{head}. {never_asked(prices, best)}")
    raise Broken("limit", f"{head}: up to the limit, and the limit itself.")


def check_grid(got, prices, limit, where):
    """Raise Broken unless `got` is the best grid of this list."""
    if not isinstance(got, tuple | list) or len(got) != 3 or not all(isinstance(n, int) for n in got):
        plain = isinstance(got, tuple | list | dict | int | float | str)
        shown = "nothing" if got is None else repr(got) if plain else f"something of type {type(got).__name__}"
        raise Broken("returns", f"{where} your function returned {shown}: return (dp, pp, tp), three ints.")
    got, best = tuple(got), prices.best(limit)
    if got == best:
        return
    told, right = (f"dp {g[0]} x pp {g[1]} x tp {g[2]}" for g in (got, best))
    if math.prod(got) != prices.ranks:
        busy = count(math.prod(got), "rank")
        message = f"{where} you say {told}, which is work for {busy}: all {prices.ranks} have to have some."
        raise Broken("ranks", message)
    if got not in prices.table:
        turned = " Did you turn the order round? It is (dp, pp, tp)." if got[::-1] == best else ""
        raise Broken("impossible", f"{where} you say {told}, which cannot be.{turned}")
    mine, least = prices.table[got], prices.table[best]
    facts = f"{told} takes {mine.seconds:g} s and {mine.nbytes:,} bytes; {right} takes {least.seconds:g} s and "
    head = f"{where} you say {facts}{least.nbytes:,} bytes. "
    if mine.nbytes > limit:
        raise Broken("limit", f"{head}The limit is {limit:,}: yours does not fit.")
    if got[::-1] == best:
        raise Broken("order", f"{head}The order is (dp, pp, tp), the same in which predict is asked.")
    if mine.seconds == least.seconds:
        raise Broken("ties", f"{head}Of equally fast ones the one that leaves more room is asked for.")
    if best not in prices.asked:
        raise Broken("cover", f"{head}{never_asked(prices, best)}")
    raise Broken("slow", f"{head}Both fit, so the faster one is asked for.")


def never_asked(prices, best):
    asked = len({grid for grid in prices.asked if math.prod(grid) == prices.ranks})
    return (
        f"You never asked predict about it: every dp x pp x tp = {prices.ranks} counts, {len(grids(prices.ranks))} in "
        f"all, and you asked about {asked}{beyond(prices, best)}."
    )


def beyond(prices, best):
    """What to say where an axis of the best grid is longer than any that predict was asked about, else nothing."""
    for axis, name in enumerate(AXES):
        longest = max((grid[axis] for grid in prices.asked if math.prod(grid) == prices.ranks), default=0)
        if longest < best[axis]:
            return f", and your longest {name} is {longest}: whether more can be is for predict to say"
    return ""


def check_nothing_fits(fn):
    prices, limit = Prices(12, random_price(0)), 10  # of which neither the last nor the fastest is the smallest
    least = min(price.nbytes for price in prices.table.values())
    where = f"Where no grid of 12 ranks fits into {limit} bytes"
    got, error = tried(fn, 12, prices, limit, where=where)
    if error is None:
        raise Broken("refuse", f"{where} your function returned {got!r}: raise a ValueError with the numbers.")
    if not isinstance(error, ValueError):
        raise Broken("refuse", f"{describe_error(error, where)}. Raise a ValueError with the numbers.")
    if not any(text in str(error) for text in (str(least), f"{least:,}", f"{least / 1e9:g}")):
        message = (
            f"{where} your function says {str(error)!r}: say how much the smallest grid needs, {least:,} bytes, so "
            "that one knows what to buy, or what to cut."
        )
        raise Broken("refuse", message)


EXERCISES = (
    Exercise(
        id="11.4",
        title="search the grid under a memory limit",
        reference=reference.best_grid,
        stars=2,
        check=check_best_grid,
        explanation=(
            "1,024 ranks have only 66 grids of three axes, so one can look at all of them. It is the price of each "
            "that has to be right: FlexFlow simulates it, others profile it. With experts, context parallelism, "
            "schedules and micro-batches there are thousands, and searching begins to need wit."
        ),
        parallel=False,
    ),
)
