"""Each second of a training with failures is accounted for, and no step of it is lost."""

import os
import random
import re
import time

import pytest

from hpdl_lab.data.dataset import digits
from hpdl_lab.models.mlp import mlp
from hpdl_lab.resilience.goodput import Interval, Life, divide_wall_time, measure_goodput

EVERY = 4  # steps from checkpoint to checkpoint


def parts_of(measured):
    return [getattr(measured, f"{part}_s") for part in ("useful", "write", "repeated", "notice", "restart")]


def train(cluster, restart=None, **how):
    model, data = mlp((64, 8, 10), dtype="float64"), digits("float64")
    how = {"checkpoint_every": EVERY, "deadline": 60, "batch": 50} | how
    return measure_goodput(cluster.run, restart or cluster.restart, model, data, **how)


def test_a_failure_on_engines_is_accounted_for_and_costs_no_step(cluster, capsys):
    begun, restarts = time.time(), []

    def restart():
        before = time.time()
        cluster.restart()
        restarts.append(time.time() - before)

    broken = train(cluster, restart, every_s=2)
    took = time.time() - begun
    whole = train(cluster, steps=len(broken.losses), failures=0)
    done = int(re.search(r"killed after ([\d,]+) step", capsys.readouterr().out)[1].replace(",", ""))
    assert len(broken.losses) == max(2 * done, done + EVERY) and broken.losses == pytest.approx(whole.losses, abs=1e-10)
    assert (broken.failures, whole.failures, len(restarts)) == (1, 0, 1)
    for measured in (broken, whole):
        assert min(parts_of(measured)) >= 0 and sum(parts_of(measured)) == pytest.approx(measured.wall_s, abs=1e-6)
    if broken.notice_s:  # else it was killed before its first step, on a very slow machine
        assert restarts[0] <= broken.restart_s < broken.wall_s < took
    assert parts_of(whole)[2:] == [0, 0, 0] and whole.goodput == whole.useful_s / whole.wall_s < 1
    assert whole.writes == (len(whole.losses) - 1) // EVERY, "the one after the last step is not in the time"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 3])
def test_kills_at_random_moments_lose_no_step_and_repeat_none(rank, cluster):
    """HPDL_KILLS=100 kills each of the two ranks a hundred times, in about ten minutes."""
    kills, rng = int(os.environ.get("HPDL_KILLS", "3")), random.Random(rank)
    broken = train(cluster, failures=kills, every_s=lambda: rng.uniform(0.01, 1), rank=rank)
    whole = train(cluster, steps=len(broken.losses), failures=0)
    assert broken.failures == kills and broken.losses == pytest.approx(whole.losses, abs=1e-10)


def test_no_rank_is_killed_that_is_not_there(cluster):
    for rank in (0, 4):
        with pytest.raises(RuntimeError, match=f"rank={rank} of 4"):
            train(cluster, every_s=1, rank=rank)


def test_other_errors_are_not_taken_for_failures(cluster):
    with pytest.raises(RuntimeError, match="batch"):
        train(cluster, every_s=1, batch=3)  # fewer examples than ranks


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"checkpoint_every": 0}, {"failures": -1}, {"every_s": 0, "failures": 1}, {"steps": None}]
)
def test_what_cannot_be(wrong):
    with pytest.raises(ValueError, match=[*wrong][0]):
        measure_goodput(None, None, mlp(), None, **({"steps": 1, "checkpoint_every": 1, "failures": 0} | wrong))


def test_parts():
    lives = [
        Life([Interval(0, 10, [11, 12]), Interval(2, 13, [14, 15]), Interval(4, 16.5, [17])], died=18, noticed=20),
        Life([], died=24, noticed=25),
        Life([Interval(4, 30, [31, 32]), Interval(6, 32.5, [34])]),
    ]
    found = divide_wall_time(lives, [1.0] * 7)
    assert parts_of(found) == [2 + 2 + 2 + 1.5, 1 + 1.5 + 0.5, 1.5, 2 + 1, 4 + 5]
    assert (found.wall_s, found.failures, found.writes, found.goodput) == (24, 2, 3, 7.5 / 24)
    assert "7 steps in 24.0 s, 2 failed: useful 31.2%" in str(found)


def test_a_checkpoint_that_is_written_when_a_rank_dies_is_kept():
    lives = [Life([Interval(0, 10, [11, 12])], died=13, noticed=14), Life([Interval(2, 15, [16, 17])])]
    assert parts_of(divide_wall_time(lives)) == [4, 1, 0, 1, 1]


def test_a_failure_before_the_first_checkpoint_loses_all():
    lives = [Life([], 5, 6), Life([Interval(0, 10, [11])], died=12, noticed=14), Life([Interval(0, 15, [16, 17])])]
    found = divide_wall_time(lives)
    assert parts_of(found) == [2, 0, 2, 2, 1] and (found.wall_s, found.failures, found.writes) == (7, 2, 0)
