"""Memory that ranks share: views of all tensors; what all-reduces move, under the roof of the memory; notebook 05."""

import numpy as np
import pytest
import torch

from hpdl_lab import features, lab
from hpdl_lab.checks.lessons.lesson_05 import COUNTED_RANKS, counted_bytes
from hpdl_lab.collectives import memory
from hpdl_lab.comm import sim
from hpdl_lab.plots import live
from hpdl_lab.verbs import roofline
from hpdl_lab.verbs.roofline import RooflineResult
from tests.wording import raises


def exchange(comm, n):
    whole = comm.allocate((2, n))
    part = comm.split(comm.rank % 2)
    halves = part.allocate(3, torch.int64).fill_(comm.rank)
    x = whole[1].fill_(comm.rank)
    comm.barrier()
    found = [view.tolist() for view in comm.views(x)], [view.tolist() for view in part.views(halves[1:])]
    comm.barrier()
    comm.views(x)[(comm.rank + 1) % comm.size].add_(10)
    comm.barrier()
    return *found, x.tolist(), whole[0].tolist()


@pytest.mark.parametrize("n", [0, 2])
def test_views_are_the_tensors_of_all_ranks_in_their_order(n):
    for rank, (views, of_part, x, untouched) in enumerate(sim.run(3, exchange, n)):
        assert views == [[0] * n, [1] * n, [2] * n] and of_part == ([[0, 0], [2, 2]] if rank % 2 == 0 else [[1, 1]])
        assert x == [rank + 10] * n and untouched == [0] * n


def test_a_tensor_from_elsewhere_has_no_views():
    with raises(ValueError, "make it with comm.allocate"):
        sim.run(2, lambda comm: comm.views(torch.ones(3)))


def test_every_rank_allocates_the_same():
    with raises(ValueError, "counts and dtypes differ", "rank 1", "(3,)", "(2,)"):
        sim.run(2, lambda comm: comm.allocate(2 + comm.rank))


@pytest.mark.parametrize("algorithm", memory.ALGORITHMS)
def test_what_was_counted_is_what_the_formula_says(algorithm):
    for p in COUNTED_RANKS:
        assert counted_bytes(algorithm, p) == pytest.approx(memory.bytes_moved(algorithm, p, 1))


def test_nothing_may_be_faster_than_the_memory():
    def rows(took_us):
        row = {"size": 2**20, "ranks": 2, "p25_us": 20.0, "time_us": 21.0}
        return [
            row | {"name": "in place", "stream": 2**21},
            row | {"name": "one pass", "stream": 0, "time_us": took_us},
        ]

    moved = {"one pass": (4.0, 4.0)}
    found = [RooflineResult("2 engines", 2, rows(took), moved, None) for took in (40.0, 19.5, 18.0)]
    assert found[0].bandwidth(2**20) == pytest.approx(2 * 2**21 / 20e-6)
    assert found[0].of_bound("one pass", 2**20) == pytest.approx(0.5)
    assert [result.too_fast for result in found] == [[], [], ["one pass"]]
    assert "which cannot be: one pass" in repr(found[2]) and "cannot" not in repr(found[1])


class TestOnEngines:
    @pytest.fixture(autouse=True)
    def engines(self, cluster, monkeypatch, tmp_path):
        monkeypatch.setattr("hpdl_lab.verbs.cluster._notebook._cluster", cluster)
        monkeypatch.setenv("HPDL_HOME", str(tmp_path))

    @pytest.mark.skipif(features.cores() < 2, reason="two ranks need a core each")
    def test_the_roof_and_all_reduces_below_it(self, monkeypatch):
        drawn = []
        monkeypatch.setattr(live.Live, "update", lambda self, *args: drawn.append(args))
        found = lab.roofline(sizes=("64KiB", "256KiB"), ranks=2, prediction={"staged": 2.5})
        names = ["copy", "add", "in place", "one pass", "staged", "ring"]
        assert [(r["size"], r["name"]) for r in found.rows] == [(n, name) for n in (2**16, 2**18) for name in names]
        assert len(drawn) == 12 and found.moved == {"one pass": (4, 4), "staged": (11, 11), "ring": (7, 11)}
        assert all(r["time_us"] > 0 for r in found.rows) and "256 KiB" in repr(found)
        assert found.of_bound("staged", 2**18) < found.of_bound("one pass", 2**18)

    def test_a_chunk_is_written_in_both_states(self, monkeypatch):
        monkeypatch.setattr(roofline, "MOST", 2**20)
        found = lab.write_again(prediction=3)
        states = [(r["memory"], r["read"], "read_us" in r) for r in found.rows]
        assert states == [(2**k, read, read) for k in (18, 19, 20) for read in (False, True)]
        assert all(0 < r["p25_us"] <= r["write_us"] <= r["p75_us"] for r in found.rows)
        assert found.slowdown(2**18) > 0 and "the other core" in repr(found)

    def test_guesses_about_something_else(self):
        with raises(ValueError, "times as long as one pass", "'tree'"):
            lab.roofline(ranks=2, prediction={"tree": 2})

    def test_one_pass_in_python_on_engines(self):
        run = lab.run(in_shared_memory, 1001, ranks=[0, 1, 2])
        assert all(np.array_equal(x, np.arange(1001) * 3 + 3) for x in run)


def in_shared_memory(comm, n):
    x = comm.allocate(n)
    x[:] = torch.arange(n) + comm.rank
    return memory.one_pass(comm, x).numpy().copy()


def test_without_engines_there_is_no_memory_to_measure(monkeypatch):
    monkeypatch.setattr("hpdl_lab.verbs.world.running", lambda: None)
    with raises(ValueError, "two engines on CPUs", "4 simulated ranks"):
        lab.roofline(ranks=4)
    with raises(ValueError, "lab.start(2)"):
        lab.write_again()
