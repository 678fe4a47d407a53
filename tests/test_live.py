"""Pictures in a real kernel: one output, changed in place, its last state drawn, matplotlib left alone; a panel."""

import base64
import io
import statistics
import time

import nbclient
import nbformat
import pytest
from matplotlib.text import Text
from PIL import Image, ImageColor

from hpdl_lab.plots import collective, live, style

CELL = """
%matplotlib inline
import matplotlib.pyplot as plt
import time
from hpdl_lab.plots import live

backend = plt.get_backend()
plot, rows, give_up = live.Live(live.draw), [], time.monotonic() + 60
while plot.frames < 4 and time.monotonic() < give_up:  # that they are throttled is tested below, in a quiet process
    rows.append({"step": len(rows), "loss": 2.3 * 0.95 ** len(rows), "samples_per_s": 30_000})
    plot.update(rows, 9000, "training")
    time.sleep(0.02)
plot.finish(rows, 9000, "done")
assert plot.frames == 5
assert plt.get_backend() == backend and not plt.get_fignums()
"""


STEPS = """
from hpdl_lab import lab
lab.show("ring", ranks=2)
"""


PICKER = """
import time

from hpdl_lab import lab
from hpdl_lab.collectives import ring

picker = lab.grid("mlp", machine="laptop", ranks=4, batch=32)
panel = picker.panel
panel.moved["pp"].value = 2
assert (panel.moved["dp"].value, picker.setting.pp, picker.setting.grid.size) == (2, 2, 4)
assert "dp 4 -&gt; 2, so that 2 x 2 x 1 = 4 ranks" in panel.line.value
panel.moved["micro_batches"].value = 32
assert "This grid cannot be: a batch of 32" in panel.line.value and panel.buttons["Run it"].disabled
panel.moved["micro_batches"].value = 4
before = panel.line.value, panel.picture.value
panel.moved["recompute"].value = True
assert before[0] != panel.line.value and before[1] != panel.picture.value
panel.buttons["Run it"].click()
while "no engine cluster is running" not in panel.line.value:  # what a thread of the picker's own will say
    time.sleep(0.02)
assert "no engine cluster is running" in panel.line.value and not panel.buttons["Run it"].disabled
panel.buttons["Stop"].click()
assert "Nothing of this picker is running." in panel.line.value
picker.set = None
panel.moved["pp"].value = 1
assert "TypeError" in panel.line.value, "an error of a callback is told where one looks"
del picker.set
"""

AGAIN = 'lab.grid("mlp", machine="laptop", ranks=4, batch=32)'

LATER = "_2"  # the result of the cell STEPS


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each of the cells displays in a kernel without a browser, as under nbval; no engines run."""
    cells = [nbformat.v4.new_code_cell(cell) for cell in (CELL, STEPS, PICKER, AGAIN, LATER)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("kernel")))
        nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=300, kernel_name="python3").execute()
    return [cell.outputs for cell in cells]


def displayed(outputs):
    return [o for o in outputs if o.output_type != "stream"]


def test_one_output_holds_the_last_state(outputs):
    (output,) = outputs[0]
    assert output.output_type == "display_data"
    data = base64.b64decode(output.data["image/png"])
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (1680, 780)  # the final state, in the resolution of sharp screens
    assert output.metadata["image/png"] == {"width": 840, "height": 390}  # the page does not move between frames


def test_steps_play_above_and_stand_below(outputs):
    played, panels, result = outputs[1]
    assert "application/vnd.jupyter.widget-view+json" in played.data  # a front end without widgets plays by itself:
    with Image.open(io.BytesIO(base64.b64decode(played.data["image/png"]))) as animation:
        assert animation.n_frames == 3 and animation.info["loop"] == 0  # start, two steps; again and again
        animation.seek(1)
        frame = animation.convert("RGB")
    colors = {color: count for count, color in frame.getcolors(frame.width * frame.height)}
    for name in (collective.ADDS, "#FFFFFF"):  # of arrows, which the last frame has none of; of the page
        assert colors[ImageColor.getrgb(name)] > 1000
    assert panels.data["image/png"] and result.data["text/plain"].startswith("ring on 2 ranks: 2 steps")


def test_a_result_shows_its_figure_again_in_a_later_cell(outputs):
    """Its own cell has shown it, where a browser was there to see it."""
    _, panels, result = outputs[1]
    (later,) = outputs[4]
    assert set(result.data) == {"text/plain"}
    assert panels.data["image/png"].replace("\n", "") in later.data["text/html"]
    assert result.data["text/plain"] in later.data["text/html"]
    assert result.data["text/plain"] == later.data["text/plain"]


def test_widgets_of_the_picker_follow_and_tell_their_errors(outputs):
    (shown,) = displayed(outputs[2])
    assert "application/vnd.jupyter.widget-view+json" in shown.data


def test_a_front_end_without_widgets_gets_a_picture_and_a_table(outputs):
    (shown,) = displayed(outputs[3])
    assert base64.b64decode(shown.data["image/png"]).startswith(b"\x89PNG")
    assert "pp=2" in shown.data["text/plain"], "what was picked before"


def test_png_has_the_size_of_the_page_times_the_scale():
    figure = style.new_figure(4, 2)
    for scale in (1, 2):
        data = live.png(figure, scale)
        assert data.startswith(b"\x89PNG")
        assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (400 * scale, 200 * scale)
    assert live.page_size(figure) == (400, 200)


class Page:
    """Stands for a notebook: counts what is published."""

    def __init__(self, monkeypatch):
        self.frames = []
        monkeypatch.setattr(live, "in_notebook", lambda: True)
        monkeypatch.setattr(live, "publish", self.publish)

    def publish(self, figure, alt, scale, handle=None):
        self.frames.append((texts_of(figure), scale, handle))
        return "the handle"


def train_rows(n):
    return [{"step": i, "loss": 2.3 * 0.98**i, "samples_per_s": 30_000 + i} for i in range(n)]


def texts_of(figure):
    return [t.get_text() for t in figure.findobj(Text) if t.get_text() and t.get_visible()]


def test_live_updates_one_display_in_place_and_always_draws_the_last_state(monkeypatch):
    page = Page(monkeypatch)
    plot = live.Live(live.draw)
    for n in range(1, 200):
        plot.update(train_rows(n), 200, "training")
    plot.finish(train_rows(200), 200, "done")
    assert len(page.frames) < 30  # throttled
    assert [handle for _, _, handle in page.frames] == [None] + ["the handle"] * (len(page.frames) - 1)
    texts, scale, _ = page.frames[-1]
    assert "done" in texts and any("step 200 of 200" in t for t in texts) and scale == live.CRISP


def test_live_draws_nothing_before_the_end_in_a_plain_script():
    plot = live.Live(live.draw)
    plot.update(train_rows(3), 10)
    assert plot.frames == 0
    assert "step 10 of 10" in "".join(texts_of(plot.finish(train_rows(10), 10)))
    assert plot.frames == 1 and plot.handle is None


def test_frames_are_cheap_enough_for_five_a_second():
    figure, costs = style.new_figure(), []
    for n in range(100, 110):
        begin = time.process_time()  # of this process alone, whatever else the machine does
        figure.clear()
        live.draw(figure, train_rows(n), 200, "training")
        live.png(figure, scale=1)
        costs.append(time.process_time() - begin)
    assert statistics.median(costs) < live.PERIOD < 0.2


def test_html_and_files_hold_the_picture(tmp_path):
    figure = style.new_figure()
    live.draw(figure, train_rows(3), 3)
    assert live.html(figure, "a loss").startswith('<img width="840"')
    live.save_figure(figure, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes() == live.png(figure)
