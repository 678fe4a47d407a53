"""What sliders explore: right numbers, a sentence for what cannot be, and an answer before the hand has moved on."""

import statistics
import subprocess
import sys

import pytest

from hpdl_lab import lab
from hpdl_lab.lab.explore import Control, Explored, doublings, logarithmic
from hpdl_lab.lab.explorers import EXPLORERS
from hpdl_lab.measure import measure
from hpdl_lab.plots import live

ANSWER_S = 0.1
NAMES = list(EXPLORERS)


def explored(name, **values):
    return Explored(name, *EXPLORERS[name]).set(**values)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_every_slider_is_answered(name):
    """By a picture and one line, or by a sentence about why not."""
    found = explored(name)
    assert found.picture is not None, "the first thing that is seen"
    first, texts = found.text, set()
    for key, control in found.controls.items():
        before = len(texts)
        for value in control.values[:: max(1, len(control.values) // 5)]:
            found.set(**{key: value})
            texts.add(found.text)
            assert "\n" not in found.text and (found.picture is None) == bool(found.why)
        assert len(texts) > before or (name, key) == ("rate", "seed"), f"{key} changes nothing"
        found.set(**{key: control.start})
    assert found.text == first


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_takes_less_than_a_tenth_of_a_second(name, within):
    """From the slider's event to the bytes of the picture; the median over all sliders."""
    found, times = explored(name), []
    for key, control in found.controls.items():
        for value in control.values[:: max(1, len(control.values) // 4)]:

            def answer(key=key, value=value):
                if found.set(**{key: value}).picture is not None:
                    live.png(found.picture.figure, 1)

            times.append(measure(answer, warmup=0, repeats=1).median)
        found.set(**{key: control.start})
    assert statistics.median(times) < within(ANSWER_S)


def test_sliders_are_checked_and_wrong_ones_named():
    for start, says in (
        ({"rates": 1}, "'rates': rate, batch, seed"),
        ({"rate": 3}, "3: a number from 0.005 to 2"),
        ({"rate": "much"}, "'much'"),
    ):
        with pytest.raises(ValueError, match=says):
            lab.explore("rate", **start)
    with pytest.raises(ValueError, match="A100, H100"):
        lab.explore("days", hardware="VAX")
    with pytest.raises(LookupError, match="'rats': days"):
        lab.explore("rats")


def test_in_a_terminal_it_is_one_line(capsys):
    found = lab.explore("rate", rate=0.123)
    assert capsys.readouterr().out == found.text + "\n" and 0.123 in found.controls["rate"].values


def test_scales():
    assert logarithmic(0.2, 20, (1, 3)) == (0.3, 1, 3, 10)
    assert doublings(1, 17) == (1, 2, 4, 8, 16)


def test_what_cannot_be_is_a_sentence_and_the_next_value_a_picture():
    def answer(n):
        if n > 1:
            raise ValueError(f"n={n} is too much")
        return EXPLORERS["rate"][1](0.1, 442, 0)

    found = Explored("n", {"n": Control((1, 2), 1)}, answer)
    assert found.set(n=2).text == "n=2 is too much" and found.picture is None
    with pytest.raises(ValueError, match="too much"):
        found.save("never.png")
    assert found.set(n=1).picture is not None and not found.why


# -- what the numbers say ---------------------------------------------------------------------------------------------


def test_days_are_those_of_the_published_training():
    """34 days for GPT-3 on 1,024 A100 at 140 teraFLOP/s each, a quarter of them recomputation. arXiv:2104.04473."""
    share = 140e12 * 6 / 8 / 312e12
    assert f"{34:.0f}" in f"{float(explored('days', share_of_peak=share).text.split(': ')[1].split()[0]):.0f}"


def test_a_small_batch_walks_noisily_and_the_whole_one_does_not():
    noisy, smooth = (explored("rate", batch=batch).picture.figure.axes[1].lines[0].get_ydata() for batch in (4, 442))
    assert all(b <= a for a, b in zip(smooth, smooth[1:], strict=False))
    assert sum(b > a for a, b in zip(noisy, noisy[1:], strict=False)) > len(noisy) / 4
    assert "diverges" in explored("rate", rate=2).text


# -- as widgets -------------------------------------------------------------------------------------------------------

WIDGETS = """
from hpdl_lab.lab.explorers import EXPLORERS
from hpdl_lab.lab.explore import Explored
from hpdl_lab.lab.widgets import Sliders
from hpdl_lab.lab import explore

panel = Sliders(Explored("rate", *EXPLORERS["rate"]))
before = panel.picture.value, panel.line.value
panel.moved["batch"].value = 8
assert before[0] != panel.picture.value and "mini-batches of 8" in panel.line.value
explored = panel.explored
explored.answer = lambda **values: 1 / 0
panel.moved["batch"].value = 16
assert "ZeroDivisionError" in panel.line.value, "an error of a callback is told where one looks"
def refuse(**values): raise ValueError("that cannot be")
explored.answer = refuse
panel.moved["batch"].value = 32
assert "that cannot be" in panel.line.value and panel.picture.layout.opacity == "0.25"
"""


def test_widgets_follow_and_say_what_is_wrong():
    subprocess.run([sys.executable, "-c", WIDGETS], check=True, timeout=100)
