"""lab.gossip and lab.landscape: pictures that hold the numbers of their lessons."""

import numpy as np
import pytest
from matplotlib.text import Text

from hpdl_lab import lab
from hpdl_lab.optim import gradient_descent
from hpdl_lab.optim.gradient_descent import gradient_step
from hpdl_lab.plots import live
from tests.wording import raises


def test_gossip_keeps_the_promise_of_the_second_eigenvalue():
    result = lab.gossip(n=16, steps=25)
    for name, error in result.errors.items():
        relative = error / error[0]
        assert len(error) == 26 and (relative <= result.lambda2[name] ** np.arange(26) * (1 + 1e-9)).all()
        assert error[-1] / error[-2] == pytest.approx(result.lambda2[name], rel=0.02), name  # the slowest part is left
    assert result.lambda2["ring"] == pytest.approx(1 - 0.050747, abs=1e-6) and "0.050747" in repr(result)


def test_gossip_with_one_peer_and_with_a_step_of_ones_own():
    error = lab.gossip("one_peer", n=8, steps=5).errors["one_peer"]
    assert error[2] > 1e-3 and (error[3:] < 1e-12).all(), "exact after three steps of eight ranks"
    error = lab.gossip("ring", n=4, steps=3, step=lambda comm, x, graph: None).errors["ring"]
    assert error[0] == error[-1] > 0


def test_both_play_step_by_step(monkeypatch):
    frames = []
    monkeypatch.setattr(live, "in_notebook", lambda: True)
    monkeypatch.setattr(live, "publish", lambda figure, *args: frames.append(figure.findobj(Text)))
    monkeypatch.setattr(live, "PERIOD", 0)
    monkeypatch.setattr(live, "LEAST_PAUSE", 0)
    lab.gossip("ring", n=4, steps=6)
    assert len(frames) == 7
    x = np.random.default_rng(0).normal(size=(20, 2))
    lab.landscape(gradient_step, x, x @ (1.0, 2.0), rates=0.5, steps=4)
    assert len(frames) == 7 + 5 and any(t.get_text().startswith("rate 0.5: ") for t in frames[-1])


@pytest.mark.parametrize(
    ("graphs", "options", "error"),
    [
        ("square", {}, LookupError),
        ("ring", {"steps": 0}, ValueError),
        ((), {}, ValueError),
        ("ring", {"n": 65}, ValueError),
        ("ring", {"prediction": {"ring": 0}}, ValueError),
    ],
)
def test_what_is_no_gossip_is_said(graphs, options, error):
    with pytest.raises(error):
        lab.gossip(graphs, **options)


@pytest.fixture
def data():
    x = np.random.default_rng(1).normal(size=(60, 2)) * (1.4, 0.7)
    return x, x @ (1.0, -2.0)


def test_a_guess_is_marked_where_it_was_expected(data):
    figure = lab.gossip(("ring", "star"), steps=21, prediction={"ring": 0.3, "star": 0.07}).figure
    stars = [line.get_xydata().tolist() for line in figure.axes[0].lines if line.get_marker() == "*"]
    assert stars == [[[20, 0.3]], [[20, 0.07]]]
    walks = lab.landscape(gradient_step, *data, rates=(0.1, 0.2), prediction=0.3)
    assert list(walks.verdicts) == [0.1, 0.2, 0.3]
    marked = [any(t.get_text() == "your guess" for t in ax.texts) for ax in walks.figure.axes]
    assert marked == [False, False, True, False], "the last panel is of the losses"


def test_a_landscape_says_how_each_rate_went(data):
    top = gradient_descent.largest_stable_rate(data[0])
    walks = lab.landscape(gradient_step, *data, rates=(0.01 * top, 0.5 * top, 1.1 * top), steps=40)
    assert list(walks.verdicts.values()) == ["too low", "good", "diverges"] and "diverges" in repr(walks)
    assert walks.paths[0.5 * top].shape == (41, 2) and len(walks.losses[0.5 * top]) == 41

    def in_place(w, x, y, rate):
        w -= rate * gradient_descent.gradient(w, x, y)
        return w

    mine, reference = (lab.landscape(f, *data, rates=0.1).paths[0.1] for f in (in_place, gradient_step))
    assert np.array_equal(mine, reference), "a step may change the weights in place"


@pytest.mark.parametrize(
    ("step", "x", "options", "says"),
    [
        *((gradient_step, None, {"rates": rates}, ("1", "5")) for rates in ((), (0.1, 0.1), (-1,), (1, 2, 3, 4, 5, 6))),
        (gradient_step, np.ones((60, 3)), {"rates": 0.1}, ("(60, 3)",)),
        (gradient_step, None, {"rates": 0.1, "steps": 1}, ("2", "1")),
        (lambda w, x, y, rate: w[0], None, {"rates": 0.1}, ("2 weights",)),
    ],
)
def test_what_makes_no_landscape_is_refused(step, x, options, says, data):
    with raises(ValueError, *says):
        lab.landscape(step, data[0] if x is None else x, data[1], **options)
