"""The picture of a schedule: a bar per action, hatching for every wait, what is held beside it."""

import numpy as np
import pytest
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.textpath import TextPath

from hpdl_lab.plots import schedule as drawing
from hpdl_lab.plots.style import look, new_figure
from hpdl_lab.schedules import build, evaluate


def drawn(name, p, m, now=None, **costs):
    schedule = build(name, p, m)
    figure, times = new_figure(height=drawing.height(schedule)), evaluate(schedule, **costs)
    with look():
        drawing.draw(figure, schedule, times, now=now)
        figure.draw_without_rendering()
    return figure, times


def texts(figure):
    return [t.get_text() for t in figure.texts] + [t.get_text() for ax in figure.axes for t in ax.texts]


def areas(figure):
    """The bars and the hatching."""
    return [c for c in figure.axes[0].collections if isinstance(c, PolyCollection)]


def area(collection):
    """Time x rows that a collection of rectangles covers."""
    corners = [path.vertices for path in collection.get_paths()]
    return sum((c[:, 0].max() - c[:, 0].min()) * (c[:, 1].max() - c[:, 1].min()) for c in corners)


@pytest.mark.parametrize(
    ("name", "p", "m"),
    [("gpipe", 4, 8), ("1f1b", 8, 16), ("interleaved", 4, 8), ("zero_bubble_h1", 4, 8), ("gems_mast", 3, 2)],
)
def test_bars_are_the_actions_and_hatching_is_the_bubble(name, p, m):
    figure, times = drawn(name, p, m)
    bars, waits = areas(figure)
    assert len(bars.get_paths()) == sum(map(len, times.rows))
    assert area(waits) / (0.88 * p * float(times.makespan)) == pytest.approx(times.bubble)
    assert f"ranks wait {times.bubble:.1%}: the bubble" in " ".join(texts(figure))


def test_what_ranks_hold_stands_beside_their_rows():
    figure, times = drawn("1f1b", 4, 8)
    assert [t.get_text() for t in figure.axes[1].texts[:8:2]] == ["4", "3", "2", "1"]
    assert [round(bar.get_width()) for bar in figure.axes[1].patches] == [4, 3, 2, 1]
    assert texts(figure).count("27%") == 4  # every rank waits (p - 1)(tf + tb)


def test_at_a_time_only_what_has_begun_is_drawn_and_what_is_live_counted():
    figure, times = drawn("gpipe", 4, 8, now=4)
    bars, waits = areas(figure)
    assert len(bars.get_paths()) == 4 + 3 + 2 + 1
    assert area(waits) == pytest.approx(0.88 * (0 + 1 + 2 + 3))
    assert [t.get_text() for t in figure.axes[1].texts[:8:2]] == ["5", "4", "3", "2"]  # at 4 the next ones begin
    assert "at 4 of 33 units of time" in " ".join(texts(figure))


def test_numbers_stand_in_bars_that_are_wide_enough():
    figure, _ = drawn("gpipe", 8, 16)
    assert sorted(numbers(figure)) == sorted([*range(10)] * 16 + [*range(10, 16)] * 8)  # two digits fit into backwards
    figure, _ = drawn("gpipe", 4, 4)
    assert sorted(numbers(figure)) == sorted([*range(4)] * 8)


def numbers(figure):
    """The numbers in bars, each as often as it stands there: told by their outlines."""
    shapes = {i: from_first(TextPath((0, 0), str(i), size=6)) for i in range(20)}
    found = []
    for written in (c for c in figure.axes[0].collections if isinstance(c, PathCollection)):
        mine = from_first(written.get_paths()[0])
        same = [i for i, shape in shapes.items() if shape.shape == mine.shape and np.allclose(shape, mine, atol=1e-6)]
        found += same * len(written.get_offsets())
    return found


def from_first(path):
    """Where the points of an outline are, seen from the first one."""
    return path.vertices - path.vertices[0]


@pytest.mark.parametrize(
    ("name", "says"), [("gems_mast", "each of 2 replicas"), ("interleaved", "each of its 2 stages")]
)
def test_lanes_are_explained(name, says):
    figure, _ = drawn(name, 2, 2)
    assert says in " ".join(texts(figure))


def test_nothing_is_drawn_outside_of_the_figure():
    figure, _ = drawn("1f1b", 8, 16)
    for text in [*figure.texts, *figure.axes[1].texts]:
        box = text.get_window_extent()
        assert 0 <= box.x0 and box.x1 <= figure.bbox.width and 0 <= box.y0 and box.y1 <= figure.bbox.height
