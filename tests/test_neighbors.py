"""A rank that has lost its memory gets its shard back from a neighbor, and the first copy is worth most."""

import itertools
from dataclasses import replace

import pytest
import torch

from hpdl_lab.comm import sim
from hpdl_lab.resilience import interval
from hpdl_lab.resilience.neighbors import AllCopiesLost, ReplicatedJob, copy_to_next, lose_and_restore, surviving_holder

JOB = ReplicatedJob(mtbf_s=10_000, write_s=30, shard_nbytes=2e9)


@pytest.mark.parametrize("copies", [0, 1, 2, 3])
def test_whatever_is_lost_comes_back_bit_for_bit_or_not_at_all(copies):
    size = 4
    for lost in itertools.chain.from_iterable(itertools.combinations(range(size), k) for k in range(size)):
        gone = [rank for rank in lost if all((rank + k) % size in lost for k in range(1, copies + 1))]
        if gone:
            with pytest.raises(AllCopiesLost, match=rf"rank {gone[0]} .*from the file"):
                sim.run(size, lose_and_restore, lost, copies)
            continue
        shards = sim.run(size, lose_and_restore, lost, copies)
        assert all(torch.equal(before, after) for before, after in shards)
        assert len({tuple(after.tolist()) for _, after in shards}) == size


def test_a_copy_is_sent_once_to_each_of_the_next_ranks():
    def body(comm):
        return copy_to_next(comm, torch.tensor([comm.rank]), 2)

    run = sim.run(4, body)
    assert run[0] == {3: 3, 2: 2} and run[3] == {2: 2, 1: 1}
    assert sum(e.nbytes for e in run.events if e.op == "send") == 4 * 2 * 8
    with pytest.raises(ValueError, match="from 0 to 3, got 4"):
        sim.run(4, lambda comm: copy_to_next(comm, torch.zeros(1), 4))


def test_the_nearest_rank_that_lives_gives_it():
    assert (
        surviving_holder(2, {2}, 4) == 3
        and surviving_holder(3, {3}, 4) == 0
        and surviving_holder(2, {2, 3}, 4, copies=2) == 0
    )


def test_without_a_copy_it_is_the_goodput_of_the_file():
    every = interval.checkpoint_interval(30, 10_000, 1)
    assert JOB.goodput(0) == interval.goodput(every, 30, 10_000, 1, restart_s=330, months=10)
    assert JOB.goodput(0) == replace(JOB, together=1).goodput(1), "a copy that is always lost as well is worth nothing"


def test_goodput_against_memory():
    first, second, third = (JOB.goodput(n + 1) - JOB.goodput(n) for n in range(3))
    assert first > 3 * second > 0 and second > third and JOB.memory(3) == 6e9
    shared = [replace(JOB, together=share) for share in (0, 0.05, 0.5)]
    assert [job.all_lost(2) for job in shared] == [0, pytest.approx(0.0025), 0.25]
    goodputs = [job.goodput(1) for job in shared]
    assert goodputs == sorted(goodputs, reverse=True) and replace(JOB, link=1e8).goodput(1) < goodputs[1]


@pytest.mark.parametrize("wrong", [{"mtbf_s": 0}, {"together": 1.1}, {"link": -1}, {"start_s": -1}])
def test_what_cannot_be(wrong):
    with pytest.raises(ValueError, match=f"{[*wrong][0]} must be"):
        replace(JOB, **wrong)
