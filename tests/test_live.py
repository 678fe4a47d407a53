"""A live picture in a real kernel: one output, changed in place, its last state drawn, matplotlib left alone."""

import base64

import nbclient
import nbformat
import pytest

CELL = """
%matplotlib inline
import matplotlib.pyplot as plt
import time
from hpdl_lab.plots import live, loss

backend = plt.get_backend()
plot, rows = live.Live(loss.draw), []
for step in range(60):
    rows.append({"step": step, "loss": 2.3 * 0.95**step, "samples_per_s": 30_000})
    plot.update(rows, 60, "training")
    time.sleep(0.02)
plot.finish(rows, 60, "done")
assert 3 < plot.frames < 60, plot.frames  # several, throttled
assert plt.get_backend() == backend and not plt.get_fignums()
"""


@pytest.fixture(scope="module")
def outputs():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(notebook, timeout=50, kernel_name="python3").execute()
    return notebook.cells[0].outputs


def test_one_output_holds_the_last_state(outputs):
    (output,) = outputs
    assert output.output_type == "display_data"
    data = base64.b64decode(output.data["image/png"])
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (1680, 780)  # the final state, in the resolution of sharp screens
    assert output.metadata["image/png"] == {"width": 840, "height": 390}  # the page does not move between frames
