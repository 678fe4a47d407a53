"""Schedules beside those of torch.distributed.pipelining: its parser, its validator, its own orders, its files."""

from types import SimpleNamespace

import pytest

from hpdl_lab.comm import sim
from hpdl_lab.parallel.pipeline.reports import TimedStage
from hpdl_lab.parallel.pipeline.run_schedule import run_schedule
from hpdl_lab.schedules import build, evaluate, from_csv, from_strings, to_csv, to_strings, validate

OURS = [("gpipe", 4, 8), ("1f1b", 4, 8), ("1f1b", 3, 7), ("interleaved", 4, 8), ("zero_bubble_h1", 4, 9),
        ("zero_bubble_v", 4, 8)]  # fmt: skip
SHAPES = [(1, 1), (2, 2), (2, 5), (3, 4), (4, 4), (4, 8), (4, 11), (8, 16)]


@pytest.fixture(scope="module")
def theirs():
    """torch's schedules, which take a second to import: not in every process that collects tests."""
    import torch.distributed.pipelining.schedules as schedules

    return schedules


def stages_of(rank, p, chunks=1):
    """What torch's schedules ask of stages when they lay out their order."""
    return [
        SimpleNamespace(
            num_stages=p * chunks, group_size=p, group_rank=rank, stage_index=chunk * p + rank, submod=None,
            is_first=chunk * p + rank == 0, is_last=chunk * p + rank == p * chunks - 1,
        )
        for chunk in range(chunks)
    ]  # fmt: skip


def order_of(schedule):
    """torch's pipeline_order as rows of strings, without its pauses and without what it adds for other purposes."""
    order = schedule.pipeline_order
    return [[str(a) for a in order[r] if a is not None and "REDUCE" not in str(a)] for r in sorted(order)]


def parsed(theirs, schedule):
    return {rank: [theirs._Action.from_str(text) for text in row] for rank, row in enumerate(to_strings(schedule))}


@pytest.mark.parametrize(("name", "p", "m"), OURS)
def test_torch_reads_and_validates_ours(theirs, name, p, m):
    schedule = build(name, p, m)
    actions = parsed(theirs, schedule)
    assert [[str(a) for a in actions[r]] for r in range(p)] == to_strings(schedule)
    ranks = theirs._validate_schedule(actions, p, schedule.stages, m)
    assert ranks == {stage: schedule.rank_of(stage) for stage in range(schedule.stages)}
    with_messages = theirs._add_send_recv(parsed(theirs, schedule), schedule.rank_of, schedule.stages)
    theirs._simulate_comms_compute(with_messages, schedule.rank_of, schedule.stages)  # raises where it would deadlock
    assert from_strings([[str(a) for a in with_messages[r]] for r in range(p)], name).rows == schedule.rows
    assert "Rank 3" in theirs._format_pipeline_order(actions) or p == 3


def executed(kind, rank, p, m):
    """The order in which a schedule of torch calls the stage of `rank`, which only writes down what it is asked."""
    done, stage = [], stages_of(rank, p)[0]
    stage.is_last = False  # there is no loss to be kept
    stage.forward_one_chunk = lambda i, *args, **kwargs: done.append(f"{rank}F{i}")
    stage.backward_one_chunk = lambda i, **kwargs: done.append(f"{rank}B{i}")
    stage.get_fwd_recv_ops = stage.get_fwd_send_ops = stage.get_bwd_recv_ops = stage.get_bwd_send_ops = lambda i: []
    stage.perform_reduce_grad = lambda scale: None
    schedule = kind(stage, m, loss_fn=lambda output, target: None)
    schedule._initialize_stage = lambda *args: None
    schedule._step_microbatches([()] * m, [{}] * m, None)
    return done


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_gpipe_and_1f1b_do_what_torchs_do(theirs, p, m):
    for name, kind in (("gpipe", theirs.ScheduleGPipe), ("1f1b", theirs.Schedule1F1B)):
        assert [executed(kind, rank, p, m) for rank in range(p)] == to_strings(build(name, p, m))


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_gpipe_and_1f1b_are_as_torch_writes_them_down(theirs, p, m):
    stage = stages_of(0, p)[0]
    assert order_of(theirs.ScheduleGPipe(stage, m)) == to_strings(build("gpipe", p, m))
    ours, listed = to_strings(build("1f1b", p, m)), order_of(theirs.Schedule1F1B(stage, m))
    assert ours[:-1] == listed[:-1]
    # For the last rank torch 2.13 lists F1 where it executes F0 (see above), which its own validator refuses.
    assert listed[-1] in (ours[-1], [f"{p - 1}{kind}{i + (kind == 'F')}" for i in range(m) for kind in "FB"])


@pytest.mark.parametrize(
    ("p", "m", "v"), [(2, 2, 2), (2, 4, 3), (4, 4, 2), (4, 8, 2), (4, 8, 3), (8, 16, 2), (3, 6, 1)]
)
def test_interleaved_is_torchs(theirs, p, m, v):
    assert order_of(theirs.ScheduleInterleaved1F1B(stages_of(0, p, v), m)) == to_strings(build("interleaved", p, m, v))


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 6), (3, 3), (4, 4), (4, 8), (8, 16)])
def test_zb_h1_is_torchs_zero_bubble_of_one_stage_per_rank(theirs, p, m):
    assert order_of(theirs.ScheduleInterleavedZeroBubble(stages_of(0, p), m)) == to_strings(
        build("zero_bubble_h1", p, m)
    )


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (3, 7), (4, 8), (4, 13), (8, 16)])
def test_zb_v_and_dualpipe_v_are_torchs(theirs, p, m):
    """Torch's own layout asks for as many ranks as a V has; DualPipe-V's pairs are its OVERLAP_F_B."""
    for name, kind in (("zero_bubble_v", "ScheduleZBVZeroBubble"), ("dualpipe_v", "ScheduleDualPipeV")):
        listed = order_of(getattr(theirs, kind)(stages_of(0, p, 2), m))
        assert listed == to_strings(build(name, p, m)), name
        assert from_strings(listed, name) == build(name, p, m)


@pytest.mark.parametrize("name", ["gems_master", "dualpipe"])
def test_torch_reads_the_actions_of_replicas_though_it_has_none(theirs, name):
    schedule = build(name, 4, 8)
    assert [[str(a) for a in row] for row in parsed(theirs, schedule).values()] == to_strings(schedule)


def timed_step(comm, schedule):
    """Carry out `schedule` with stages that take half a unit for F, I and W, and one for B: two stages per rank."""
    stages = {n: TimedStage(comm.compute, 0.5, 1.0, 0.5, 0.5) for n in schedule.stages_of(comm.rank)}
    run_schedule(comm, schedule, stages)


@pytest.mark.parametrize("kind", ["ScheduleDualPipeV", "ScheduleLoopedBFS"])
def test_schedules_of_torch_are_taken_over_and_carried_out(theirs, kind):
    p, m = 4, 8
    torchs = getattr(theirs, kind)(stages_of(0, p, 2), m)
    schedule = validate(from_strings([[str(a) if a else "" for a in torchs.pipeline_order[r]] for r in range(p)], kind))
    assert (schedule.stages, schedule.micro_batches) == (8, m)
    assert schedule.stages_of(0) == ([0, 7] if kind == "ScheduleDualPipeV" else [0, 4])
    run = sim.run(p, timed_step, schedule)
    assert run.seconds == pytest.approx(evaluate(schedule).makespan, rel=1e-4)  # but for microseconds of messages
    assert evaluate(schedule).makespan == (27 if kind == "ScheduleDualPipeV" else 28.5)


def test_files_go_both_ways(theirs, tmp_path):
    torchs, ours = theirs.ScheduleInterleaved1F1B(stages_of(0, 2, 2), 4), build("interleaved", 2, 4)
    torchs._dump_csv(tmp_path / "theirs.csv")
    assert from_csv(tmp_path / "theirs.csv", "interleaved") == ours
    to_csv(ours, tmp_path / "ours.csv")
    torchs.pipeline_order = {}
    torchs._load_csv(tmp_path / "ours.csv")
    assert order_of(torchs) == to_strings(ours)
