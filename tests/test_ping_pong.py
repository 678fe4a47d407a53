"""lab.ping_pong: checked first, timed second, a line fitted through it."""

import numpy as np
import pytest
from hpdl_lab.lab.ping_pong import time_rounds
from matplotlib.text import Text

from hpdl_lab import lab
from hpdl_lab.collectives.sweep import WrongAnswer
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import Switch
from hpdl_lab.parallel.messages import ping_pong
from hpdl_lab.plots import ping_pong as drawing
from hpdl_lab.plots import style


@pytest.fixture
def no_engines(monkeypatch):
    monkeypatch.setattr("hpdl_lab.lab.ranks.running", lambda: None)


def texts_of(figure):
    return [t.get_text() for t in figure.findobj(Text) if t.get_text() and t.get_visible()]


def test_the_fit_finds_the_simulated_network(no_engines):
    link = lab.ping_pong()
    assert link.alpha == pytest.approx(2e-6, rel=1e-3) and link.beta == pytest.approx(8e-11, rel=1e-3)
    assert link.nbytes[0] == 8 and link.nbytes[-1] == 8 * 2**20 and len(link.nbytes) == len(link.seconds) == 11
    assert link.seconds == pytest.approx([2e-6 + 8e-11 * n for n in link.nbytes], rel=1e-3)
    assert "4 simulated ranks" in repr(link) and "α = 2 µs" in repr(link) and "25,000 B half" in repr(link)


def test_one_way_is_half_a_round_and_other_ranks_look_on():
    rows = sim.run(3, time_rounds, ping_pong, (100,), 1, 0, network=Switch(alpha=1e-3, beta=1e-5)).rows
    assert [r["size"] for r in rows] == [100] and rows[0]["seconds"] == pytest.approx(2e-3)


def test_prediction_and_fit_stand_beside_the_measurement(no_engines):
    texts = texts_of(lab.ping_pong(sizes=("8", "1MiB"), prediction=lab.predict({"8": 10, "1MiB": 1000})).figure)
    assert {"your prediction", "α + β n", "measured", "α", "1/β"} <= set(texts)


def test_a_message_that_does_not_come_back_is_not_timed(no_engines):
    def forgets(comm, x):
        if comm.rank == 0:
            comm.send(x, 1)
        elif comm.rank == 1:
            comm.recv(x, 0)
            x += 1

    with pytest.raises(WrongAnswer, match="after a round 64 of those on rank 1 are something else"):
        lab.ping_pong(forgets, ("64", "1KiB"))
    with pytest.raises(WrongAnswer, match="8 of those on rank 1"):
        lab.ping_pong(lambda comm, x: None)


def test_what_makes_no_line_is_said(no_engines):
    with pytest.raises(ValueError, match="two different sizes, got 1"):
        lab.ping_pong(sizes="1KiB")
    with pytest.raises(ValueError, match="needs two ranks"):
        lab.ping_pong(ranks=1)
    with pytest.raises(TypeError, match="got str: lab.ping_pong"):
        lab.ping_pong("8")
    with pytest.raises(NotImplementedError):
        lab.ping_pong(stub)


def stub(comm, x):
    raise NotImplementedError("exercise 3.1")


def test_on_engines_the_time_is_real(cluster, monkeypatch):
    monkeypatch.setattr("hpdl_lab.lab.ranks.running", lambda: cluster)
    monkeypatch.setattr("hpdl_lab.lab.ranks.run", cluster.run)
    link = lab.ping_pong(sizes=(8, "64KiB", "1MiB"))
    assert "4 engines" in repr(link) and 0 < link.alpha < 0.1 and min(link.seconds) > 0


@pytest.mark.parametrize("rows", [[], [{"size": 8, "seconds": 1e-6, "p25": 1e-6, "p75": 2e-6}]])
def test_a_picture_of_what_is_known_so_far(rows):
    figure = style.new_figure()
    drawing.draw(figure, rows)
    assert len(figure.axes) == 2
    assert np.isfinite(figure.axes[0].get_ylim()).all()
