"""The picture of applications: numbers as published, and every text within the figure."""

import pytest
from matplotlib.text import Text

from hpdl_lab.performance.cost import TRAININGS
from hpdl_lab.plots.applications import APPLICATIONS, draw, took
from hpdl_lab.plots.style import new_figure, style_context


def test_every_application_is_drawn_and_all_texts_are_within_the_figure():
    figure = new_figure()
    with style_context():
        draw(figure)
    figure.canvas.draw()
    texts = [t for t in figure.findobj(Text) if t.get_text().strip()]
    assert all(any(a.data in t.get_text() for t in texts) for a in APPLICATIONS)
    assert all(figure.bbox.contains(*corner) for t in texts for corner in t.get_window_extent().get_points())


def test_hours_are_those_of_notebook_14():
    hours, ours = {t.name: t.hours for t in TRAININGS}, {a.model: a.accelerators * a.hours for a in APPLICATIONS}
    assert ours["ResNet-50"] == hours["ResNet-50"]
    assert ours["Llama 3.1"] == pytest.approx(hours["Llama 3.1 405B"])
    assert [took(h) for h in (29, 55.2, 288)] == ["29 hours", "55 hours", "12 days"]
