"""Eight jobs of a training program, one for each collective: which is it?"""

from typing import NamedTuple


class _Job(NamedTuple):
    """letter: how the exercise calls it; text: what is to be done; needs: the same as "every rank needs ..."."""

    letter: str
    text: str
    needs: str


DOES = {  # what each collective does, in words that continue its name
    "broadcast": "copies what rank 0 has to every rank",
    "scatter": "hands row r of what rank 0 has to rank r",
    "gather": "puts what every rank has in a list on rank 0",
    "all_gather": "puts what every rank has in a list on every rank",
    "reduce": "adds what every rank has, on rank 0",
    "all_reduce": "adds what every rank has, and leaves the sum on every rank",
    "reduce_scatter": "adds what every rank has, and leaves row r of the sum on rank r",
    "all_to_all": "hands row s of what rank r has to rank s, for every pair of ranks",
}

JOBS = (
    _Job("A", "Rank 0 has read the weights from a file. Every rank needs them.", "every rank needs what rank 0 has"),
    _Job("B", "Every rank has a gradient. Every rank needs their sum.", "every rank needs the sum"),
    _Job("C", "Every rank has a loss. Rank 0 prints their sum.", "rank 0 alone needs the sum"),
    _Job(
        "D",
        "Rank 0 has all the images, one row per rank. Each rank needs its row.",
        "each rank needs a different row of what rank 0 has",
    ),
    _Job(
        "E",
        "Every rank has a list of its mistakes. Rank 0 shows all lists.",
        "rank 0 alone needs what every rank has, unadded",
    ),
    _Job(
        "F",
        "Every rank has trained one layer. Every rank needs all layers.",
        "every rank needs what every rank has, unadded",
    ),
    _Job(
        "G",
        "Every rank has a gradient. Rank r needs only row r of the sum.",
        "each rank needs a different row of the sum, and no more",
    ),
    _Job(
        "H",
        "Each of p ranks has p rows of words. Rank r needs row r of every rank.",
        "every rank needs one row from every rank, unadded",
    ),
)


def which_collective() -> dict[str, str]:
    """For each job, name the collective that sends only the data that ranks need.

        A  Rank 0 has read the weights from a file. Every rank needs them.
        B  Every rank has a gradient. Every rank needs their sum.
        C  Every rank has a loss. Rank 0 prints their sum.
        D  Rank 0 has all the images, one row per rank. Each rank needs its row.
        E  Every rank has a list of its mistakes. Rank 0 shows all lists.
        F  Every rank has trained one layer. Every rank needs all layers.
        G  Every rank has a gradient. Rank r needs only row r of the sum.
        H  Each of p ranks has p rows of words. Rank r needs row r of every rank.

    Returns: dict, such as {"A": "all_to_all", "B": ...}. Its values are "broadcast",
             "scatter", "gather", "all_gather", "reduce", "all_reduce",
             "reduce_scatter" and "all_to_all", each once.
    """
    return {
        "A": "broadcast",
        "B": "all_reduce",
        "C": "reduce",
        "D": "scatter",
        "E": "gather",
        "F": "all_gather",
        "G": "reduce_scatter",
        "H": "all_to_all",
    }
