"""lab.measure, lab.ping_pong and their sweep: correct first, timed second, predicted before."""

import numpy as np
import pytest

from hpdl_lab import lab
from hpdl_lab.collectives import cost, ring, sweep
from hpdl_lab.collectives.sweep import time_rounds
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import FatTree, Switch
from hpdl_lab.parallel.messages import ping_pong
from hpdl_lab.plots import live
from hpdl_lab.verbs.measure import MeasureResult, crossing, modelled
from tests.wording import raises

FEW = ("4", "1KiB", "64KiB")


@pytest.fixture(autouse=True)
def no_engines(monkeypatch, tmp_path):
    monkeypatch.setattr("hpdl_lab.verbs.world.running", lambda: None)
    monkeypatch.setenv("HPDL_HOME", str(tmp_path))


def test_rows_have_the_columns_of_nccl_tests_and_the_model_meets_the_simulated_ring():
    result = lab.measure(ring.all_reduce, FEW, against=(ring.all_reduce_naive,))
    rows = [r for r in result.rows if r["name"] == "your all_reduce"]
    assert [r["size"] for r in rows] == [4, 1024, 65536] and len(result.rows) == 6
    row = rows[-1]
    assert {"size", "count", "type", "time_us", "algbw_GBps", "busbw_GBps", "wrong"} < set(row)
    assert row["wrong"] == 0 and row["count"] == 16384
    assert row["busbw_GBps"] == pytest.approx(row["algbw_GBps"] * 1.5)
    for r in rows:
        assert r["time_us"] == pytest.approx(cost.all_reduce(4, r["size"]).seconds(2e-6, 8e-11) * 1e6, rel=1e-3)
    assert result.alpha == pytest.approx(2e-6, rel=1e-3) and result.beta == pytest.approx(8e-11, rel=1e-3)
    assert "4 simulated ranks" in repr(result) and "64 KiB" in repr(result)
    assert [len(lab.measure(ring.all_reduce, "1KiB", ranks=p).rows) for p in (1, 3)] == [1, 1]


def off_by_one(comm, x):
    ring.all_reduce(comm, x)
    if comm.rank == 2:
        x[-1] += 1


def average(comm, x):
    ring.all_reduce(comm, x)
    x /= comm.size


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (off_by_one, ("off_by_one", "rank 2", "1", "256 elements", "255", "50", "51")),
        (lambda comm, x: x[:2], ("rank 0", "256 elements", "2")),
        (average, ("its sum is wrong",)),
    ],
)
def test_a_wrong_function_is_refused_with_rank_index_and_both_numbers(fn, says):
    with raises(sweep.WrongAnswer, *says):
        lab.measure(fn, ("1KiB",))


def stub(comm, x):
    raise NotImplementedError("exercise 4.3")


@pytest.mark.parametrize(
    ("fn", "options", "error", "says"),
    [
        (stub, {}, NotImplementedError, ("exercise 4.3",)),
        (np.ones(3), {}, TypeError, ("got ndarray",)),
        ("rings", {}, LookupError, ("'rings'",)),
        ("ring", {"sizes": ()}, ValueError, ("1 message",)),
        ("ring", {"sizes": 6}, ValueError, ("6 bytes", "float32")),
        ("ring", {"sizes": "4 apples"}, ValueError, ("4 apples",)),
        ("ring", {"against": "nccl"}, ValueError, ("'nccl'",)),
        ("ring", {"against": "mpi"}, ValueError, ("lab.start(4)",)),
        ("ring", {"network": "fat tree"}, TypeError, ("fat tree",)),
    ],
)
def test_what_cannot_be_measured_is_said(fn, options, error, says):
    with raises(error, *says):
        lab.measure(fn, **options)


def test_a_prediction_is_drawn_over_the_measurement():
    guess = {"4": 20, "64 KiB": 100}
    figure = lab.measure(lambda comm, x: ring.all_reduce(comm, x), FEW, prediction=guess).figure
    drawn = next(line for line in figure.axes[0].lines if len(line.get_xdata()) == 2)
    assert [*drawn.get_xdata(), *drawn.get_ydata()] == pytest.approx([4, 65536, 20e-6, 1e-4])
    assert {"your guess", "your function", "ring model"} <= {t.get_text() for t in figure.axes[1].texts}


def test_a_size_at_which_curves_are_expected_to_cross_is_drawn():
    figure = lab.measure("ring", FEW, against="tree", prediction="2KiB").figure
    assert [2048, 2048] in [list(line.get_xdata()) for line in figure.axes[0].lines]


@pytest.mark.parametrize("guess", [{}, 20, {"4": -1}, {"4": "fast"}, {"4 apples": 20}])
def test_predictions_that_are_none_are_refused(guess):
    with pytest.raises(ValueError):
        lab.ping_pong(prediction=guess)


def test_ping_pong_finds_the_network():
    fitted = sim.run(3, sweep.ping_pong, 1, 1, network=Switch(alpha=5e-6, beta=1e-9))
    assert fitted[2] == fitted[0] == pytest.approx((5e-6, 1e-9, 0), rel=1e-3)
    assert sim.run(1, sweep.ping_pong)[0] == (0, 0, 0)


def test_timing_records_no_events_and_recording_goes_on_afterwards():
    def body(comm):
        before = len(comm.trace.events)
        times = sweep.sample_calls(comm, lambda comm, _: ring.all_reduce(comm, np.ones(100)), np.zeros(0), 5, 10_000)
        events = len(comm.trace.events)
        comm.barrier()
        return events - before, comm.trace.enabled, len(times), len(comm.trace.events) - events

    for recorded, enabled, samples, after in sim.run(3, body):
        assert (enabled, samples, after) == (True, 5, 1)
        assert recorded <= 4  # of the agreement on the times, not of the 100 calls


def test_the_picture_is_finished_when_the_run_breaks_in_the_middle(monkeypatch):
    frames = []
    monkeypatch.setattr(live.Live, "finish", lambda self, rows, *args: frames.append(len(rows)))

    def small_only(comm, x):
        if len(x) > 1000:
            raise MemoryError("too large")
        return ring.all_reduce(comm, x)

    with pytest.raises(MemoryError, match="too large"):
        lab.measure(small_only, FEW)
    with pytest.raises(ZeroDivisionError):
        lab.measure(lambda comm, x: 1 / 0, FEW)
    assert frames == [2]  # a run without any row leaves no empty picture


def test_algorithms_race_by_name_on_any_network():
    network = Switch(alpha=1e-5, beta=1e-9)
    result = lab.measure("ring", ("64", "4KiB", "1MiB"), ranks=16, against=("tree", "double_tree"), network=network)
    assert list(dict.fromkeys(r["name"] for r in result.rows)) == ["ring", "tree", "double_tree"]
    for r in result.rows:
        if r["name"] == "tree":
            assert r["time_us"] == pytest.approx(cost.tree(16, r["size"]).seconds(1e-5, 1e-9) * 1e6, rel=1e-3)
    met, paper = result.crossover("tree", "ring"), result.modelled_crossover("tree", "ring")
    assert 64 < met < 2**20 and paper == pytest.approx(2.2e5 * 22 / 6.125 / 16, rel=0.6) and 0.3 < met / paper < 3
    with raises(ValueError, "'mpi'", "'ring'", "'tree'"):
        result.crossover("ring", "mpi")
    with raises(ValueError, "16"):
        result.share("ring")


def test_a_network_may_be_given_while_engines_run(monkeypatch):
    monkeypatch.setattr("hpdl_lab.verbs.world.running", lambda: pytest.fail("the engines were asked for"))
    result = lab.measure("ring", "1KiB", ranks=8, network=FatTree(4, 2))
    assert "8 simulated ranks" in repr(result)
    assert "ring model" not in {t.get_text() for t in result.figure.axes[1].texts}  # ranks 0 and 1 share a leaf
    assert result.figure.texts[-1].get_text().startswith("FatTree, hosts per leaf 4, oversubscription 2: virtual")


def test_where_two_curves_cross():
    sizes = (1, 10, 100, 1000)
    flat, rising = dict.fromkeys(sizes, 30.0), {n: float(n) for n in sizes}
    assert crossing(flat, rising) == crossing(rising, flat) == pytest.approx(30)
    assert crossing(flat, dict.fromkeys(sizes, 20.0)) is None
    assert crossing({1: 1.0}, {1: 2.0}) is None
    noisy = {1: 29.0, 10: 31.0, 100: 29.0, 1000: 31.0}  # the last crossing counts
    assert 100 < crossing(flat, noisy) < 1000


def test_the_share_of_a_link_is_that_of_the_largest_size():
    points = (("yours", 64, 0.2), ("yours", 2**20, 0.1), ("MPI", 64, 0.3), ("MPI", 2**20, 0.05))
    rows = [{"name": n, "size": s, "time_us": 1.0, "busbw_GBps": b, "ranks": 4, "cores": 4} for n, s, b in points]
    result = MeasureResult("4 engines at 1gbit", rows, 1e-5, 8e-9, 0.0, {"MPI": {64: 5e-7}}, 0.125, None, None)
    assert result.share("yours") == pytest.approx(0.8)
    assert "at 1 MiB: yours reaches 80%, MPI reaches 40%." in repr(result)
    assert repr(result).split("\n")[5].split() == ["64", "B", "2.00"], "measured over simulated"


# -- messages ---------------------------------------------------------------------------------------------------------


def test_the_fit_finds_the_simulated_network():
    link = lab.ping_pong(prediction={"8": 10, "1MiB": 1000})
    assert link.alpha == pytest.approx(2e-6, rel=1e-3) and link.beta == pytest.approx(8e-11, rel=1e-3)
    assert link.nbytes[0] == 8 and link.nbytes[-1] == 8 * 2**20 and len(link.nbytes) == len(link.seconds) == 11
    assert link.seconds == pytest.approx([2e-6 + 8e-11 * n for n in link.nbytes], rel=1e-3)
    assert "4 simulated ranks" in repr(link) and "α = 2 µs" in repr(link) and "25,000 B half" in repr(link)
    assert {"your guess", "α + β n", "measured"} <= {t.get_text() for t in link.figure.axes[1].texts}


def test_one_way_is_half_a_round_and_other_ranks_look_on():
    rows = sim.run(3, time_rounds, ping_pong, (100,), 1, 0, network=Switch(alpha=1e-3, beta=1e-5)).rows
    assert [r["size"] for r in rows] == [100] and rows[0]["seconds"] == pytest.approx(2e-3)


def forgets(comm, x):
    if comm.rank == 0:
        comm.send(x, 1)
    elif comm.rank == 1:
        comm.recv(x, 0)
        x += 1


@pytest.mark.parametrize(
    ("fn", "options", "error", "says"),
    [
        (forgets, {"sizes": ("64", "1KiB")}, sweep.WrongAnswer, ("64", "rank 1")),
        (lambda comm, x: None, {}, sweep.WrongAnswer, ("8", "rank 1")),
        (ping_pong, {"sizes": "1KiB"}, ValueError, ("2", "1")),
        (ping_pong, {"ranks": 1}, ValueError, ("needs two ranks",)),
        ("8", {}, TypeError, ("got str",)),
        (stub, {}, NotImplementedError, ("exercise",)),
    ],
)
def test_what_makes_no_line_is_said(fn, options, error, says):
    with raises(error, *says):
        lab.ping_pong(fn, **options)


def test_on_engines_the_time_is_real(cluster, monkeypatch):
    monkeypatch.setattr("hpdl_lab.verbs.world.running", lambda: cluster)
    monkeypatch.setattr("hpdl_lab.verbs.world.run", cluster.run)
    link = lab.ping_pong(sizes=(8, "64KiB", "1MiB"))
    assert "4 engines" in repr(link) and 0 < link.alpha < 0.1 and min(link.seconds) > 0


def test_messages_of_all_ranks_at_once_cost_what_links_that_nobody_shares_cost():
    network = Switch(alpha=5e-6, beta=1e-9)
    for found in sim.run(4, sweep.all_at_once, 1, 1, network=network):
        assert found == pytest.approx((5e-6, 1e-9, 0.0), rel=1e-3)


def test_the_ring_model_is_that_of_ranks_that_send_at_once():
    fit = {"alpha": 1e-6, "beta": 1e-9, "gamma": 0.0, "contended": (2e-6, 7e-9, 1e-10)}
    alone, ring = modelled(4, [2**22], fit)
    assert (alone.name, ring.name) == ("no contention", "ring model")
    assert ring.seconds[2**22] / alone.seconds[2**22] == pytest.approx(7, rel=0.02)
    (only,) = modelled(4, [2**22], fit | {"contended": None})
    assert only.name == "ring model" and only.seconds == alone.seconds
