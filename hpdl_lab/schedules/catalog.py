"""The table of schedules, and `build`, which makes one of them."""

from collections.abc import Callable
from typing import NamedTuple

from .gpipe import gems, gpipe
from .one_f_one_b import interleaved, one_f_one_b, zero_bubble_h1
from .schedule import Schedule


class Entry(NamedTuple):
    """A schedule that has a name.

    row:      function of (rank, ranks, micro_batches), and of chunks where `chunked`, that makes the row of a rank.
    replicas: models that the ranks hold together.
    demand:   function of (ranks, micro_batches) that answers with what is missing, a sentence, or with "".
    """

    row: Callable
    chunked: bool = False
    replicas: int = 1
    demand: Callable = lambda ranks, micro_batches: ""


def multiple(ranks: int, micro_batches: int) -> str:
    if micro_batches % ranks:
        return (
            f"sends {ranks} micro-batches at a time around its {ranks} ranks: {micro_batches} are no multiple of that"
        )
    return ""


def enough(ranks: int, micro_batches: int) -> str:
    if micro_batches < ranks:
        return f"of {ranks} ranks needs at least {ranks} micro-batches to fill its bubble, got {micro_batches}"
    return ""


def one_each(ranks: int, micro_batches: int) -> str:
    if micro_batches < 2:
        return f"has two replicas, each of which needs a micro-batch: 2 at least, got {micro_batches}"
    return ""


def exactly_two(ranks: int, micro_batches: int) -> str:
    if micro_batches != 2:
        return f"gives each of its two replicas one micro-batch, got {micro_batches}: gems_master takes more"
    return ""


CATALOG = {
    "gpipe": Entry(gpipe),
    "1f1b": Entry(one_f_one_b),
    "interleaved": Entry(interleaved, chunked=True, demand=multiple),
    "zero_bubble_h1": Entry(zero_bubble_h1, demand=enough),
    "gems_mast": Entry(gems, replicas=2, demand=exactly_two),
    "gems_master": Entry(gems, replicas=2, demand=one_each),
}


def build(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The schedule `name` for a pipeline of `ranks` ranks.

    Args:    chunks: stages per rank; only "interleaved" has more than one, 2 if not said.
    Raises:  ValueError, a sentence with numbers, for an unknown name or numbers that the schedule cannot have.
    """
    if name not in CATALOG:
        raise ValueError(f"no schedule is called {name!r}. Known: {', '.join(CATALOG)}")
    entry = CATALOG[name]
    chunks = chunks if chunks is not None else 2 if entry.chunked else 1
    for what, number in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{what} of a schedule is a whole number, at least 1, got {number!r}")
    if chunks > 1 and not entry.chunked:
        raise ValueError(f"{name} has one chunk per rank, got {chunks}: interleaved has more")
    missing = entry.demand(ranks, micro_batches)
    if missing:
        raise ValueError(f"{name} {missing}")
    more = (chunks,) if entry.chunked else ()
    rows = tuple(tuple(entry.row(rank, ranks, micro_batches, *more)) for rank in range(ranks))
    return Schedule(name, ranks, ranks * chunks, micro_batches, entry.replicas, rows)
