"""lab.graph, lab.gossip, lab.network: pictures that hold the numbers of the lesson, and refuse what makes none."""

import numpy as np
import pytest
from matplotlib.text import Text

from hpdl_lab import lab
from hpdl_lab.comm.network import FatTree
from hpdl_lab.parallel import gossip as graphs
from hpdl_lab.plots import graph as drawing
from hpdl_lab.plots import live


def texts_of(figure):
    return [t.get_text() for t in figure.findobj(Text) if t.get_text() and t.get_visible()]


@pytest.mark.parametrize(
    "name, n, gap",
    [("ring", 4, "0.666667"), ("ring", 16, "0.050747"), ("wheel", 8, "0.313255"), ("star", 32, "0.031250")],
)
def test_the_picture_of_a_graph_says_its_spectral_gap(name, n, gap):
    picture = lab.graph(name, n)
    texts = texts_of(picture.figure)
    assert gap in repr(picture) and any(gap in t for t in texts)
    assert {str(i) for i in range(n)} <= set(texts)


def test_a_line_per_pair_of_neighbors():
    lines = [line for line in lab.graph("wheel", 8).figure.axes[0].lines if len(line.get_xdata()) == 2]
    assert len(lines) == 7 + 7  # spokes and rim


def test_a_hub_stands_in_the_middle():
    star, complete = (graphs.metropolis(graphs.graph(name, 6)) for name in ("star", "complete"))
    assert drawing.on_page(star)[0] == (0, 0) and np.allclose(
        np.hypot(*zip(*drawing.on_page(complete), strict=True)), 1
    )


def test_all_agree_after_one_step_where_everybody_knows_everybody():
    assert "all agree after one step" in repr(lab.graph("complete", 5))


def test_gossip_keeps_the_promise_of_the_second_eigenvalue():
    result = lab.gossip(n=16, steps=25)
    for name, error in result.errors.items():
        relative = error / error[0]
        assert len(error) == 26 and (relative <= result.lambda2[name] ** np.arange(26) * (1 + 1e-9)).all()
        shrinks = error[-1] / error[-2]
        assert shrinks == pytest.approx(result.lambda2[name], rel=0.02), name  # the slowest part is what is left
    assert result.lambda2["ring"] == pytest.approx(1 - 0.050747, abs=1e-6) and "0.050747" in repr(result)
    assert "ring: λ₂ = 0.949" in texts_of(result.figure)


def test_one_peer_at_a_time_is_exact_after_three_steps_of_eight_ranks():
    error = lab.gossip("one_peer", n=8, steps=5).errors["one_peer"]
    assert error[2] > 1e-3 and (error[3:] < 1e-12).all()


def test_gossip_with_a_step_of_ones_own():
    def lazy(comm, x, graph):
        pass

    error = lab.gossip("ring", n=4, steps=3, step=lazy).errors["ring"]
    assert error[0] == error[-1] > 0


def test_gossip_plays_step_by_step(monkeypatch):
    frames = []
    monkeypatch.setattr(live, "in_notebook", lambda: True)
    monkeypatch.setattr(live, "publish", lambda figure, *args: frames.append(texts_of(figure)))
    monkeypatch.setattr(live, "PERIOD", 0)
    monkeypatch.setattr(live, "LEAST_PAUSE", 0)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    lab.gossip("ring", n=4, steps=6)
    assert len(frames) == 7 and "Gossip of 4 ranks" in frames[-1]


@pytest.mark.parametrize("n", [1, 33, 4.0])
def test_graphs_that_cannot_be_drawn_are_refused(n):
    with pytest.raises(ValueError, match="ranks from 2 to 32"):
        lab.graph("ring", n)


def test_what_is_no_gossip_is_said():
    with pytest.raises(LookupError, match="no graph is called 'square'"):
        lab.gossip("square")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        lab.gossip("ring", steps=0)
    with pytest.raises(ValueError, match="no graph to gossip on"):
        lab.gossip(())


def test_a_network_by_record_and_by_name():
    picture = lab.network(FatTree(4, oversubscription=2), 8)
    assert "leaf" in repr(picture) and any("leaf" in t for t in texts_of(picture.figure))
    assert "50 GB/s" in repr(lab.network("infiniband_ndr", 4))


def test_what_is_no_network_is_said():
    with pytest.raises(TypeError, match="one of comm.network is needed"):
        lab.network(12)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        lab.network("infiniband_ndr", 0)
    with pytest.raises((LookupError, ValueError), match="carrier_pigeon"):
        lab.network("carrier_pigeon")
