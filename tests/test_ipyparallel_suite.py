"""ipyparallel's own tests, which its package brings along, with the engines of the laboratory in place of theirs.

In a pytest of its own this file is a plugin that gives them those engines, and leaves out what does not apply.
"""

import contextlib
import fnmatch
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PASSED = 174  # of ipyparallel 9.2
MODULES = (
    "view",  # rc[:], push, pull, scatter, map, imports, output
    "magics",  # %px, %%px, %autopx, %pxresult, %pxconfig, the stop button
    "asyncresult",
    "client",
    "lbview",  # load balancing
    "executor",
    "remotefunction",
    "dependency",
)
ENGINES = 6  # the most that one of their tests asks for
LEFT_OUT = {
    "engines come and go one by one; here they are the ranks of one MPI job: lab.restart(n)": (
        "test_ids",
        "test_lazy_all_targets",
        "test_wait_for_engines",
    ),
    "it kills engines: lab.restart() follows (tests/test_engines_px.py)": (
        "test_z_crash_mux",
        "test_z_crash",
        "test_shutdown",
        "test_cellpx_keyboard_interrupt_SIGKILL",
        "test_cellpx_keyboard_interrupt_signal_9",
    ),
    "it asks the controller for results, which neither ours nor ipyparallel's own keeps unless told to": (
        "test_get_result",
        "test_get_execute_result",
        "test_hubresult_timestamps",
        "test_autopx_blocking",
        "test_hub_history",
        "test_db_query_*",
        "test_resubmit*",
        "test_purge_hub_results",
        "test_purge_all_*",
        "test_purge_everything",
    ),
    "a cell that fails drops those behind it; here all ranks run them, else some would be left behind": (
        "test_autopx_nonblocking",
    ),
    "it moves the controller to another machine; ours has no address, only Unix sockets": (
        "test_warning_on_hostname_match",
    ),
}

running = contextlib.ExitStack()  # in the pytest that has this file as a plugin


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """Put the engines of one laboratory in the place of those that ipyparallel's tests start for each module."""
    import ipyparallel.tests as suite
    from IPython.paths import get_ipython_dir

    from hpdl_lab.engines import session_dir
    from hpdl_lab.engines.cluster import Cluster

    started = []

    def setup():
        if not started:
            started.append(running.enter_context(Cluster.start(ENGINES)))
            started[0].client[:].execute("%colors nocolor", block=True)  # as their engines are started
            started[0].client.close()
        os.symlink(session_dir.profile_dir(started[0].path), os.path.join(get_ipython_dir(), "profile_iptest"))

    def add_engines(n=1, profile="iptest", total=False):
        assert total and n <= ENGINES, "no engines are added here: the test belongs in LEFT_OUT"
        return []

    suite.setup, suite.teardown, suite.add_engines = setup, lambda: None, add_engines


def pytest_unconfigure():
    running.close()


def pytest_collection_modifyitems(items):
    names = [name for group in LEFT_OUT.values() for name in group]
    unknown = [name for name in names if not fnmatch.filter([item.name for item in items], name)]
    assert not unknown, f"ipyparallel has no tests {unknown}: take them out of LEFT_OUT"
    items[:] = [item for item in items if not any(fnmatch.fnmatch(item.name, name) for name in names)]


def test_what_ipyparallel_expects_of_engines_and_of_px_holds_for_those_of_the_laboratory(no_engines_yet):
    options = f"-q -p no:cacheprovider -p no:xdist -c {os.devnull} -p tests.test_ipyparallel_suite --pyargs".split()
    with tempfile.TemporaryDirectory(prefix="hpdl-t-", dir="/tmp") as folder:  # their tests leave files there
        env = os.environ | {"TMPDIR": folder, "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-m", "pytest", *options, *(f"ipyparallel.tests.test_{name}" for name in MODULES)]
        said = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert said.returncode == 0, said.stdout[-5000:] + said.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", said.stdout)
    assert int(passed) >= PASSED, said.stdout[-500:]
