"""The input pipeline: what it costs shows in the timeline, reading ahead hides it, and ranks change nothing."""

import threading
import time

import pytest
import torch

from hpdl_lab.comm import sim, world
from hpdl_lab.data.loading import Reader, shifted
from tests.wording import raises

X = torch.arange(40.0).view(20, 2)
Y = torch.arange(20)
SCHEDULE = [(step, torch.arange(8) + 4 * step) for step in range(4)]  # four steps of 8 examples


def steps_of(comm, reader, seconds_per_step=0.0, schedule=SCHEDULE):
    """Take every step's shard inside a span "input", then compute; returns the shards' x."""
    seen = []
    shards = reader.shards(comm, X, Y, iter(schedule), seed=3)
    for _ in schedule:
        with comm.trace.span("input"):
            x, y, batch = next(shards)
        assert batch == 8 and torch.equal(x[:, 0], 2.0 * y) or reader.prepare
        seen.append(x)
        comm.compute(seconds_per_step)
    return seen


def input_ms(events, rank=0):
    return [(e.t1_ns - e.t0_ns) / 1e6 for e in events if e.op == "input" and e.rank == rank]


@pytest.mark.parametrize(
    ("ahead", "step_ms", "expected"),
    [  # 4 examples per rank of 1 ms each: 4 ms to read a step
        (0, 10, [4, 4, 4, 4]),  # every step waits
        (1, 10, [4, 0, 0, 0]),  # read during the last step, which takes longer
        (1, 3, [4, 1, 1, 1]),  # ... or not long enough
        (2, 3, [4, 1, 1, 1]),  # reading further ahead makes no slow storage fast
        (9, 0, [4, 4, 4, 4]),  # further ahead than there are steps
    ],
)
def test_what_reading_costs_is_seen_on_simulated_ranks_to_the_nanosecond(ahead, step_ms, expected):
    done = sim.run(2, steps_of, Reader(seconds=1e-3, ahead=ahead), step_ms / 1e3)
    for rank in (0, 1):
        assert input_ms(done.events, rank) == pytest.approx(expected, abs=1e-5)
    assert done.seconds == pytest.approx((sum(expected) + 4 * step_ms) / 1e3)


@pytest.mark.parametrize("reader", [Reader(), Reader(ahead=1), Reader(ahead=7), Reader(seconds=1e-3, ahead=2)])
def test_no_reader_changes_what_is_read(reader):
    for p in (1, 3):
        for seen in zip(*sim.run(p, steps_of, reader), strict=True):
            assert len(seen) == p
        steps = zip(*sim.run(p, steps_of, reader), strict=True)
        for (_, indices), parts in zip(SCHEDULE, steps, strict=True):
            assert torch.equal(torch.cat(parts), X[indices])


def jitter(x, numbers):
    """Augment in a way that tells which random number each example was given."""
    return x + (numbers % 97)[:, None]


def test_augmentation_is_the_same_on_any_number_of_ranks():
    told = [
        [torch.cat(parts) for parts in zip(*sim.run(p, steps_of, Reader(prepare=jitter)), strict=True)]
        for p in (1, 3, 8)
    ]
    for step in range(4):
        assert all(torch.equal(other[step], told[0][step]) for other in told)
    assert not torch.equal(told[0][0] - X[SCHEDULE[0][1]], told[0][1] - X[SCHEDULE[1][1]])  # another for each step


def test_shifted_moves_each_image_by_at_most_a_pixel():
    image = torch.zeros(9, 1, 8, 8)
    image[:, :, 4, 4] = 1
    places = [tuple(i.nonzero()[0].tolist()) for i in shifted(image, torch.arange(9))[:, 0]]
    assert sorted(places) == [(i, j) for i in (3, 4, 5) for j in (3, 4, 5)]
    edge = torch.zeros(9, 1, 8, 8)
    edge[:, :, 0, 0] = 1  # what is moved over the edge does not come back on the other side
    moved = shifted(edge, torch.arange(9))
    assert float(moved[:, :, 7].sum() + moved[:, :, :, 7].sum()) == 0


def test_real_ranks_wait_or_read_beside_in_a_thread():
    """One real rank, this process: what reading costs is slept, in this thread or in another one."""
    where = []

    def note(x, numbers):
        where.append(threading.current_thread().name)
        return x

    comm = world()
    schedule = SCHEDULE[:3]
    begin = time.monotonic()
    steps_of(comm, Reader(seconds=2e-3, prepare=note), schedule=schedule)
    waited = time.monotonic() - begin
    assert waited >= 3 * 8 * 2e-3 and set(where) == {threading.current_thread().name}
    where.clear()
    steps_of(comm, Reader(ahead=1, prepare=note), schedule=schedule)
    assert len(where) == 3 and all(name.startswith("reader") for name in where)


def test_an_error_in_the_readers_thread_reaches_the_rank_and_the_thread_ends():
    def broken(x, numbers):
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        steps_of(world(), Reader(ahead=2, prepare=broken))
    shards = Reader(ahead=2).shards(world(), X, Y, iter(SCHEDULE))
    next(shards)
    shards.close()  # as training does, however it ends
    deadline = time.monotonic() + 30
    while any(thread.name.startswith("reader") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("options", [{"seconds": "1"}, {"ahead": 1.5}, {"prepare": 3}], ids=repr)
def test_what_is_no_number_and_no_function_is_refused(options):
    ((name, value),) = options.items()
    with raises(TypeError, f"{name}={value!r}"):
        Reader(**options)
