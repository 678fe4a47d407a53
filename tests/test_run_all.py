"""What `make test` counts, and that a step which hangs is ended."""

import importlib.util
import os
import sys
from pathlib import Path

import psutil
import pytest


@pytest.fixture
def run_all():
    """The module run_all.py, which stands beside the tests and is run by itself."""
    spec = importlib.util.spec_from_file_location("run_all", Path(__file__).with_name("run_all.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_step_that_hangs_is_stopped_with_all_that_it_started(tmp_path, monkeypatch, run_all, eventually, until_ended):
    told, children = tmp_path / "pid", []

    def start(*command, start=psutil.Popen, **how):
        step = start(*command, **how)
        eventually(lambda: told.exists() and told.read_text().endswith("\n"))  # its time begins when it hangs
        children.extend(step.children())
        return step

    monkeypatch.setattr(run_all, "REPORT_SECONDS", 0.2)
    monkeypatch.setattr(run_all.psutil, "Popen", start)
    script = f"trap '' INT; sleep 600 & echo $! > {told}; wait; wait"
    assert run_all.run(["sh", "-c", script], 0.2, os.environ) is None
    assert [child.pid for child in children] == [int(told.read_text())]
    until_ended(children)


@pytest.mark.parametrize(
    ("xml", "ending", "counts", "fault"),
    [
        (['<testsuite><testcase classname="a" name="b"/></testsuite>'], 0, (1, 0), ""),
        (['<testsuite><testcase name="b"><failure/></testcase></testsuite>'], 1, (0, 1), ""),
        (['<testsuite><testcase name="b"/></testsuite>'] * 2, 0, (1, 0), ""),
        (['<testsuite><testcase name="b"/></testsuite>', None], 1, (1, 1), "1 of 2 wrote no result, exit code 1"),
        (
            [
                '<testsuite><testcase name="b"/></testsuite>',
                '<testsuite><testcase name="b"><error/></testcase></testsuite>',
            ],
            1,
            (0, 1),
            "",
        ),
        (["<testsuite/>"], 5, (0, 1), "ran no test, exit code 5"),
        (["<testsuite><testcase"], None, (0, 1), "stopped at its time limit"),
        (['<testsuite><testcase name="b"/></testsuite>'], None, (1, 1), "stopped at its time limit"),
        (['<testsuite><testcase name="b"/></testsuite>'], -11, (1, 1), "exit code -11 although no test failed"),
    ],
)
def test_steps_are_counted(tmp_path, xml, ending, counts, fault, run_all):
    for rank, text in enumerate(xml):
        if text is not None:
            (tmp_path / ("x.xml" if len(xml) == 1 else f"x.xml-{rank}")).write_text(text)
    counted, said = run_all.count(tmp_path / "x.xml", len(xml), ending)
    assert ((counted["passed"], counted["failed"]), said) == (counts, fault)


TWO_FILES = {
    "test_dies.py": "import os\ndef test_right(): pass\ndef test_dies(): os.kill(os.getpid(), 9)\n",
    "test_hangs.py": "import pytest, time\n@pytest.mark.timeout(1)\ndef test_hangs(): time.sleep(60)\n",
}


@pytest.mark.timeout(150)
def test_of_several_at_a_time_one_that_dies_and_one_that_hangs_count_as_failed(tmp_path, run_all):
    for name, source in TWO_FILES.items():
        (tmp_path / name).write_text(source)
    command = run_all.pytest(sys.executable, *run_all.NO_CELLS, *run_all.WORKERS, "-p", "no:cacheprovider", tmp_path)
    xml = tmp_path / "x.xml"
    ending = run_all.run([str(part).replace("{xml}", str(xml)) for part in command], 120, os.environ)
    assert {(name, outcome) for (_, name), outcome in run_all.read(xml)} == {
        ("test_right", "passed"),
        ("test_dies", "failed"),
        ("test_hangs", "failed"),
    }
    counts, fault = run_all.count(xml, 1, ending)
    assert (counts["failed"], fault) == (2, "")
