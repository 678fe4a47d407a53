"""How any tensor goes through shared memory: rank 0 measures for each state of the machine, all take its choice."""

import time

import numpy as np
import pytest
import torch

from hpdl_lab import features

core = features.compiled_module()
COUNT = 1 << 16  # 256 KiB of float32


def path(comm):
    return core.ShmGroup.path(comm.size, comm.oversubscribed)


def states(comm):
    """The states of the machine that have been measured, as rank 0 says."""
    return [line for line in path(comm).split("; in another state: ") if "measured in" in line]


@pytest.fixture
def pair(ranks, monkeypatch):
    """The members of a group whose ranks do not take turns, whatever this machine; None on the other ranks."""
    monkeypatch.setattr(ranks, "oversubscribed", False)
    return range(min(2, ranks.size)) if ranks.rank < 2 else None


def test_rank_0_measures_and_the_other_takes_what_it_has_chosen(run, pair):
    for _ in range(2 if pair and len(pair) > 1 else 0):  # what one communicator has found out serves the next one
        comm = run(members=pair)
        for n in (COUNT, 7, 4 * COUNT):
            assert (comm.all_reduce(torch.ones(n)) == comm.size).all()
        assert (len(states(comm)) > 0 and "also tried" in path(comm)) == (comm.rank == 0), path(comm)
        assert path(comm).startswith("in chunks of" if comm.rank == 0 else "not measured yet")
        comm.close()


def test_each_state_of_the_machine_is_measured_once_and_remembered(run, pair):
    """Played: what a probe finds is given."""
    if not pair or len(pair) < 2:
        return
    comm, x = run(members=pair), torch.zeros(COUNT, dtype=torch.int32)

    def until(goal, ns):
        """Call until rank 0 says that `goal` is reached, in the state in which a probe takes `ns`."""
        core.ShmGroup.play(2, ns)
        end = time.monotonic() + 600
        while not comm.broadcast(np.array([goal()], np.uint8))[0]:
            assert time.monotonic() < end, path(comm)
            for _ in range(20):
                comm.all_reduce(x)
        return states(comm)

    def with_(ns):
        return lambda: any(f"was read in {ns} ns" in line for line in states(comm))

    core.ShmGroup.forget(2)
    try:
        until(with_(1000), 1000)
        both = until(with_(9000), 9000)
        assert comm.rank > 0 or len(both) == 2, path(comm)
        until_said = time.monotonic() + 1  # some hundred probes, which would find a new state
        again = until(lambda: time.monotonic() > until_said, 1100)
        assert again == both, path(comm)
        assert (x == 0).all()
    finally:
        core.ShmGroup.play(2, 0)
        core.ShmGroup.forget(2)


def test_what_runs_in_the_background_does_not_measure(run, pair):
    """It takes turns with what the rank computes."""
    if pair:
        comm = run(members=pair)
        before = path(comm)
        assert (comm.all_reduce(torch.ones(4 * COUNT), async_op=True).wait() == comm.size).all()
        assert path(comm) == before


def test_ranks_that_take_turns_on_their_cores_do_not_measure(comm):
    comm.all_reduce(torch.ones(COUNT))
    assert ("not measured: ranks take turns" in path(comm)) == comm.oversubscribed


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter"])
def test_any_collective_may_be_the_one_after_which_it_is_measured(comm, collective):
    """And what follows at once is right, whatever has been chosen."""
    x = torch.full((comm.size, COUNT), float(comm.rank))
    getattr(comm, collective)(x)
    for n in (COUNT, 16, 5 * COUNT, 1000):
        assert (comm.all_reduce(torch.full((n,), float(comm.rank))) == comm.size * (comm.size - 1) // 2).all()
        gathered = comm.all_gather(torch.full((n,), float(comm.rank)))
        assert (gathered == torch.arange(comm.size)[:, None]).all()
