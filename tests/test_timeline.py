"""The pictures of a run, and of gradient descent: timeline, traffic, landscape."""

import json
from importlib import import_module

import numpy as np
import pytest

from hpdl_lab import lab
from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.comm.inject import Injection
from hpdl_lab.optim import gradient_descent
from hpdl_lab.plots import style, traffic


@pytest.fixture(autouse=True)
def no_last_run(monkeypatch):
    # by import_module, because the verb lab.timeline hides the module of its name
    monkeypatch.setattr(import_module("hpdl_lab.lab.timeline"), "last_run", lambda: None)


@pytest.fixture
def results():
    return sim.run(3, ring.all_reduce, np.ones(10))


def test_a_timeline_of_results_and_of_events(results):
    assert repr(lab.timeline(results)) == repr(lab.timeline(results.events)) == "24 events of 3 ranks"


def test_a_barrier_is_drawn_on_every_rank():
    def body(comm):
        comm.compute(seconds=1e-3 * comm.rank)
        comm.barrier()

    ax = lab.timeline(sim.run(4, body)).figure.axes[0]
    assert sum(len(c.get_paths()) for c in ax.collections) == 3 + 4 + 1  # computing, barriers, rank 0's empty computing


def test_the_background_of_a_rank_has_a_lane_of_its_own_below_the_ranks():
    def body(comm):
        work = comm.background(ring.all_reduce, np.ones(4))
        comm.compute(seconds=1e-3)
        work.wait()

    ax = lab.timeline(sim.run(2, body)).figure.axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["rank 0", "background", "rank 1", "background"]
    heights = {round(path.vertices[:, 1].mean()) for c in ax.collections for path in c.get_paths()}
    assert heights == {0, 1, 2, 3}

    def one(comm):
        comm.compute(seconds=1e-3)
        if comm.rank == 0:
            comm.background(lambda beside: beside.compute(seconds=1e-3)).wait()

    ax = lab.timeline(sim.run(3, one)).figure.axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["rank 0", "background", "rank 1", "rank 2"]


def test_actions_of_a_pipeline_have_one_color_per_kind():
    def body(comm):
        for i in range(3):
            for kind in ("forward", "weight gradient"):
                with comm.trace.span(f"{kind} {i} stage {comm.rank}"):
                    comm.compute(seconds=1e-3)

    texts = [text.get_text() for text in lab.timeline(sim.run(2, body)).figure.texts]
    assert {"compute 6 ms", "forward 3 ms", "weight gradient 3 ms"} < set(texts)
    assert not any("stage" in text for text in texts)


def test_an_injected_delay_is_seen_on_its_rank_only():
    run = sim.run(3, ring.all_reduce, np.ones(3000), inject=Injection(delays={1: 1e-3}))
    late = [e for e in run.events if e.op == "injected delay"]
    assert {e.rank for e in late} == {1}
    figure = lab.timeline(run).figure
    assert any(t.get_text().startswith("injected delay") for t in figure.texts)


def test_the_chrome_trace_holds_every_event(results, tmp_path):
    path = tmp_path / "trace.json"
    picture = lab.timeline(results, save=path)
    rows = json.loads(path.read_text())["traceEvents"]
    assert sum(row["ph"] == "X" for row in rows) == len(results.events) and str(path) in repr(picture)


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="no run to draw yet"):
        lab.timeline()
    with pytest.raises(ValueError, match="recorded no events"):
        lab.timeline(sim.run(2, lambda comm: comm.rank))
    with pytest.raises(TypeError, match="can be drawn; something of int cannot"):
        lab.timeline(3)


def test_traffic_counts_bytes_and_messages(results):
    # p = 3, 10 elements of 8 bytes: chunks of 4, 3, 3; everything is sent but one chunk, twice
    assert repr(lab.traffic(results)) == "320 bytes in 12 messages"


@pytest.mark.parametrize("nbytes", [4000, 99_999, 100_001])
@pytest.mark.parametrize("p", [5, 6, 8])
def test_bytes_from_rank_to_rank_fit_into_their_cells(p, nbytes):
    figure = style.new_figure()
    values = np.full((p, p), nbytes)
    with style.look():
        traffic.draw(figure, values, values)
        figure.canvas.draw()
    for ax in figure.axes:
        cells = [text.get_window_extent() for text in ax.texts]
        assert len(cells) == p * p
        assert max(cell.width for cell in cells) < ax.bbox.width / p
        assert max(cell.height for cell in cells) < ax.bbox.height / p


@pytest.fixture
def data():
    x = np.random.default_rng(1).normal(size=(60, 2)) * (1.4, 0.7)
    return x, x @ (1.0, -2.0)


def test_a_landscape_says_how_each_rate_went(data):
    top = gradient_descent.largest_stable_rate(data[0])
    walks = lab.landscape(gradient_descent.gradient_step, *data, rates=(0.01 * top, 0.5 * top, 1.1 * top), steps=40)
    assert list(walks.verdicts.values()) == ["too low", "good", "diverges"]
    assert walks.paths[0.5 * top].shape == (41, 2) and len(walks.losses[0.5 * top]) == 41
    assert "diverges" in repr(walks)


@pytest.mark.parametrize("rates", [(), (0.1, 0.1), (-1,), (1, 2, 3, 4, 5, 6)])
def test_rates_that_make_no_picture_are_refused(rates, data):
    with pytest.raises(ValueError, match="rates must be 1 to 5"):
        lab.landscape(gradient_descent.gradient_step, *data, rates=rates)


def test_a_step_may_change_the_weights_in_place(data):
    def in_place(w, x, y, rate):
        w -= rate * gradient_descent.gradient(w, x, y)
        return w

    mine, reference = (
        lab.landscape(f, *data, rates=(0.1,)).paths[0.1] for f in (in_place, gradient_descent.gradient_step)
    )
    assert np.array_equal(mine, reference)


def test_a_landscape_has_two_weights(data):
    x, y = data
    with pytest.raises(ValueError, match=r"two weights.*\(60, 3\)"):
        lab.landscape(gradient_descent.gradient_step, np.ones((60, 3)), y, rates=(0.1,))
    with pytest.raises(ValueError, match="at least 2, got 1"):
        lab.landscape(gradient_descent.gradient_step, x, y, rates=(0.1,), steps=1)
    with pytest.raises(ValueError, match="must return the 2 weights"):
        lab.landscape(lambda w, x, y, rate: w[0], x, y, rates=(0.1,))
