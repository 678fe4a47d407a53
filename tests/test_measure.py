"""lab.measure and its sweep: correct first, timed second, predicted before."""

import numpy as np
import pytest
from hpdl_lab.lab.crossing import crossing

from hpdl_lab import lab
from hpdl_lab.collectives import cost, ring, sweep
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import FatTree, Switch
from hpdl_lab.lab.measure import MeasureResult
from hpdl_lab.plots import live, style
from hpdl_lab.plots import measure as plot

FEW = ("4", "1KiB", "64KiB")


@pytest.fixture(autouse=True)
def no_engines(monkeypatch, tmp_path):
    monkeypatch.setattr("hpdl_lab.lab.ranks.running", lambda: None)
    monkeypatch.setenv("HPDL_HOME", str(tmp_path))


def test_rows_have_the_columns_of_nccl_tests_and_the_model_meets_the_simulated_ring():
    result = lab.measure(ring.all_reduce, FEW)
    assert [r["size"] for r in result.rows] == [4, 1024, 65536]
    row = result.rows[-1]
    assert {"size", "count", "type", "time_us", "algbw_GBps", "busbw_GBps", "wrong"} < set(row)
    assert row["name"] == "your all_reduce" and row["wrong"] == 0 and row["count"] == 16384
    assert row["busbw_GBps"] == pytest.approx(row["algbw_GBps"] * 1.5)
    for r in result.rows:
        assert r["time_us"] == pytest.approx(cost.all_reduce(4, r["size"]).seconds(2e-6, 8e-11) * 1e6, rel=1e-3)
    assert result.alpha == pytest.approx(2e-6, rel=1e-3) and result.beta == pytest.approx(8e-11, rel=1e-3)
    assert "4 simulated ranks" in repr(result) and "64 KiB" in repr(result)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_any_number_of_ranks(p):
    assert len(lab.measure(ring.all_reduce, FEW, ranks=p).rows) == 3


def test_a_wrong_function_is_refused_with_rank_index_and_both_numbers():
    def off_by_one(comm, x):
        ring.all_reduce(comm, x)
        if comm.rank == 2:
            x[-1] += 1

    sentence = "your off_by_one is not timed.*on rank 2, 1 of 256 elements, first at index 255: expected 50, got 51"
    with pytest.raises(sweep.WrongAnswer, match=sentence):
        lab.measure(off_by_one, ("1KiB",))


def test_a_result_of_another_size_is_refused():
    with pytest.raises(sweep.WrongAnswer, match="rank 0 gave 256 elements and got 2 back"):
        lab.measure(lambda comm, x: x[:2], ("1KiB",))


def test_an_average_is_not_a_sum():
    def average(comm, x):
        ring.all_reduce(comm, x)
        x /= comm.size

    with pytest.raises(sweep.WrongAnswer, match="its sum is wrong"):
        lab.measure(average, ("1KiB",))


def test_a_stub_stays_a_stub():
    def all_reduce(comm, x):
        raise NotImplementedError("exercise 4.3")

    with pytest.raises(NotImplementedError, match="exercise 4.3"):
        lab.measure(all_reduce, FEW)


def test_functions_race_side_by_side():
    result = lab.measure(ring.all_reduce, FEW, against=(ring.all_reduce_naive,))
    assert {r["name"] for r in result.rows} == {"your all_reduce", "all_reduce_naive"}


@pytest.mark.parametrize(
    "against, sentence", [(("nccl",), "no peer is called 'nccl'"), (("mpi",), "needs engines: lab.start\\(4\\)")]
)
def test_peers_that_cannot_race_are_named(against, sentence):
    with pytest.raises(ValueError, match=sentence):
        lab.measure(ring.all_reduce, FEW, against=against)


def test_a_prediction_is_drawn_over_the_measurement():
    guess = lab.predict({"4": 20, "64 KiB": 100})
    assert guess == {4: pytest.approx(20e-6), 65536: pytest.approx(1e-4)}
    assert "4 B in 20 µs, 64 KiB in 100 µs" in repr(guess)
    figure = lab.measure(ring.all_reduce, FEW, prediction=guess).figure
    assert any(t.get_text() == "your prediction" for t in figure.axes[1].texts)


@pytest.mark.parametrize("guess", [{}, 20, {"4": -1}, {"4": "fast"}, {"4 apples": 20}])
def test_predictions_that_are_none_are_refused(guess):
    with pytest.raises(ValueError):
        lab.predict(guess)


def test_sizes_as_people_write_them():
    texts = {4: 4, "4": 4, "16B": 16, "1KiB": 1024, "4 MiB": 2**22, "1GiB": 2**30}
    assert {text: sweep.parse_size(text) for text in texts} == texts


@pytest.mark.parametrize("text", ["", "0", "-4", "1kb", "1.5KiB", None])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="a message size is"):
        sweep.parse_size(text)


def test_one_size_need_not_be_a_list():
    assert [r["size"] for r in lab.measure(ring.all_reduce, "1KiB").rows] == [1024]
    assert [r["name"] for r in lab.measure(lambda comm, x: ring.all_reduce(comm, x), 4).rows] == ["your function"]


def test_what_cannot_be_measured_is_said():
    with pytest.raises(ValueError, match="no message size"):
        lab.measure(ring.all_reduce, ())
    with pytest.raises(TypeError, match="got ndarray: lab.measure"):
        lab.measure(np.ones(3))


def test_sizes_are_whole_elements():
    with pytest.raises(ValueError, match="6 bytes are not a whole number of float32"):
        lab.measure(ring.all_reduce, (6,))


def test_ping_pong_finds_the_network():
    fitted = sim.run(3, sweep.ping_pong, 1, 1, network=Switch(alpha=5e-6, beta=1e-9))
    assert fitted[2] == fitted[0] == pytest.approx((5e-6, 1e-9, 0), rel=1e-3)
    assert sim.run(1, sweep.ping_pong)[0] == (0, 0, 0)


def test_timing_records_no_events_and_recording_goes_on_afterwards():
    def body(comm):
        before = len(comm.trace.events)
        times = sweep.time_work(comm, lambda comm, n: ring.all_reduce(comm, np.ones(n)), 100, 5, 10_000)
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
    assert "Switch: virtual time, in which" in result.figure.texts[-1].get_text()
    met, paper = result.crossover("tree", "ring"), result.modelled_crossover("tree", "ring")
    assert 64 < met < 2**20 and paper == pytest.approx(2.2e5 * 22 / 6.125 / 16, rel=0.6)
    assert 0.3 < met / paper < 3


def test_a_fat_tree_may_stand_beside_running_engines(monkeypatch):
    monkeypatch.setattr("hpdl_lab.lab.ranks.running", lambda: pytest.fail("the engines were asked for"))
    result = lab.measure("ring", "1KiB", ranks=8, network=FatTree(4, 2))
    assert "8 simulated ranks" in repr(result)
    assert "ring model" not in {t.get_text() for t in result.figure.axes[1].texts}  # ranks 0 and 1 share a leaf
    assert result.figure.texts[-1].get_text().startswith("FatTree, hosts per leaf 4, oversubscription 2: virtual")
    with pytest.raises(TypeError, match="network='fat tree': one of comm.network is needed"):
        lab.measure("ring", network="fat tree")


@pytest.mark.parametrize("collective", ["broadcast", "reduce_scatter", "all_gather", "reduce", "gather", "all_to_all"])
def test_other_collectives(collective):
    name = {"reduce_scatter": "ring", "all_gather": "ring", "all_to_all": "pairwise"}.get(collective, "tree")
    result = lab.measure(name, ("1KiB", "64KiB"), ranks=3, collective=collective)
    assert [r["collective"] for r in result.rows] == [collective] * 2 and result.rows[0]["wrong"] == 0
    assert repr(result).startswith(f"{collective.replace('_', '-')} on 3 simulated ranks")


def test_names_that_nobody_has():
    with pytest.raises(LookupError, match="all_reduce has no algorithm 'rings': ring, segmented_ring"):
        lab.measure("rings")
    with pytest.raises(ValueError, match="collective='sum': one of 'all_reduce'"):
        lab.measure("ring", collective="sum")
    result = lab.measure("ring", "1KiB", against="tree")
    with pytest.raises(ValueError, match="nothing called 'mpi' was measured: there are 'ring', 'tree'"):
        result.crossover("ring", "mpi")
    with pytest.raises(ValueError, match="the speed of the links is not known on 4 simulated ranks"):
        result.share("ring")


def test_where_two_curves_cross():
    sizes = (1, 10, 100, 1000)
    flat, rising = dict.fromkeys(sizes, 30.0), {n: float(n) for n in sizes}
    assert crossing(flat, rising) == crossing(rising, flat) == pytest.approx(30)
    assert crossing(flat, dict.fromkeys(sizes, 20.0)) is None
    assert crossing({1: 1.0}, {1: 2.0}) is None
    noisy = {1: 29.0, 10: 31.0, 100: 29.0, 1000: 31.0}  # the last crossing counts
    assert 100 < crossing(flat, noisy) < 1000


def test_simulated_curves_and_the_link_are_drawn_beside_the_measured_ones():
    rows = [
        {
            "name": n,
            "size": s,
            "time_us": t,
            "p25_us": t,
            "p75_us": t,
            "busbw_GBps": s / t / 1e3,
            "ranks": 4,
            "cores": 4,
        }
        for n, s, t in (("yours", 1024, 90.0), ("yours", 2048, 99.0), ("tree", 1024, 80.0), ("tree", 2048, 95.0))
    ]
    figure = style.new_figure()
    plot.draw(figure, rows, "yours", 1.5, simulated={"tree": {1024: 7e-5, 2048: 9e-5}}, link_GBps=0.125)
    left, right = figure.axes
    assert {t.get_text() for t in right.texts} == {"yours", "tree", "the link"}
    dashed = [line for line in left.lines if line.get_linestyle() == "--"]
    assert [list(line.get_ydata()) for line in dashed] == [[7e-5, 9e-5]]
    assert (
        dashed[0].get_color()
        == next(line for line in left.lines if list(line.get_ydata()) == [8e-5, 9.5e-5]).get_color()
    )
    assert right.get_ylim()[1] > 0.125


def test_the_share_of_a_link_is_that_of_the_largest_size():
    rows = [
        {"name": n, "size": s, "time_us": 1.0, "busbw_GBps": b, "ranks": 4, "cores": 4}
        for n, s, b in (("yours", 64, 0.2), ("yours", 2**20, 0.1), ("MPI", 64, 0.3), ("MPI", 2**20, 0.05))
    ]
    result = MeasureResult("4 engines on emulated hosts at 1gbit", "all_reduce", rows, 1e-5, 8e-9, 0.0, {}, 0.125, None)
    assert result.share("yours") == pytest.approx(0.8)
    sentence = "Of the 0.125 GB/s that a link carries, at 1 MiB: yours reaches 80%, MPI reaches 40%."
    assert repr(result).endswith(sentence)
