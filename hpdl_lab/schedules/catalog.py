"""The table of schedules, and `build`, which makes one of them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..units import counted
from .gpipe import gems, gpipe
from .one_f_one_b import interleaved, one_f_one_b, zero_bubble_h1
from .schedule import Action, Pair, Schedule
from .v_shaped import dualpipe, dualpipe_v, zero_bubble_v


class _Entry(NamedTuple):
    """A schedule that has a name.

    row:      function of (rank, ranks, micro_batches), and of chunks if any number is possible: the row of a rank.
    chunks:   stages of one model that a rank holds; None: as many as are asked for.
    replicas: models that the ranks hold together.
    demand:   function of (ranks, micro_batches) that answers with what is missing, a sentence, or with "".
    """

    row: Callable[..., Sequence[Action | Pair]]
    chunks: int | None = 1
    replicas: int = 1
    demand: Callable[[int, int], str] = lambda ranks, micro_batches: ""


def _multiple(ranks: int, micro_batches: int) -> str:
    if micro_batches % ranks:
        return (
            f"sends {ranks} micro-batches at a time around its {ranks} ranks: {micro_batches} are no multiple of that"
        )
    return ""


def _enough(ranks: int, micro_batches: int) -> str:
    if micro_batches < ranks:
        return f"of {ranks} ranks needs at least {ranks} micro-batches to fill its bubble, got {micro_batches}"
    return ""


def _one_each(ranks: int, micro_batches: int) -> str:
    if micro_batches < 2:
        return f"has two replicas, and each needs a micro-batch: 2 at least, got {micro_batches}"
    return ""


def _exactly_two(ranks: int, micro_batches: int) -> str:
    if micro_batches != 2:
        return f"gives each of its two replicas one micro-batch, got {micro_batches}: gems_master takes more"
    return ""


def _meet(ranks: int, micro_batches: int) -> str:
    if ranks % 2:
        return f"has two replicas that meet in the middle of its ranks: an even number of them is needed, got {ranks}"
    return _one_each(ranks, micro_batches)


CATALOG = {
    "gpipe": _Entry(gpipe),
    "1f1b": _Entry(one_f_one_b),
    "interleaved": _Entry(interleaved, chunks=None, demand=_multiple),
    "zero_bubble_h1": _Entry(zero_bubble_h1, demand=_enough),
    "zero_bubble_v": _Entry(zero_bubble_v, chunks=2),
    "dualpipe": _Entry(dualpipe, replicas=2, demand=_meet),
    "dualpipe_v": _Entry(dualpipe_v, chunks=2),
    "gems_mast": _Entry(gems, replicas=2, demand=_exactly_two),
    "gems_master": _Entry(gems, replicas=2, demand=_one_each),
}


FOLDED = ("zero_bubble_v", "dualpipe", "dualpipe_v")  # which need 2 p micro-batches to fill p ranks


def build(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """Return the schedule `name` for a pipeline of `ranks` ranks.

    Args:    chunks: stages per rank; only "interleaved" has a choice, 2 if not said.
    Raises:  ValueError, a sentence with numbers, for an unknown name or numbers that the schedule cannot have.
    """
    if name not in CATALOG:
        raise ValueError(f"no schedule is called {name!r}. Known: {', '.join(CATALOG)}")
    entry = CATALOG[name]
    chunks = chunks if chunks is not None else entry.chunks or 2
    for what, number in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{what} of a schedule is a whole number, at least 1, got {number!r}")
    if entry.chunks and chunks != entry.chunks:
        raise ValueError(
            f"{name} has {counted(entry.chunks, 'chunk')} per rank, got {chunks}: interleaved has a choice"
        )
    missing = entry.demand(ranks, micro_batches)
    if missing:
        raise ValueError(f"{name} {missing}")
    more = () if entry.chunks else (chunks,)
    rows = [entry.row(rank, ranks, micro_batches, *more) for rank in range(ranks)]
    return Schedule.of(name, ranks * chunks, micro_batches, entry.replicas, rows)
