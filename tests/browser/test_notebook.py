"""What an attendee sees: 00 and 04 from top to bottom, a live plot of 01, 11 by sliders.

nbval runs the notebooks as they stand; in what the browser opens, calls do LESS. All use the same engines, so that 04
may not replace them by hosts, as it does alone, under nbval.
"""

import re
from pathlib import Path

import nbformat
from playwright.sync_api import expect

SCREENSHOTS = Path(__file__).parent
IDLE = "Python 3 (ipykernel) | Idle"  # in the status bar
KERNEL_MS = 600_000  # to open a notebook with its kernel
RUN_MS = 600_000  # for any one thing to appear
EXPLORED = ("rate", "algorithms", "tensor")  # a number, a list and axes to slide; tests/test_explore.py has all
PICTURES = {  # of 04: {the call in a cell: what its screenshot is called}
    'lab.show("ring"': "ring",
    "lab.check(reduce_scatter)": "correct",
    "lab.check(all_reduce)": "all_correct",
    "prediction=my_times": "measure",
    "lab.train(": "train",
    "lab.show(trained": "timeline",
}
REFUSED = "use what is running"  # by the cell of 04 that would replace the engines by hosts
LESS = {  # notebook: {what calls do beyond what is looked at here: fewer sizes, contenders, steps and ranks}
    "00": {  # nothing ends this cell but the stop button, which is pressed when all ranks have come
        "comm: comm.recv(": "comm: comm.barrier() or print('all are here') or comm.recv(",
        "deadline=1.5)": "deadline=100)",
    },
    "04": {
        "lab.measure(all_reduce, prediction=": 'lab.measure(all_reduce, ["4", "64KiB"], against=("mpi",), prediction=',
        "lab.train(all_reduce=all_reduce)": "lab.train(all_reduce=all_reduce, steps=200)",
        '("64", "16KiB", "256KiB", "2MiB"), against=family, ranks=16': '("64", "16KiB"), against=family, ranks=8',
        'lab.show("halving_doubling", ranks=8)': 'lab.show("halving_doubling", ranks=4)',
        "lab.show(machines, ranks=16)": "lab.show(machines, ranks=8)",
        'sizes=("8", "1MiB", "4MiB"))': 'sizes=("8", "1MiB"))',
        'against=("tree", "parameter_server", "mpi"), simulated=True': 'against=("tree",), simulated=True',
        "for k in range(10, 23, 3)": "for k in (10, 16)",
    },
}
WRONG = """
from hpdl_lab.collectives.chunks import chunk

def reduce_scatter(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p - 1):
        theirs = chunk(x, p, r - i - 2)
        arriving = theirs.clone()
        comm.send(chunk(x, p, r - i - 1), (r + 1) % p)
        comm.recv(arriving, (r - 1) % p)
        theirs += arriving
    return chunk(x, p, r)
"""


def open_notebook(page, served, path):
    """Open one notebook and wait for its kernel; in a page that has one open, after closing that, as attendees do."""
    address, _ = served
    if page.url == "about:blank":
        page.goto(address.replace("/lab/tree/00_why.ipynb?", f"/lab/tree/{path}?reset&"), wait_until="commit")
    else:
        menu(page, "File", "Save All")  # or it would be asked for
        expect(page.locator(".jp-mod-dirty")).to_have_count(0)
        menu(page, "File", "Close All Tabs")
        expect(page.locator(".jp-NotebookPanel")).to_have_count(0)
        menu(page, "File", "Open from Path")
        page.locator(".jp-Dialog input").fill(path)
        page.locator(".jp-Dialog .jp-mod-accept").click()
    expect(page.locator(".jp-NotebookPanel-toolbar")).to_be_visible(timeout=KERNEL_MS)
    wait_until_idle(page, KERNEL_MS)


def with_less(path):
    """The path of a notebook, whose calls now do LESS."""
    notebook = nbformat.read(path, as_version=4)
    for much, less in LESS[path.name[:2]].items():
        (cell,) = [cell for cell in notebook.cells if much in cell.source]
        cell.source = cell.source.replace(much, less)
    nbformat.write(notebook, path)
    return path


def menu(page, *names):
    """Choose an item of the menu bar. By classes: to look for roles, Chromium computes the style of all elements."""
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(rf"^{names[0]}$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile(rf"^{names[1]}")).click()


def wait_until_idle(page, timeout):
    """Wait until the status bar says that the kernel has nothing to do."""
    page.locator(".jp-StatusBar-TextItem", has_text=IDLE).wait_for(timeout=timeout)


def wait_for(page, text):
    """Wait until an output says this, or until a cell fails, which is an error at once."""
    said = page.locator(".jp-OutputArea-output").get_by_text(text)
    failed = page.locator("[data-mime-type='application/vnd.jupyter.error']")
    said.or_(failed).first.wait_for(state="attached", timeout=RUN_MS)  # expect() would describe the page by roles, too
    assert failed.count() == 0, "\n".join(failed.all_text_contents())


def wait_for_the_end(page, path):
    """Wait until all cells of the notebook at `path` have run; none failed but where an exception is to be seen."""
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    last = page.locator(".jp-CodeCell").last.locator(".jp-InputPrompt")
    expect(last).to_have_text(re.compile(r"^\[\d+\]:$"), timeout=RUN_MS)
    wait_until_idle(page, RUN_MS)
    cells = page.locator(".jp-CodeCell")
    assert cells.count() == len(code)
    for i, cell in enumerate(code):
        failed = cells.nth(i).locator("[data-mime-type='application/vnd.jupyter.error']")
        may_fail = "raises-exception" in cell.metadata.get("tags", [])
        assert may_fail or failed.count() == 0, "\n".join(failed.all_text_contents())


def screenshot(page, locator, name):
    """What the window shows where this element is, as a picture to look at: tests/browser/NAME."""
    for _ in range(3):  # cells get their height when they come into view, which moves what is below them
        locator.evaluate("element => element.scrollIntoView({block: 'center'})")
        page.wait_for_timeout(150)
    page.screenshot(path=SCREENSHOTS / name)


def pictures(page):
    """Leave a screenshot of each picture of 04, and see that it is one."""
    for call, name in PICTURES.items():
        cell = page.locator(".jp-CodeCell", has_text=call)
        picture = cell.locator(".jp-OutputArea-output img, .jp-OutputArea-output pre").last
        expect(picture).to_be_attached()
        screenshot(page, picture, f"04_{name}.png")
        assert width_of(cell.locator("img").last) > 500, f"{call} left no picture"


def width_of(picture):
    """The pixels of a picture from left to right; waits until it is decoded, which fails where it is none."""
    return picture.evaluate("image => image.decode().then(() => image.naturalWidth)")


def test_the_stop_button_ends_a_stuck_cell_and_a_wrong_answer_is_explained(page, served):
    """Notebook 00, and below its cells two exercises of 04, in one kernel."""
    path = with_less(served[1] / "solutions" / "00_engines.ipynb")
    notebook = nbformat.read(path, as_version=4)
    exercises = {cell.id: cell for cell in nbformat.read(served[1] / "04_ring_all_reduce.ipynb", as_version=4).cells}
    exercises["exercise-4-1"].source = WRONG.strip()
    names = ("exercise-4-1", "check-4-1", "exercise-4-2", "check-4-2")
    exercises["check-4-2"].metadata["tags"] = ["raises-exception"]
    notebook.cells += [exercises[name] for name in names]
    nbformat.write(notebook, path)
    open_notebook(page, served, f"solutions/{path.name}")
    menu(page, "Run", "Run All Cells")
    outputs = page.locator(".jp-OutputArea-output")
    expect(outputs.get_by_text("you guessed 100")).to_be_attached(timeout=RUN_MS)
    expect(outputs.get_by_text("all are here").first).to_be_attached(timeout=RUN_MS)
    page.get_by_title("Interrupt the kernel").click()
    expect(outputs.get_by_text("cycle: 0 -> 1 -> 2 -> 3 -> 0")).to_be_attached()
    expect(outputs.get_by_text("the same four processes answer")).to_be_attached()
    wait_for_the_end(page, path)
    screenshot(page, outputs.get_by_text("cycle: 0 -> 1 -> 2 -> 3 -> 0"), "stopped.png")
    expect(outputs.get_by_text("4.1 reduce_scatter: not yet (deadlock)")).to_be_attached()
    expect(outputs.get_by_text("ranks 0-2 all send first").first).to_be_attached()
    expect(outputs.get_by_text("For a first hint: lab.hint()")).to_be_attached()
    expect(outputs.get_by_text("NotImplementedError: exercise 4.2: write all_gather")).to_be_attached()
    screenshot(page, outputs.get_by_text("4.1 reduce_scatter: not yet"), "wrong_answer.png")


def test_a_guess_is_asked_for_in_one_line_typed_and_kept(page, served, eventually):
    open_notebook(page, served, "01_gradient_descent.ipynb")
    cell = page.locator(".jp-CodeCell", has_text="my_rate = lab.guess(")
    cell.locator(".cm-content").click()
    menu(page, "Run", "Run All Above Selected Cell")
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    said = cell.locator(".jp-OutputArea-output")
    expect(said).to_have_text("ValueError: write your guess in place of ...: a wrong one is worth more than none")
    screenshot(page, said, "guess.png")
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+End")
    for key in ("ArrowLeft", *["Backspace"] * 3, "7", "Control+Enter"):
        page.keyboard.press(key)
    expect(said).to_have_count(0)
    expect(cell.locator(".cm-content")).to_have_text(re.compile(r'converges", 7\)$'))
    kept = served[1].parent / "home" / ".hpdl" / "progress.jsonl"
    eventually(lambda: kept.exists() and '"value": 7}' in kept.read_text())


def test_a_live_plot_stays_in_the_window_below_its_cell(page, served):
    """Notebook 01: Shift+Enter in a cell of the upper half selects the next one, which must not hold its place."""
    open_notebook(page, served, "solutions/01_gradient_descent.ipynb")
    cell = page.locator(".jp-CodeCell", has_text="walks = lab.landscape(")
    cell.locator(".cm-content").click()
    menu(page, "Run", "Run All Above Selected Cell")
    wait_for(page, "1.2 gradient_step: correct")
    wait_until_idle(page, RUN_MS)
    boxes = page.locator(".jp-OutputArea-output pre").all()
    assert boxes and {box.evaluate("box => getComputedStyle(box).wordBreak") for box in boxes} == {"normal"}
    panel = page.locator(".jp-WindowedPanel-outer")
    for _ in range(3):  # as in screenshot()
        cell.evaluate("element => element.scrollIntoView({block: 'start'})")
        panel.evaluate("panel => panel.scrollTop -= 100")
        page.wait_for_timeout(150)
    cell.locator(".cm-content").click()
    top, height = cell.bounding_box()["y"], page.viewport_size["height"]
    assert top < height / 2
    page.keyboard.press("Shift+Enter")
    plot = cell.locator(".jp-OutputArea-output img")
    plot.wait_for(timeout=RUN_MS)
    for moment in range(20):
        box = plot.bounding_box()
        assert box is None or top < box["y"] < box["y"] + box["height"] < height, (moment, box)  # None: a new frame
        page.wait_for_timeout(100)
    page.screenshot(path=SCREENSHOTS / "live_plot.png")
    wait_until_idle(page, RUN_MS)


PICKER = ("lab.start(", "my_grid = ", "lab.grid(", "picker.set(")  # the cells of notebook 11 that it needs


def test_the_picker_of_notebook_11_follows_its_sliders_runs_and_stops(page, served, eventually):
    path = served[1] / "solutions" / "11_hybrid_parallel.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if any(call in cell.source for call in PICKER)]
    for cell in notebook.cells:
        cell.source = cell.source.replace("picker.run()\n", "")  # the button does it
    notebook.cells.append(nbformat.v4.new_code_cell('lab.grid("gpt3");'))
    nbformat.write(notebook, path)
    open_notebook(page, served, f"solutions/{path.name}")
    menu(page, "Run", "Run All Cells")
    cell, large = (page.locator(".jp-CodeCell", has_text=call) for call in ('lab.grid("gpt", ', 'lab.grid("gpt3")'))
    wait_for_the_end(page, path)
    shards = cell.get_by_role("slider").nth(2)
    shards.focus()
    shards.press("ArrowRight")  # tp 1 -> 2
    expect(cell.get_by_text("pp 2 -> 1, so that 2 x 1 x 2 = 4 ranks")).to_be_visible()
    expect(cell.get_by_text("2.18 MB of ")).to_be_visible()
    cell.get_by_role("button", name="Run it").click()
    expect(cell.get_by_text(re.compile("dp=2, pp=1, tp=2: measured .* a step"))).to_be_visible(timeout=RUN_MS)
    picture = cell.locator("img").last
    eventually(lambda: picture.evaluate("image => image.naturalWidth") > 1000)  # it comes after the text
    screenshot(page, picture, "11_picker.png")
    large.get_by_role("button", name="Run it").click()
    expect(large.get_by_text("needs 1,024 engines and 4 run: simulating it instead")).to_be_visible()
    large.get_by_role("button", name="Stop").click()
    expect(large.get_by_text("Stopped.")).to_be_visible()
    screenshot(page, large.locator("img").last, "11_gpt3.png")


def test_notebook_04_runs_to_the_finished_plot_and_says_correct(page, served):
    """Both parts; engines that other open notebooks use are left to them, which is all that may be said as an error."""
    path = with_less(served[1] / "solutions" / "04_ring_all_reduce.ipynb")
    open_notebook(page, served, f"solutions/{path.name}")
    menu(page, "Run", "Run All Cells")
    for answer in ("4.1 reduce_scatter", "4.2 all_gather", "4.3 all_reduce"):
        wait_for(page, f"{answer}: correct")
    wait_for(page, "engines: right on 4 MPI ranks")
    wait_for(page, re.compile("test accuracy 9[789]"))
    wait_for(page, "4.4 broadcast: correct")
    wait_for(page, "4.5 choose: correct")
    wait_for(page, "ring and tree cross at")
    wait_for_the_end(page, path)
    said = page.locator("[data-mime-type='application/vnd.jupyter.stderr']").all_text_contents()
    assert len(said) <= 1 and all(REFUSED in text for text in said), said
    pictures(page)


def test_pictures_follow_their_sliders_through_kernel_and_browser(page, served):
    """Each in a cell of its own."""
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    calls = [f'lab.explore("{name}")' for name in EXPLORED]
    cells = ["from hpdl_lab import lab", *calls, 'lab.show("ring", ranks=4);']
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    path = served[1] / "sliders.ipynb"
    nbformat.write(notebook, path)
    open_notebook(page, served, path.name)
    menu(page, "Run", "Run All Cells")
    wait_for_the_end(page, path)
    for call in calls:
        cell = page.locator(".jp-CodeCell", has_text=call)
        cell.scroll_into_view_if_needed()
        slider, picture = cell.get_by_role("slider").first, cell.locator("img").last
        line, before = cell.locator(".widget-html-content").first, picture.get_attribute("src")
        said = line.inner_text()
        slider.focus()
        slider.press("ArrowRight")
        expect(picture).not_to_have_attribute("src", before)
        expect(line).not_to_have_text(said)
        assert width_of(picture) == 840
        screenshot(page, picture, f"{call[13:-2]}.png")
    cell = page.locator(".jp-CodeCell", has_text="lab.show(")
    cell.get_by_role("slider").press("ArrowRight")
    expect(cell.get_by_text("ring, steps done: 1 of 6")).to_be_visible()
    cell.locator("button").first.click()  # play
    expect(cell.get_by_text(re.compile("ring, steps done: [2-5] of 6"))).to_be_visible()
    cell.locator("button").first.click()  # pause
    screenshot(page, cell.locator("img").first, "steps.png")
    stopped = cell.locator(".widget-html-content").inner_text()
    page.wait_for_timeout(1500)  # more than a step of the animation
    assert cell.locator(".widget-html-content").inner_text() == stopped
    cell = page.locator(".jp-CodeCell", has_text='"tensor"')
    cell.get_by_role("slider").first.focus()
    for _ in range(3):
        cell.get_by_role("slider").first.press("ArrowRight")  # tp 64
    expect(cell.get_by_text("96 heads of 128 cannot be shared by tp=64 ranks")).to_be_visible()
    screenshot(page, cell.locator("img").last, "cannot_be.png")
