"""Small programs that get stuck, contradict themselves or are late, each with its repair and with what is wrong.

The doctor's reason (comm/reasons.py) is right for each of them on simulated ranks and on MPI ranks; notebook 03 has
attendees find it and repair the program. One specimen is one file: the broken program, the repaired one, the record.
"""

from . import (
    a_rank_raises,
    both_receive_first,
    branch_around_collective,
    counts_differ,
    dtypes_differ,
    forgotten_wait,
    head_to_head_sends,
    opposite_communicators,
    other_collective,
    ring_even_odd,
    straggler,
    unequal_loops,
    wrong_order,
    wrong_root,
)
from .specimen import Specimen

__all__ = ["SPECIMENS", "Specimen", "find"]

SPECIMENS = tuple(
    module.SPECIMEN
    for module in (
        both_receive_first,
        head_to_head_sends,
        counts_differ,
        dtypes_differ,
        wrong_order,
        ring_even_odd,
        branch_around_collective,
        other_collective,
        unequal_loops,
        wrong_root,
        a_rank_raises,
        straggler,
        opposite_communicators,
        forgotten_wait,
    )
)


def find(name):
    """The specimen called `name`. Raises ValueError with the names that there are."""
    for specimen in SPECIMENS:
        if specimen.name == name:
            return specimen
    raise ValueError(f"no specimen {name!r} in the zoo: {', '.join(s.name for s in SPECIMENS)}")
