"""Carrying out schedules on simulated ranks: the times and the memory of invariants, any order, messages bounded."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from hpdl_lab import schedules
from hpdl_lab.comm import sim
from hpdl_lab.comm.errors import CommError
from hpdl_lab.comm.network import Switch
from hpdl_lab.parallel.pipeline.reports import TimedStage
from hpdl_lab.parallel.pipeline.run_schedule import AHEAD, Execution, run_schedule, timed_actions
from hpdl_lab.schedules import Action, Schedule, build
from hpdl_lab.schedules.catalog import FOLDED
from tests.properties import given

NOTHING_IN_BETWEEN = Switch(alpha=0.0, beta=0.0)


def carry_out(comm, schedule, forward, backward, done=None):
    """Stages that only take their time; returns when each of them was done, and the most that was under way."""
    v, ended = schedule.chunks, []
    stages = {
        number: TimedStage(comm.compute, forward / v, backward / v, forward / v, forward / v)
        for number in schedule.stages_of(comm.rank)
    }
    run_schedule(comm, schedule, stages, done=lambda stage: ended.append((stage, comm.trace.clock() / 1e9)))
    return ended


@pytest.mark.parametrize("name", schedules.CATALOG)
@given(p=st.integers(1, 6), m=st.integers(1, 9))
@settings(max_examples=8)
def test_ranks_take_the_time_and_the_memory_of_the_plan(name, p, m):
    """Which test_schedules.py compares with the formulas."""
    p += name == "dualpipe" and p % 2
    m = {"interleaved": p * -(-m // 4), "zero_bubble_h1": p + m - 1, "gems_mast": 2}.get(name, m)
    m += name in ("gems_master", "dualpipe")
    schedule = build(name, p, m)
    run = sim.run(p, carry_out, schedule, 1.0, 2.0, network=NOTHING_IN_BETWEEN)
    found, planned = schedules.summary(timed_actions(run.events, p)), schedules.evaluate(schedule, 1, 2)
    assert (run.seconds, found.makespan, found.peak) == (planned.makespan, planned.makespan, planned.peak)


def test_done_is_told_once_a_stage_after_its_last_backward():
    schedule = build("interleaved", 2, 4)
    run = sim.run(2, carry_out, schedule, 1.0, 2.0, network=NOTHING_IN_BETWEEN)
    times = schedules.evaluate(schedule, 1, 2)
    for row, ended in zip(times.rows, run, strict=True):
        last = {t.action.stage: t.end for t in row if t.action.kind == "B"}
        assert dict(ended) == last and len(ended) == len(last)


def random_schedule(draw):
    """A valid schedule without any order in mind: what can be done next is drawn, so too who does it."""
    ranks, chunks, micro_batches = draw.choice([(2, 2, 3), (3, 1, 4), (3, 2, 2), (4, 2, 3), (2, 3, 4)])
    stages = ranks * chunks
    holder = [draw.sample(range(ranks), ranks) for _ in range(chunks)]
    rank_of = [rank for part in holder for rank in part]
    left = []
    for stage in range(stages):
        for i in range(micro_batches):
            kinds = draw.choice(["FB", "FIW"])
            left += [Action(stage, kind, i) for kind in kinds]
    plan = Schedule("random", ranks, stages, micro_batches, 1, ((),) * ranks)
    rows, done = [[] for _ in range(ranks)], set()
    while left:
        ready = [a for a in left if all(any((s, k, i) in done for k in ks) for s, ks, i in plan.needs(a))]
        action = draw.choice(ready)
        left.remove(action)
        done.add(action)
        rows[rank_of[action.stage]].append(action)
    return Schedule(plan.name, ranks, stages, micro_batches, 1, tuple(map(tuple, rows)))


class Counting(TimedStage):
    """Passes on who it is for: every input must be that of the stage before, of the same micro-batch."""

    def __init__(self, number, last):
        super().__init__(lambda seconds: None, shape=(3,))
        self.number, self.last = number, last

    def forward(self, micro_batch, inputs, loss=None):
        assert not inputs or inputs[0].tolist() == [self.number - 1, micro_batch, 1.0]
        return (torch.tensor([self.number, micro_batch, 1.0]),)

    def backward(self, micro_batch, gradients=()):
        assert self.last or gradients[0].tolist() == [self.number + 1, micro_batch, -1.0]
        return (torch.tensor([self.number, micro_batch, -1.0]),)

    input_gradient = backward


class Watched(Execution):
    """Notes how many tensors were being received, and how many sent, at once."""

    most_posted = most_sent = 0

    def do(self, places):
        self.most_posted = max(self.most_posted, len(self.posted))
        super().do(places)
        self.most_sent = max(self.most_sent, sum(map(len, self.sends.values())))


def carry_out_counting(comm, schedule):
    last = schedule.stages - 1
    stages = {n: Counting(n, n % schedule.stages == last) for n in schedule.stages_of(comm.rank)}
    execution = Watched(comm, schedule, stages)
    execution.run()
    assert not execution.posted and not any(execution.unposted.values())
    return execution.most_posted, execution.most_sent


@given(st.randoms(use_true_random=False))
def test_any_valid_order_ends_and_no_message_is_mixed_up(draw):
    """Several stages of a rank share its messages with a peer; sends wait for their receive, as nothing is eager."""
    schedule = schedules.validate(random_schedule(draw))
    sim.run(schedule.ranks, carry_out_counting, schedule, network=Switch(alpha=0.001, beta=0.0))


def test_messages_under_way_do_not_grow_with_micro_batches():
    for name in ("1f1b", "interleaved", "zero_bubble_h1", "zero_bubble_v", "dualpipe", "dualpipe_v", "gems_master"):
        few, many = (sim.run(4, carry_out_counting, build(name, 4, m)) for m in (16, 64))
        assert max(posted for posted, _ in many) <= 1 + AHEAD + (name in FOLDED)
        assert [sent for _, sent in many] == [sent for _, sent in few], name


def refuse(comm, schedule, stages):
    try:
        run_schedule(comm, schedule, stages)
    except ValueError as error:
        assert not comm.trace.events
        return str(error)


def test_what_cannot_be_carried_out_is_refused_before_the_first_message():
    schedule, stages = build("1f1b", 3, 4), {n: None for n in range(3)}
    for said in sim.run(2, refuse, schedule, stages):
        assert said == "1f1b is a schedule for 3 ranks, and there are 2"
    assert sim.run(3, refuse, schedule, stages)[1] == "rank 1 of 1f1b has stages [1], and was given [0, 1, 2]"
    crossed = schedules.from_strings([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]], "crossed")
    for said in sim.run(2, refuse, crossed, stages):
        assert said.startswith("crossed deadlocks: rank 0 waits at 0B0 for 1B0 of rank 1, which waits at 1F1 for 0F1")


def fail_at(comm, schedule):
    class Fails(TimedStage):
        forgotten = False

        def backward(self, micro_batch, gradients=()):
            if comm.rank == 1 and micro_batch == 2:
                raise ZeroDivisionError("here")
            return super().backward(micro_batch, gradients)

        def forget(self):
            self.forgotten = True

    stages = {n: Fails(comm.compute) for n in schedule.stages_of(comm.rank)}
    try:
        run_schedule(comm, schedule, stages)
    finally:
        assert all(stage.forgotten for stage in stages.values())


def test_an_error_of_one_rank_ends_the_run_and_frees_the_stages():
    with pytest.raises(ZeroDivisionError, match="here") as error:
        sim.run(3, fail_at, build("1f1b", 3, 4))
    assert error.value.rank == 1 and not isinstance(error.value, CommError)
