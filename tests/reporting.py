"""`pytest -p tests.reporting`: each outcome is written down as it happens, for tests/run_all.py to read.

One JSON object a line, in the file that HPDL_TEST_RESULTS names, with the rank in its name if mpiexec has started this:

    {"total": 120}                                                    once the tests are known
    {"test", "outcome", "seconds", "text"}                            after each of set-up, call and tear-down
"""

import json
import os

import pytest

RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def pytest_configure(config):
    path = os.environ.get("HPDL_TEST_RESULTS")
    if path and not hasattr(config, "workerinput"):  # workers of pytest-xdist report to the process that started them
        rank = next((os.environ[name] for name in RANK if name in os.environ), "0")
        config.pluginmanager.register(Results(f"{path}-{rank}"))


class Results:
    def __init__(self, path):
        self.file = open(path, "w", buffering=1)
        self.known = False

    def write(self, **facts):
        self.file.write(json.dumps(facts) + "\n")

    def total(self, number):
        if not self.known:  # every worker of pytest-xdist knows all tests
            self.known = True
            self.write(total=number)

    def pytest_collection_finish(self, session):
        if session.items:
            self.total(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        self.total(len(ids))

    def pytest_runtest_logreport(self, report):
        text = "" if report.passed else report.longreprtext
        self.write(test=report.nodeid, outcome=report.outcome, seconds=report.duration, text=text)

    def pytest_collectreport(self, report):
        if report.failed:
            self.write(test=report.nodeid, outcome="failed", seconds=0.0, text=report.longreprtext)
