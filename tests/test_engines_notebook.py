"""Engines under a real Jupyter kernel: what an attendee sees, the stop button, `%%px`, a kernel that is killed."""

import json
import os
import queue
import re
import signal
import tempfile
import threading
import time
from typing import NamedTuple

import pytest

from tests.onlooker import Onlooker, UsedCores, waiting

manager = pytest.importorskip("jupyter_client.manager")


IMPORTS = """
import os, time
import numpy as np
from hpdl_lab import lab
from hpdl_lab.engines import run
run.PATIENCE = 60.0  # so that what all ranks say is said once, however late one of them is
run.ANSWER = 60.0  # so that the notebook hears of every rank
"""


class Said(NamedTuple):
    """What a cell has shown: text, HTML, the name and text of its error, and the seconds that it took."""

    text: str
    html: str
    error: str
    seconds: float

    @property
    def value(self):
        """The last line of text; on a busy machine others before it say that an engine is late."""
        return self.text.rpartition("\n")[2]


class Notebook:
    """A Jupyter kernel whose engines live below `root`."""

    def __init__(self, root):
        self.manager, self.client = manager.start_new_kernel(env=os.environ | {"XDG_RUNTIME_DIR": root})
        self.pid = self.manager.provisioner.pid

    def cell(self, code, act=None, once="", seen=lambda: True):
        """Run `code` and return Said.

        act: called as soon as the cell has said `once`, and seen() then; Said.seconds counts from then.
        """
        request, began, acted = self.client.execute(code), None, None
        text, html, error, give_up = [], [], "", time.monotonic() + 100
        while True:
            if began is not None and act is not None and acted is None and seen():
                act()
                acted = time.monotonic()
            assert time.monotonic() < give_up, f"{code} hangs"
            try:
                message = self.client.get_iopub_msg(timeout=0.05)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                text.append(content["text"])
            elif kind in ("display_data", "execute_result"):
                text.append(content["data"].get("text/plain", ""))
                html.append(content["data"].get("text/html", ""))
            elif kind == "error":
                error = "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                break
            if began is None and once in "\n".join(text):
                began = time.monotonic()
        if self.was_dropped(request):
            return self.cell(code, act, once, seen)
        return Said("\n".join(text), "\n".join(html), error, time.monotonic() - (acted or began))

    def was_dropped(self, request):
        """Whether ipykernel has not run the cell, because it came right after one that failed."""
        while (reply := self.client.get_shell_msg(timeout=300))["parent_header"].get("msg_id") != request:
            pass
        return reply["content"]["status"] == "aborted"

    def stop(self):
        """Press the stop button."""
        self.manager.interrupt_kernel()

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def root(private_runtime_dir):
    with tempfile.TemporaryDirectory(prefix="hpdl-n-", dir="/tmp") as path:
        yield path


@pytest.fixture(scope="module")
def notebook(root, traces):
    """A notebook with two engines; the tests below are its cells, in order."""
    notebook = Notebook(root)
    assert notebook.cell(IMPORTS).error == ""
    said = notebook.cell("treasure = 42\ncluster = lab.start(2)")
    assert said.error == "" and said.html.count("<table>") == 2, said
    yield notebook
    notebook.close()
    traces(root).wait_until_gone()


def test_the_table_is_shown_once_also_as_the_value_of_a_cell(notebook):
    assert notebook.cell("lab.start(2)").html.count("<th>rank</th>") == 1
    assert notebook.cell("cluster").html.count("<th>rank</th>") == 1
    assert notebook.cell("other = cluster").html == ""


def test_a_function_of_a_cell_and_its_globals(notebook):
    notebook.cell("offset = 10\ndef add(comm, x):\n    return x + offset + comm.rank")
    assert notebook.cell("lab.run(add, 1)").value == "[11, 12]"
    notebook.cell("offset = 20")
    assert notebook.cell("lab.run(add, 1)").value == "[21, 22]"
    assert "ranks 0, 1 say hello 2\n" in notebook.cell("lab.run(lambda comm: print('hello', comm.size)); 0").text


def test_an_error_is_one_text_with_the_line_of_the_cell(notebook):
    said = notebook.cell("def wrong(comm):\n    y = comm.rank\n    return y / (y - 1)\n\nlab.run(wrong)")
    text, table = said.error.split("\n  rank  state ")
    assert text == "RunFailed: rank 1: ZeroDivisionError: division by zero\n    cell:3 in wrong:  return y / (y - 1)"
    assert table.count("finished") == 1 and table.endswith("likely: rank 1 raised ZeroDivisionError at line 3")


STUCK = """def stuck(comm):
    print("I wait")
    comm.recv(np.zeros(10), (comm.rank + 1) % comm.size)

lab.run(stuck, deadline=600)"""


def test_the_stop_button(notebook, root, traces, within):
    pids = notebook.cell("lab.run(lambda comm: os.getpid())").value
    all_wait = threading.Event()
    with Onlooker(traces(root).path, range(2), waiting("recv"), all_wait.set):
        said = notebook.cell(STUCK, notebook.stop, once="I wait", seen=all_wait.is_set)
    assert said.seconds < within(2)
    assert "ranks 0, 1 say I wait" in said.text
    assert re.match(
        r"RunStopped: stopped after [\d.]+ s, when\n  rank .*\n  0 +waiting +recv +from rank 1 +80 ", said.error
    )
    assert "cell:3\n" in said.error and "cycle: 0 -> 1 -> 0" in said.error and "Traceback" not in said.error
    assert notebook.cell("lab.run(lambda comm: os.getpid())").value == pids


def test_the_stop_button_in_an_endless_loop(notebook, within):
    loop = "def loop(comm):\n    print('I go')\n    while True:\n        pass\nlab.run(loop)"
    pids, since = json.loads(notebook.cell("lab.run(lambda comm: os.getpid())").value), []

    def all_compute():
        since[:] = since or [UsedCores(pids)]
        return since[0].by_all()

    said = notebook.cell(loop, notebook.stop, once="I go", seen=all_compute)
    assert said.seconds < within(2) and len(re.findall(r"running +cell:[34]", said.error)) == 2
    assert notebook.cell("lab.run(lambda comm: comm.rank)").value == "[0, 1]"


# Each rank says its line with one write: what ipykernel sends between two of them gets two labels from ipyparallel.
MEET = """%%px
from hpdl_lab.comm import world
comm = world()
comm.barrier()
print(f"met {comm.rank}")"""


SLEEP = """%%px
import time
open(f"{folder}/{{mpi_rank}}", "w").close()
time.sleep(90)"""


def test_px_works_and_its_stop_button_too(notebook, within, tmp_path):
    said = notebook.cell("%%px\nx = mpi_rank * 10\nprint(f'{x} {mpi_size}')")
    assert said.error == "" and all(f"{10 * r} 2" in said.text for r in range(2))
    assert notebook.cell("cluster.client[:]['x']").text == "[0, 10]"
    all_sleep = lambda: len(os.listdir(tmp_path)) == 2  # noqa: E731
    assert notebook.cell(SLEEP.format(folder=tmp_path), notebook.stop, seen=all_sleep).seconds < within(5)
    said = notebook.cell(MEET)
    assert said.error == "" and all(f"met {r}" in said.text for r in range(2))
    assert notebook.cell("lab.run(lambda comm: comm.rank)").value == "[0, 1]"


LATE = """
from ipyparallel.client.view import DirectView
execute = DirectView.execute
def late(*args, **options):
    result = execute(*args, **options)
    result.wait_for_output()
    return result
DirectView.execute = late"""


def test_px_shows_what_engines_said_before_the_notebook_listened(notebook):
    assert notebook.cell(LATE).error == ""
    said = notebook.cell("%%px\nprint(f'early {mpi_rank}')\n1 / mpi_rank\nmpi_rank - 5")
    assert all(said.text.count(f"[stdout:{r}] early {r}") == 1 for r in range(2)), said
    assert said.text.count("division by zero") == 1 and "[0:execute]" in said.text and "-4" in said.text
    assert notebook.cell("DirectView.execute = execute").error == ""


BUSY = """
view = cluster.client[:]
view.block = False
busy = view.execute('''
import os, time
open(f"{folder}/{{mpi_rank}}", "w").close()
while not os.path.exists("{folder}/told"):
    time.sleep(0.01)
''')
while len(os.listdir("{folder}")) < 2:
    time.sleep(0.01)"""


def test_a_run_behind_a_busy_px_says_so(notebook, tmp_path):
    notebook.cell(BUSY.format(folder=tmp_path))
    said = notebook.cell("lab.run(lambda comm: comm.rank)", (tmp_path / "told").touch, once="an earlier cell of %px")
    assert "ranks 0, 1 are busy with an earlier cell of %px" in said.text and said.value == "[0, 1]"


def test_a_second_notebook_shares_the_engines(notebook, root):
    second = Notebook(root)
    try:
        second.cell(IMPORTS)
        said = second.cell("lab.start(3)")
        assert "1 other notebook(s) use what is running, 2 engines" in said.error
        assert "other notebook(s)" in said.error and "Using the engines that another notebook" in said.text
        assert second.cell("lab.start(2); 0").error == ""
        mine, theirs = (n.cell("lab.run(lambda comm: os.getpid())").value for n in (notebook, second))
        assert mine == theirs
        os.kill(second.pid, signal.SIGKILL)
    finally:
        second.close()
    assert notebook.cell("lab.run(lambda comm: os.getpid())").value == mine


DIE = """import signal
def die(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()
lab.run(die)"""


def test_a_killed_engine_and_restart(notebook, within):
    said = notebook.cell(DIE)
    assert said.error.startswith("RankFailed: rank 1 was killed by signal 9") and said.seconds < within(5)
    said = notebook.cell("lab.run(lambda comm: comm.rank)")
    assert said.error.startswith("EngineError: rank 1 was killed by signal 9") and "lab.restart()" in said.error
    said = notebook.cell("lab.restart(); 0")
    assert said.error == "" and said.seconds < within(5)
    assert notebook.cell("lab.run(lambda comm: comm.rank + treasure)").value == "[42, 43]"
    assert "1" in notebook.cell("%px print(mpi_rank)").text


def test_a_kernel_that_is_killed_amid_a_run_leaves_nothing(notebook, root, traces):
    notebook.client.execute(STUCK)
    while "I wait" not in str(notebook.client.get_iopub_msg(timeout=300)["content"].get("text")):
        pass
    os.kill(notebook.pid, signal.SIGKILL)
    traces(root).wait_until_gone()
