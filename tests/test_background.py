"""`Comm.background`: what runs beside a rank."""

import pytest

from hpdl_lab.comm.base import Comm


class Alone(Comm):
    """A back end of one rank that has nothing of its own."""

    def isend(self, x, to):
        raise NotImplementedError

    irecv = barrier = split = allocate = isend


def test_where_nothing_runs_beside_a_rank_it_is_done_at_once():
    seen = []

    def note(comm, word):
        seen.append((comm, word))
        return word * 2

    comm = Alone(0, 1, trace=None)
    work = comm.background(note, "ab")
    assert seen == [(comm, "ab")] and work.test()
    assert work.wait() == work.wait() == "abab"


def test_what_it_raises_comes_at_wait():
    def fails(comm):
        raise KeyError("lost")

    work = Alone(0, 1, trace=None).background(fails)
    with pytest.raises(KeyError, match="lost"):
        work.wait()
