"""The record of one broken program."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Specimen:
    """A program that is wrong in one way.

    name:     of its file; title: what the program is to do, in one line.
    ranks:    how many it is for.
    broken:   broken(comm) never ends well; repaired(comm) returns returns[rank], a number.
    reason:   what the doctor says, or a part of it: the same on simulated ranks and on MPI ranks.
    deadline: seconds within which it can be diagnosed; the repaired program needs far less.
    """

    name: str
    title: str
    ranks: int
    broken: Callable
    repaired: Callable
    reason: str
    returns: list
    deadline: float = 1.0
