"""What simulated ranks say when a program is wrong: deadlocks, mismatches, exceptions, endless loops."""

import re

import numpy as np
import pytest
import torch

from hpdl_lab.comm import CommTimeout, Deadlock, PerRank, sim
from hpdl_lab.comm.errors import explainers
from hpdl_lab.comm.network import Switch
from hpdl_lab.spelling import explain_spelling
from tests.wording import raises

explainers.add(explain_spelling)  # as lab and checks do


def around(comm, x):
    """Every rank sends its vector one rank on."""
    y = np.empty_like(x)
    return comm.sendrecv(x, (comm.rank + 1) % comm.size, y, (comm.rank - 1) % comm.size)


def test_eager_sends_do_not_wait_for_their_receive():
    def head_to_head(comm):
        y = np.empty(4)
        comm.send(np.full(4, float(comm.rank)), 1 - comm.rank)
        return comm.recv(y, 1 - comm.rank)[0]

    assert sim.run(2, head_to_head, network=Switch(eager_nbytes=32)) == [1, 0]
    with pytest.raises(Deadlock) as caught:
        sim.run(2, head_to_head)
    assert "ranks 0 and 1 both send first" in str(caught.value)
    assert "cycle: 0 -> 1 -> 0" in str(caught.value)
    assert [w.nbytes for w in caught.value.waits] == [32, 32]
    assert caught.value.waits[0].line.startswith("test_sim_errors.py:")


def test_an_error_on_one_rank_is_raised_with_rank_line_and_who_waited():
    def fails(comm):
        if comm.rank == 1:
            raise KeyError("lost")
        comm.recv(np.empty(3), 1)

    with pytest.raises(KeyError) as caught:
        sim.run(3, fails)
    notes = "\n".join(caught.value.__notes__)
    assert caught.value.rank == 1
    assert "simulated rank 1 of 3, at test_sim_errors.py:" in notes
    assert re.search(r"2 +waiting +recv +from rank 1 +24 ", notes)
    assert "rank 1 raised KeyError at test_sim_errors.py:" in notes and "never arrived" in notes
    assert caught.value.reason in notes and [w.state for w in caught.value.waits] == ["waiting", "failed", "waiting"]


def test_both_ends_of_a_mismatched_message_learn_the_numbers():
    seen = {}

    def mismatch(comm):
        x = np.zeros(1000 + comm.rank, "f4")
        try:
            around(comm, x)
        except ValueError as error:
            seen[comm.rank] = str(error)

    sim.run(2, mismatch)
    assert set(seen) == {0, 1}
    assert "counts differ: rank 1 sends 1,001 elements, rank 0 expects 1,000 (sent at test_sim" in seen[0]


def test_mismatched_dtypes_are_named():
    def mismatch(comm):
        around(comm, np.zeros(4, "f4" if comm.rank else "f8"))

    with raises(ValueError, "rank 1", "float32", "rank 0", "float64"):
        sim.run(2, mismatch)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda comm: comm.send(np.zeros(1), 9), ("rank 0", "rank 9", "0", "1")),
        (lambda comm: comm.recv(1, np.zeros(1)), ("rank 0",)),
        (lambda comm: comm.recv(np.zeros(1), -1), ("-1",)),
        (lambda comm: comm.send(np.zeros(1), comm.rank), ("rank 0",)),
        (lambda comm: comm.send(np.zeros((4, 4)).T, 1 - comm.rank), ("non-contiguous array of shape",)),
        (lambda comm: comm.send(torch.zeros(4, 4).t(), 1 - comm.rank), ("x.contiguous",)),
        (lambda comm: comm.send(torch.zeros(1, dtype=torch.uint32), 1 - comm.rank), ("uint32",)),
        (lambda comm: comm.all_reduce(torch.zeros(1, dtype=torch.bool)), ("no sum", "as uint8", "maximum")),
        (lambda comm: comm.reduce(torch.zeros(1, dtype=torch.float8_e5m2)), ("no sum", "in float32")),
        (lambda comm: comm.reduce_scatter(torch.zeros(2, dtype=torch.uint16)), ("no sum", "int32")),
    ],
)
def test_bad_messages_are_refused_before_they_are_sent(bad, message):
    with raises(ValueError, *message):
        sim.run(2, bad)


def test_a_message_must_be_a_tensor():
    with raises(TypeError, "NumPy"):
        sim.run(2, lambda comm: comm.send(3.0, 1 - comm.rank))


def test_an_endless_exchange_ends_at_the_deadline():
    def forever(comm):
        while True:
            around(comm, np.zeros(1))

    with pytest.raises(CommTimeout):
        sim.run(2, forever, deadline=0.3)


@pytest.mark.parametrize("threads", [False, True])
def test_code_that_catches_everything_in_a_loop_is_left_where_it_is(threads):
    def stubborn(comm):
        while True:
            try:
                comm.recv(np.empty(1), 1 - comm.rank)
            except BaseException:  # as a bare `except:` does
                pass

    with raises(Deadlock, "ranks 0 and 1"):
        sim.run(2, stubborn, deadline=2, threads=threads)


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_wrong_number_of_ranks_is_refused(size):
    with raises(ValueError, "1 rank"):
        sim.run(size, around, np.zeros(1))


def test_a_per_rank_argument_of_the_wrong_length_is_refused():
    with raises(ValueError, "PerRank", "2 items", "3 ranks"):
        sim.run(3, lambda comm, x: x, PerRank([1, 2]))


@pytest.mark.parametrize(
    ("call", "here"),
    [
        (lambda comm, x: comm.Get_rank(), "comm.rank"),
        (lambda comm, x: comm.Get_size(), "comm.size"),
        (lambda comm, x: comm.get_world_size(), "comm.size"),
        (lambda comm, x: comm.Rank, "comm.rank"),
        (lambda comm, x: comm.Send(x, dest=1), "comm.send(x, dst)"),
        (lambda comm, x: comm.Isend(x, dest=1), "comm.isend(x, dst)"),
        (lambda comm, x: comm.Bcast(x), "comm.broadcast(x, root=0)"),
        (lambda comm, x: comm.Allreduce(x), "comm.all_reduce(x, async_op=False)"),
        (lambda comm, x: comm.all_to_all_single(x), "comm.all_to_all(x)"),
        (lambda comm, x: comm.send(x, dest=1), "comm.send(x, dst)"),
        (lambda comm, x: comm.isend(x, to=1), "comm.isend(x, dst)"),
        (lambda comm, x: comm.recv(source=1), "comm.recv(x, src)"),
        (lambda comm, x: comm.recv(x, source=1), "comm.recv(x, src)"),
        (lambda comm, x: comm.all_reduce(x, op="sum"), "comm.all_reduce(x, async_op=False)"),
    ],
)
def test_what_other_libraries_call_it_is_translated(call, here):
    with pytest.raises((AttributeError, TypeError)) as caught:
        sim.run(2, call, np.zeros(2))
    assert str(caught.value).endswith(f"; here it is {here}") and "\n" not in str(caught.value)


def test_what_no_library_has_is_not_guessed():
    with raises(AttributeError, "'lion'"):
        sim.run(2, lambda comm: comm.lion)
    with raises(TypeError, "'dest'"):
        sim.run(2, lambda comm: (lambda x: x)(dest=1))
