"""Simulated ranks: time, order, deadlocks, errors, limits."""

import time

import numpy as np
import pytest
import torch

from hpdl_lab.collectives import ring
from hpdl_lab.comm import CommTimeout, Deadlock, PerRank, sim
from hpdl_lab.comm.network import Switch


def around(comm, x):
    """Every rank sends its vector one rank on."""
    y = np.empty_like(x)
    return comm.sendrecv(x, (comm.rank + 1) % comm.size, y, (comm.rank - 1) % comm.size)


def test_results_come_in_rank_order_and_per_rank_arguments_are_dealt():
    results = sim.run(3, lambda comm, a, b: (comm.rank, a, b), PerRank([10, 20, 30]), "same")
    assert results == [(0, 10, "same"), (1, 20, "same"), (2, 30, "same")]


def test_arguments_are_copied_for_every_rank():
    def add_rank(comm, x):
        x += comm.rank
        return x

    x = np.zeros(2)
    results = sim.run(3, add_rank, x)
    assert [r[0] for r in results] == [0, 1, 2]
    assert x[0] == 0


@pytest.mark.parametrize("p", [2, 3, 8])
def test_one_message_takes_alpha_plus_n_beta(p):
    network = Switch(alpha=1e-3, beta=1e-6)
    assert sim.run(p, around, np.zeros(100), network=network).seconds == pytest.approx(1e-3 + 800e-6, rel=1e-12)


def test_messages_to_one_rank_share_its_port():
    def to_zero(comm):
        if comm.rank:
            comm.send(np.zeros(1), 0)
        else:
            for source in range(1, comm.size):
                comm.recv(np.zeros(1), source)

    network = Switch(alpha=1.0, beta=0.0)
    assert sim.run(5, to_zero, network=network).seconds == pytest.approx(4.0)


def test_compute_advances_only_its_own_rank():
    def work(comm):
        comm.compute(seconds=comm.rank)
        comm.barrier()

    assert sim.run(4, work, network=Switch(alpha=0.0)).seconds == pytest.approx(3.0)
    assert sim.run(1, lambda comm: comm.compute(flops=3e12)).seconds == pytest.approx(3.0)


def test_a_run_is_deterministic():
    one = sim.run(5, ring.all_reduce, np.arange(7.0))
    two = sim.run(5, ring.all_reduce, np.arange(7.0))
    assert one.events == two.events
    assert len(one.events) == 5 * 2 * 8


def test_a_receive_shows_nothing_before_wait():
    def peek(comm):
        y = np.zeros(1)
        if comm.rank == 0:
            comm.send(np.ones(1), 1)
            return None
        work = comm.irecv(y, 0)
        comm.compute(seconds=1.0)
        before = y[0]
        work.wait()
        return before, y[0]

    assert sim.run(2, peek)[1] == (0.0, 1.0)


def test_the_value_sent_is_the_value_at_the_time_of_the_transfer():
    def overwrite(comm):
        x = np.ones(1)
        if comm.rank == 0:
            comm.send(x, 1)
            x[0] = 7
            comm.barrier()
            return None
        comm.recv(x, 0)
        comm.barrier()
        return x[0]

    assert sim.run(2, overwrite)[1] == 1


def test_eager_sends_do_not_wait_for_their_receive():
    def head_to_head(comm):
        y = np.empty(4)
        comm.send(np.full(4, float(comm.rank)), 1 - comm.rank)
        return comm.recv(y, 1 - comm.rank)[0]

    assert sim.run(2, head_to_head, network=Switch(eager_nbytes=32)) == [1, 0]
    with pytest.raises(Deadlock) as caught:
        sim.run(2, head_to_head)
    assert "ranks 0, 1 all send first" in str(caught.value)
    assert "cycle: 0 -> 1 -> 0" in str(caught.value)
    assert [w.nbytes for w in caught.value.waits] == [32, 32]
    assert caught.value.waits[0].line.startswith("test_sim.py:")


def test_everybody_receiving_first_is_named():
    with pytest.raises(Deadlock, match="ranks 0-2 all receive first and nobody has sent"):
        sim.run(3, lambda comm: comm.recv(np.empty(1), (comm.rank + 1) % 3))


def test_a_rank_that_left_early_is_named():
    def loop(comm):
        for _ in range(2 if comm.rank == 1 else 3):
            comm.barrier()

    with pytest.raises(Deadlock, match="rank 0 waits in barrier for rank 1, which has already finished"):
        sim.run(3, loop)


def test_different_collectives_on_different_ranks_are_named():
    def mixed(comm):
        return comm.split(0) if comm.rank == 1 else comm.barrier()

    with pytest.raises(ValueError, match=r"rank 1 called split .*but rank 0 called barrier"):
        sim.run(2, mixed)


def test_an_error_on_one_rank_is_raised_with_rank_line_and_who_waited():
    def fails(comm):
        if comm.rank == 1:
            raise KeyError("lost")
        comm.recv(np.empty(3), 1)

    with pytest.raises(KeyError) as caught:
        sim.run(3, fails)
    notes = "\n".join(caught.value.__notes__)
    assert caught.value.rank == 1
    assert "simulated rank 1 of 3, at test_sim.py:" in notes
    assert "rank 2 waits in recv of 24 bytes from rank 1" in notes


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
    assert "expects 1,000 float32 from rank 1" in seen[0] and "sends 1,001 float32" in seen[0]


def test_mismatched_dtypes_are_named():
    def mismatch(comm):
        around(comm, np.zeros(4, "f4" if comm.rank else "f8"))

    with pytest.raises(ValueError, match="expects 4 float64 from rank 1 .*sends 4 float32"):
        sim.run(2, mismatch)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda comm: comm.send(np.zeros(1), 9), r"rank 0 sends to rank 9: ranks here are 0 to 1"),
        (lambda comm: comm.recv(np.zeros(1), -1), r"receives from rank -1"),
        (lambda comm: comm.send(np.zeros(1), comm.rank), "sends to rank 0 itself|sends to itself"),
        (lambda comm: comm.send(np.zeros((4, 4)).T, 1 - comm.rank), "non-contiguous array of shape"),
        (lambda comm: comm.send(torch.zeros(4, 4).t(), 1 - comm.rank), "use x.contiguous"),
        (lambda comm: comm.send(torch.zeros(1, dtype=torch.complex64), 1 - comm.rank), "dtype complex64"),
    ],
)
def test_bad_messages_are_refused_before_they_are_sent(bad, message):
    with pytest.raises(ValueError, match=message):
        sim.run(2, bad)


def test_a_message_must_be_a_tensor():
    with pytest.raises(TypeError, match="cannot send a float: a message is a torch tensor or a NumPy array"):
        sim.run(2, lambda comm: comm.send(3.0, 1 - comm.rank))


def test_an_endless_loop_ends_at_the_deadline_and_is_located():
    def spin(comm):
        while comm.rank == 1:
            pass
        comm.barrier()

    started = time.monotonic()
    with pytest.raises(CommTimeout, match=r"within 0\.3 s of real time, in test_sim\.py:") as caught:
        sim.run(2, spin, deadline=0.3)
    assert time.monotonic() - started < 2
    assert "rank 0 waits in barrier" in str(caught.value)


def test_an_endless_exchange_ends_at_the_deadline():
    def forever(comm):
        while True:
            around(comm, np.zeros(1))

    with pytest.raises(CommTimeout):
        sim.run(2, forever, deadline=0.3)


def test_a_timer_that_was_set_before_is_restored():
    import signal

    before = signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        sim.run(2, around, np.zeros(1))
        assert 990 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_finally_clauses_of_stuck_ranks_run():
    closed = []

    def stuck(comm):
        try:
            comm.barrier()
        finally:
            closed.append(comm.rank)

    with pytest.raises(Deadlock):
        sim.run(3, lambda comm: stuck(comm) if comm.rank else None)
    assert closed == [1, 2]


def test_grad_mode_belongs_to_the_rank():
    def mode(comm):
        if comm.rank == 0:
            with torch.no_grad():
                comm.barrier()
                return torch.is_grad_enabled()
        comm.barrier()
        return torch.is_grad_enabled()

    assert sim.run(2, mode) == [False, True]
    assert torch.is_grad_enabled()


def test_split_makes_communicators_that_do_not_hear_each_other():
    def rows(comm):
        row = comm.split(comm.rank // 2, key=-comm.rank)
        x = np.full(1, comm.rank)
        y = np.empty_like(x)
        row.sendrecv(x, 1 - row.rank, y, 1 - row.rank)
        return row.rank, row.size, int(y[0])

    assert sim.run(4, rows) == [(1, 2, 1), (0, 2, 0), (1, 2, 3), (0, 2, 2)]


def test_rows_stream_and_are_kept():
    live = []
    results = sim.run(2, lambda comm: comm.report(loss=comm.rank / 2), on_row=live.append)
    assert results.rows == live == [{"rank": 0, "loss": 0.0}, {"rank": 1, "loss": 0.5}]


def test_the_base_collectives():
    def all_of_them(comm):
        p, r = comm.size, comm.rank
        x = torch.arange(3.0) + r
        total = sum(torch.arange(3.0) + s for s in range(p))
        assert torch.equal(comm.all_reduce(x.clone()), total)
        assert torch.equal(comm.all_gather(x), torch.stack([torch.arange(3.0) + s for s in range(p)]))
        assert torch.equal(comm.broadcast(x.clone(), root=p - 1), torch.arange(3.0) + p - 1)
        square = torch.arange(float(p)).repeat(p, 1) + 10 * r  # [i][j] = j + 10 r
        assert torch.equal(comm.all_to_all(square), torch.stack([torch.arange(float(p)) + 10 * s for s in range(p)]))
        assert torch.equal(comm.reduce_scatter(square), p * torch.arange(float(p)) + 10 * sum(range(p)))
        gathered = comm.gather(x, root=0)
        assert (gathered is None) == (r != 0)
        part = comm.scatter(gathered, torch.empty(3), root=0)
        assert torch.equal(part, x)

    sim.run(1, all_of_them)
    sim.run(4, all_of_them)


def test_half_precision_sums_round_once():
    def add(comm):
        x = torch.full((1,), 1.0 if comm.rank == 0 else 2**-8, dtype=torch.bfloat16)
        return comm.all_reduce(x).item()

    assert sim.run(3, add)[0] == 1 + 2**-7  # 1 + 2^-8 rounds to 1 in bfloat16, so rounding at each add would lose both


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_wrong_number_of_ranks_is_refused(size):
    with pytest.raises(ValueError, match="at least 1 rank"):
        sim.run(size, around, np.zeros(1))


def test_a_per_rank_argument_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="PerRank has 2 items for 3 ranks"):
        sim.run(3, lambda comm, x: x, PerRank([1, 2]))


def test_ring_all_reduce_on_256_ranks_is_quick():
    started = time.monotonic()
    results = sim.run(256, ring.all_reduce, torch.ones(4096))
    assert time.monotonic() - started < 20  # 3 s on a quiet machine; the bound only catches another order of growth
    assert torch.equal(results[255], torch.full((4096,), 256.0))
