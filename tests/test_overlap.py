"""The alpha-beta-overlap model: what hides and what shows; simulated ranks with real messages take the same time."""

import numpy as np
import pytest

from hpdl_lab.collectives import cost, ring
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import Switch
from hpdl_lab.parallel.scaling.overlap import (
    Both,
    Interference,
    Message,
    StepProfile,
    interference,
    median_of,
    profile_for,
    step_time,
    together,
)

MS = 1e-3
SIZES = (400_000, 40_000, 4_000)  # bytes, of three buckets; each a multiple of 8 chunks of float32


def profile(background, samples=8):
    """forward 2 ms, backward until 8 ms with a bucket at 4, 6 and 8 ms, or all of them after it; 10 ms in all."""
    when = (4, 6, 8) if background else (8.2, 8.4, 8.6)
    messages = tuple(Message(at * MS, n, background) for at, n in zip(when, SIZES, strict=True))
    return StepProfile(samples, 2 * MS, 8 * MS, 9 * MS, 10 * MS, messages)


def test_blocking_messages_add_up():
    modelled = step_time(profile(False), lambda nbytes: 1 * MS)
    assert modelled == pytest.approx((13 * MS, 3 * MS, 3 * MS))
    assert modelled.overlap_share == pytest.approx(0) and modelled.exposed_share == pytest.approx(3 / 13)


@pytest.mark.parametrize(
    ("each_ms", "step_ms", "exposed_ms"),
    [
        (1, 11, 1),  # the last bucket is ready when backward ends: it alone shows
        (2, 12, 2),  # each ends when the next one is ready
        (3, 15, 5),  # they queue: the lane is busy from 4 to 13 ms, backward ends at 8
        (0, 10, 0),
    ],
)
def test_messages_in_the_background_hide_behind_backward(each_ms, step_ms, exposed_ms):
    modelled = step_time(profile(True), lambda nbytes: each_ms * MS)
    assert modelled == pytest.approx((step_ms * MS, 3 * each_ms * MS, exposed_ms * MS))


@pytest.mark.parametrize(
    ("disturbed", "each_ms", "step_ms"),
    [
        ((0.5, 1), 1, 12),  # computing loses a half of the 2 ms beside messages 0 and 1, which then end in time
        ((1, 0.5), 1, 11),  # the messages take 2 ms each, and just end when the next is ready; the last waits alone
        ((1, 0), 1, 13),  # nothing gets on beside computing: all three show
        ((0.5, 0.5), 2, 18 - 4 / 2),  # computing 4..8 takes until 12, with 4 of 6 ms of messages done by then; then 2
        ((1, -0.5), 1, 15),  # 4 ms of computing cost the messages 2 ms more than nothing would
    ],
)
def test_computing_and_messages_slow_each_other_down(disturbed, each_ms, step_ms):
    disturbed = profile(True)._replace(interference=Interference(*disturbed))
    assert step_time(disturbed, lambda nbytes: each_ms * MS).seconds == pytest.approx(step_ms * MS)


@pytest.mark.parametrize("disturbed", [(1, 1), (0.5, 1), (1, 0.5), (0.6, 0.3), (0.8, 0.0), (0.9, -0.5), (1.2, 1)])
@pytest.mark.parametrize("each_ms", [1.5, 4])
def test_the_three_timings_give_the_interference_back(disturbed, each_ms):
    disturbed, time_of = Interference(*disturbed), lambda nbytes: each_ms * MS
    found = interference(profile(True), time_of, together(profile(True), time_of, disturbed))
    assert found == pytest.approx(disturbed, abs=0.01)


def test_of_what_hardly_overlaps_nothing_is_said():
    late = profile(True)._replace(messages=(Message(9.6 * MS, 4000, True),))
    assert interference(late, lambda nbytes: 1 * MS, Both(14 * MS, 20 * MS)) == (1, 1)


def test_nothing_to_say_is_no_communication():
    assert step_time(profile(True)._replace(messages=()), None) == (10 * MS, 0.0, 0.0)
    assert step_time(StepProfile(1, 0, 0, 0, 0), None).exposed_share == 0


def step(comm, profile):
    """What `profile` says on a simulated rank, with the messages of a ring."""
    done, works = 0.0, []
    for message in profile.messages:
        comm.compute(message.at - done)
        done, x = message.at, np.zeros(message.nbytes // 4, np.float32)
        works.append(comm.background(ring.all_reduce, x))
        if not message.background:
            works.pop().wait()
    comm.compute(max(0.0, profile.waits - done))
    for work in works:
        work.wait()
    comm.compute(profile.end - max(done, profile.waits))


@pytest.mark.parametrize("p", [1, 2, 3, 8])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("beta", [1e-9, 2e-8])
def test_simulated_ranks_take_the_time_of_the_model(p, background, beta):
    """Real messages of a ring on a switch: the formula is exact where chunks are of equal size, near it otherwise."""
    alpha = 5e-6
    run = sim.run(p, step, profile(background), network=Switch(alpha, beta))
    modelled = step_time(profile(background), lambda n: cost.all_reduce(p, n).seconds(alpha, beta))
    assert run.seconds == pytest.approx(modelled.seconds, rel=1e-3 if p == 3 else 1e-9)


def test_profiles_between_and_beyond_measured_ones_lie_on_lines():
    few, many = profile(True, 8), StepProfile(16, *(2 * t for t in profile(True)[1:5]), profile(True).messages)
    assert profile_for([few, many], 8) is few
    between = profile_for([few, many], 12)
    assert between.samples == 12 and between.end == pytest.approx(15 * MS)
    assert profile_for([few, many], 32).end == pytest.approx(40 * MS)
    assert profile_for([few, many], 0).end == 0.0, "never below 0"
    assert profile_for([few], 3)._replace(samples=8) == few, "one alone is for any number"
    assert [m.nbytes for m in between.messages] == list(SIZES)


def test_a_median_of_profiles_is_one_of_their_times():
    slow = StepProfile(8, *(3 * t for t in profile(True)[1:5]), profile(True).messages)
    assert median_of([profile(True), slow, profile(True)]) == profile(True)
