"""Rehearsals and timings: what a strategy sends and when is noted without a wait; nothing else is changed."""

import functools

import pytest
import torch

from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.data.dataset import digits
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.data_parallel import (
    DataParallel,
    DataParallelBucketed,
    DataParallelNaive,
    DataParallelOverlapped,
    Strategy,
)
from hpdl_lab.parallel.parameter_server import StaleSynchronous
from hpdl_lab.parallel.scaling.profile import NotRehearsed, RehearsedStep, rehearse, rehearsed, time_steps
from tests.wording import raises

SIZES = (64, 32, 10)
NBYTES = [4 * n for n in (64 * 32, 32, 32 * 10, 10)]  # of the four parameters, in the order of registration
FLAG = 4  # bytes more in each message: see parallel/reducer.py


@functools.cache
def data():
    return digits()


def profiles(strategy, n=32, size=3, sends=False):
    """Results: the StepProfile of each of 3 simulated ranks. sends: what goes on beside them is sent."""

    def rehearsal(comm):
        step = RehearsedStep(comm, mlp(SIZES), strategy, data())
        step.comm.sends = sends
        return step(n)

    return sim.run(size, rehearsal)


@pytest.mark.parametrize(
    ("strategy", "sent"),
    [
        (DataParallelNaive(ring.all_reduce), [n + FLAG for n in NBYTES]),
        (DataParallel(), [sum(NBYTES) + FLAG]),
        (DataParallelBucketed(None, 2000, 1500), [sum(NBYTES[1:]) + FLAG, NBYTES[0] + FLAG]),
        (DataParallelOverlapped(None, 2000, 1500), [sum(NBYTES[1:]) + FLAG, NBYTES[0] + FLAG]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_rehearsal_notes_every_message_and_waits_for_none(strategy, sent):
    run = profiles(strategy)
    assert not any(e.op == "send" for e in run.events)
    beside = isinstance(strategy, DataParallelOverlapped)
    if beside:
        assert {e.lane for e in profiles(strategy, sends=True).events if e.op == "send"} == {"background"}
    for rank, profile in enumerate(run):
        assert [m.nbytes for m in profile.messages] == sent
        assert [m.background for m in profile.messages] == [beside] * len(sent)
        assert profile.samples == (11, 11, 10)[rank]
        assert 0 < profile.forward < profile.backward < profile.added < profile.end
        first, last = profile.messages[0].at, profile.messages[-1].at
        assert first <= last and (first > profile.forward if beside else profile.backward <= first)
        assert (last <= profile.backward) if beside else (last <= profile.added)


class Sends(Strategy):
    """Adds around a ring by hand."""

    def assign(self, params):
        return [list(range(len(params)))]

    def add_gradients(self, comm, model):
        comm.sendrecv(torch.zeros(1), (comm.rank + 1) % comm.size, torch.zeros(1), (comm.rank - 1) % comm.size)


class Broadcasts(DataParallel):
    """Sends the parameters around in every step, as a server with one optimizer does."""

    def add_gradients(self, comm, model):
        comm.broadcast(torch.zeros(1))


class Runs(DataParallel):
    """Something other than an all-reduce beside the rank."""

    def add_gradients(self, comm, model):
        comm.background(lambda other: None).wait()


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        (Sends(), ("sends messages of its own",)),
        (Broadcasts(), ()),
        (Runs(), ()),
        (StaleSynchronous(), ("cannot be rehearsed",)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_rehearsed_says_so_in_one_sentence(strategy, sentence):
    with raises(NotRehearsed, *sentence):
        profiles(strategy)


def test_a_strategy_without_an_all_reduce_is_named():
    with raises(NotRehearsed, "all_reduce"):
        rehearsed(object())


def test_model_and_strategy_are_left_as_they_are():
    model, strategy = mlp(SIZES), DataParallelOverlapped(ring.all_reduce)
    before = [p.detach().clone() for p in model.parameters()]
    sim.run(1, time_steps, model, strategy, data(), 16, 0.01)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert strategy.all_reduce is ring.all_reduce and strategy.reducer is None


def test_timings_are_the_same_on_every_rank_and_steps_leave_events():
    run = sim.run(3, time_steps, mlp(SIZES), DataParallel(ring.all_reduce), data(), 32, 0.01)
    first = run[0]
    assert run == [first] * 3 and first.both == []
    assert len(first.steps) == len(first.profiles) == len(first.talks) == len(first.tiny) >= 5
    assert min(first.steps) > 0 and all(0 < tiny < talk for tiny, talk in zip(first.tiny, first.talks, strict=True))
    assert {profile.samples for profile in first.profiles} == {11}
    updates = [e for e in run.events if e.op == "update" and e.rank == 0]
    assert len(updates) == len(first.steps), "the steps of the warm-up are not traced"


def test_what_goes_on_beside_a_rank_is_timed_with_it_as_well():
    """Simulated ranks have clocks of their own for messages: only that both were taken in every turn is seen here."""
    timings = sim.run(2, time_steps, mlp(SIZES), DataParallelOverlapped(ring.all_reduce, 2000, 1500), data(), 32, 0.01)[
        0
    ]
    assert len(timings.both) == len(timings.steps) and all(both.end > 0 < both.settled for both in timings.both)
    assert sim.run(1, time_steps, mlp(SIZES), DataParallelOverlapped(), data(), 32, 0.01)[0].both == []


def test_rehearsals_for_several_shards():
    few, many = sim.run(2, rehearse, mlp((64, 512, 10)), DataParallel(), data(), {256, 1}, 0.05)[0]
    assert (few.samples, many.samples) == (1, 256)
    assert 0 < few.forward < many.forward
