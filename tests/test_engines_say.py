"""What the ranks say on real engines: errors, output, rows; and two notebooks that share the engines."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from functools import partial

import numpy as np
import pytest

from hpdl_lab.engines import run
from hpdl_lab.engines.errors import EngineError, RunFailed
from tests.onlooker import Onlooker, waiting


@pytest.fixture(autouse=True)
def hears(monkeypatch):
    """The notebook hears of every rank, however late its answer: without one, a rank is said to compute."""
    monkeypatch.setattr(run, "ANSWER", 40.0)


def rank_of(comm):
    return comm.rank


# -- errors -------------------------------------------------------------------------------------------------------


def test_an_error_is_shown_once_per_kind_with_ranks_and_line(cluster):
    def wrong(comm):
        if comm.rank < 3:
            raise KeyError("weights")
        return 1 / 0

    with pytest.raises(RunFailed) as caught:
        cluster.run(wrong)
    first = wrong.__code__.co_firstlineno
    text = str(caught.value)
    assert "ranks 0-2: KeyError: 'weights'" in text
    assert f'test_engines_say.py:{first + 2} in wrong:  raise KeyError("weights")' in text
    assert "rank 3: ZeroDivisionError: division by zero" in text
    assert text.count("KeyError:") == 1
    assert caught.value.errors[3].line == f"test_engines_say.py:{first + 3}"
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_an_error_inside_a_library_shows_the_attendees_line(cluster):
    def wrong(comm):
        return np.zeros(3).reshape(2, 2)

    with pytest.raises(RunFailed, match=f"test_engines_say.py:{wrong.__code__.co_firstlineno + 1} in wrong"):
        cluster.run(wrong)


def test_what_the_attendees_line_does_not_explain_is_shown_with_the_librarys_lines(cluster):
    """A KeyError out of an import has once been all that there was to read."""

    def wrong(comm):
        return zipfile.ZipFile(io.BytesIO(b"PK\x05\x06" + bytes(18))).getinfo("weights")

    with pytest.raises(RunFailed) as caught:
        cluster.run(wrong)
    mine = f"test_engines_say.py:{wrong.__code__.co_firstlineno + 1} in wrong"
    assert re.search(rf"KeyError: .*\n    {mine}:.*\n    zipfile.py:\d+ in getinfo:  raise KeyError", str(caught.value))
    assert caught.value.errors[0].line == mine.removesuffix(" in wrong")


class Unloadable:
    """Fails when an engine unpickles it."""

    def __reduce__(self):
        return {}.__getitem__, ("weights",)


def test_an_argument_that_cannot_be_loaded_is_shown_with_the_librarys_lines(cluster):
    with pytest.raises(RunFailed, match=r"KeyError: 'weights'\n    messages.py:\d+ in \w+:"):
        cluster.run(lambda comm, x: x, Unloadable())


def test_other_messages_of_one_kind_are_shown_too(cluster):
    def wrong(comm):
        raise ValueError(f"rank {comm.rank} has 3 rows")

    with pytest.raises(
        RunFailed, match=r"ranks 0-3: ValueError: rank 0 has 3 rows\n    and on other ranks: rank 1 has"
    ):
        cluster.run(wrong)


def test_ranks_that_wait_for_one_that_failed_are_told_of_soon(cluster, within):
    def wrong(comm):
        if comm.rank == 2:
            raise ValueError("no data")
        comm.recv(np.zeros(1), 2)

    began = time.monotonic()
    with pytest.raises(RunFailed, match=r"rank 2: ValueError: no data") as caught:
        cluster.run(wrong, deadline=30)
    assert time.monotonic() - began < within(5)
    assert list(caught.value.errors) == [2]
    assert cluster.run(rank_of) == [0, 1, 2, 3]


def test_what_the_others_wait_for_is_told_also_when_a_rank_fails_at_once(cluster, monkeypatch):
    def wrong(comm):
        if comm.rank == 2:
            raise KeyError("x")
        comm.barrier()

    where = rf"test_engines_say.py:{wrong.__code__.co_firstlineno + 3}"
    for _ in range(3):
        monkeypatch.setattr(run, "GRACE", 40.0)  # one that is late shall not be interrupted before it waits
        soon = partial(monkeypatch.setattr, run, "GRACE", 0.0)
        with (
            Onlooker(cluster.path, (0, 1, 3), waiting("barrier"), soon),
            pytest.raises(RunFailed, match=r"^rank 2: KeyError: 'x'") as caught,
        ):
            cluster.run(wrong, deadline=30)
        text = str(caught.value)
        for rank in (0, 1, 3):
            # one that gave up by itself before a late rank had arrived names that one too: "with ranks 2, 3"
            line = rf"^  {rank} +waiting +barrier +with ranks? [\d, -]*[23][, \d].*{where}$"
            assert re.search(line, text, re.M), text
        assert re.search(r"rank 2 raised KeyError at test_engines_say.py:\d+ and never arrived$", text), text


def test_sys_exit_and_a_raised_keyboard_interrupt_do_not_end_the_engine(cluster):
    with pytest.raises(RunFailed, match="SystemExit: 3"):
        cluster.run(lambda comm: sys.exit(3))
    pids = cluster.run(lambda comm: os.getpid())

    def interrupts_itself(comm):
        raise KeyboardInterrupt

    with pytest.raises(RunFailed, match="ranks 0-3: stopped while running"):
        cluster.run(interrupts_itself)
    assert cluster.run(lambda comm: os.getpid()) == pids


# -- output and rows ----------------------------------------------------------------------------------------------


@pytest.fixture
def patient(monkeypatch):
    """Lines wait for those of the other ranks however late these are: what ranks say together does not depend on it."""
    monkeypatch.setattr(run, "PATIENCE", 50.0)


def test_equal_output_is_said_once(cluster, capsys, patient):
    def speak(comm):
        print("hello")
        print("bye" if comm.rank == 3 else "yes")

    cluster.run(speak)
    out = capsys.readouterr().out
    assert out == "ranks 0-3 say hello\nranks 0-2 say yes\nrank 3 says bye\n"


def test_output_without_newline_and_errors_are_not_lost(cluster, capsys, patient):
    def speak(comm):
        print("no newline", end="")
        print("oh", file=sys.stderr)
        os.write(1, b"from compiled code\n")  # goes to the log, not into the protocol

    cluster.run(speak)
    out, err = capsys.readouterr()
    assert out == "ranks 0-3 say no newline\n" and err == "ranks 0-3 say oh\n"


def test_a_progress_bar_is_shown_when_it_has_ended(cluster, capsys, patient):
    def progress(comm):
        for done in range(5):
            print(f"\r{done} of 4", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        print()

    cluster.run(progress)
    assert capsys.readouterr() == ("", "ranks 0-3 say 4 of 4\n")


def there(file):
    """Wait until somebody has made `file`; False where nobody does."""
    give_up = time.monotonic() + 40
    while not os.path.exists(file) and time.monotonic() < give_up:
        time.sleep(0.005)
    return os.path.exists(file)


def test_output_streams_while_the_ranks_run(cluster, monkeypatch, tmp_path):
    def speak(comm, file):
        print("first")
        heard = there(file)
        print("second")
        return heard

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Listener("first", tmp_path / "heard"))
        assert cluster.run(speak, str(tmp_path / "heard")) == [True] * 4


class Listener:
    """A stand-in for sys.stdout that makes `file` when it hears `word`, and keeps all that it hears."""

    def __init__(self, word, file):
        self.word, self.file, self.heard = word, file, ""

    def write(self, text):
        self.heard += text
        if self.word in self.heard:
            self.file.touch()

    def flush(self):
        pass


def test_rows_stream_into_this_thread_while_the_ranks_run(cluster, tmp_path):
    def report(comm, folder):
        for step in range(20):
            comm.report(step=step, loss=1 / (step + 1))
            if not there(f"{folder}/{comm.rank}-{step}"):
                return False
        return True

    arrived = []

    def on_row(row):
        arrived.append((threading.get_ident(), row))
        (tmp_path / f"{row['rank']}-{row['step']}").touch()

    results = cluster.run(report, str(tmp_path), on_row=on_row)
    assert results == [True] * 4, "each row has come before its rank went on"
    assert {thread for thread, _ in arrived} == {threading.get_ident()}
    assert [row for _, row in arrived] == results.rows
    assert len(results.rows) == 80 and results.rows[0].keys() == {"rank", "step", "loss"}


def test_an_error_in_on_row_stops_the_ranks_and_is_raised(cluster):
    def report(comm):
        comm.report(step=0)
        while True:
            time.sleep(0.01)

    def plot(row):
        raise ZeroDivisionError("in the plot")

    with pytest.raises(ZeroDivisionError, match="in the plot"):
        cluster.run(report, on_row=plot)
    assert cluster.run(rank_of) == [0, 1, 2, 3]


def test_a_run_inside_on_row_is_refused(cluster):
    def report(comm):
        comm.report(step=0)

    with pytest.raises(EngineError, match="a run is under way"):
        cluster.run(report, on_row=lambda row: cluster.run(rank_of))
    assert cluster.run(rank_of) == [0, 1, 2, 3]


# -- two notebooks ------------------------------------------------------------------------------------------------

OTHER_NOTEBOOK = """
import os, sys, time
from hpdl_lab.engines.cluster import Cluster
cluster = Cluster.start(4)
assert cluster.attached
def hold(comm, file):
    comm.report()
    while not os.path.exists(file):
        time.sleep(0.01)
    return comm.rank
rows = []
def on_row(row):
    rows.append(row)
    if len(rows) == 4:
        print("running", flush=True)
print(cluster.run(hold, sys.argv[1], on_row=on_row), flush=True)
"""


def another_notebook(file):
    """A notebook whose run goes on until there is `file`."""
    argv = [sys.executable, "-c", OTHER_NOTEBOOK, str(file)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def test_two_notebooks_take_turns(cluster, monkeypatch, tmp_path):
    file = tmp_path / "told"
    with another_notebook(file) as other:
        assert other.stdout.readline() == "running\n"
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Listener("Another notebook uses the engines", file))
            assert cluster.run(rank_of) == [0, 1, 2, 3]
        assert file.exists()
        assert other.stdout.readline() == "[0, 1, 2, 3]\n"


def test_a_notebook_that_is_killed_while_it_runs_frees_the_engines(cluster, within, tmp_path):
    pids = cluster.run(lambda comm: os.getpid())
    with another_notebook(tmp_path / "never") as other:
        assert other.stdout.readline() == "running\n"
        other.send_signal(signal.SIGKILL)
    began = time.monotonic()
    assert cluster.run(lambda comm: os.getpid()) == pids
    assert time.monotonic() - began < within(5)
