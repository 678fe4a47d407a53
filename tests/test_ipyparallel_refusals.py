"""Engines of ipyparallel that cannot be the laboratory's, and the one sentence for each; the engines are played."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ipyparallel.error import RemoteError

from hpdl_lab.engines import ipyparallel_job, node_agent
from hpdl_lab.engines.ipyparallel_job import VERSIONS, WHO, Found, Hosts, JobStatus, Refused

PYTHON = sys.version_info[:2]
EQUAL = {name: ipyparallel_job.version(name) for name in ipyparallel_job.SAME}
HOST = {"host": "machine n1", "node": "n1", "addresses": [], "cores": [0], "environment": {}, "hydra": True}


class Engine:
    """An engine that answers WHO, VERSIONS and the question for its host; what is an exception is raised."""

    def __init__(self, who=((3, 9), "/opt/python", "n1"), versions=EQUAL, host=HOST):
        self.who, self.versions, self.host = who, versions, host

    def apply_async(self, function, expression):
        said = {WHO: self.who, VERSIONS: self.versions}.get(expression, self.host)

        def get(timeout):
            if isinstance(said, Exception):
                raise said
            return said

        done = not isinstance(said, TimeoutError)
        return SimpleNamespace(wait=lambda seconds: done, get=get)


class Client(dict):
    ids = property(sorted)

    def close(self):
        pass


def mine(**how):
    return Engine(who=(PYTHON, "/opt/python", "n1"), **how)


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        (Engine(), rf"engine 1 on n1 runs Python 3\.9 \(/opt/python\), this notebook {PYTHON[0]}\.{PYTHON[1]}: start "),
        (mine(versions=EQUAL | {"torch": "1.0"}), r"engine 1 on n1 has torch 1\.0 \(/opt/python\), this notebook has "),
        (mine(versions={}), "engine 1 on n1 has no hpdl_lab .*: start the engines from this environment"),
        (mine(host=HOST | {"host": "machine n2", "hydra": False}), "ranks on several hosts .* need MPICH"),
        (mine(host=TimeoutError()), "engine 1 of ipyparallel does not answer within 30 s: it may be busy with a cell"),
        (mine(host=RemoteError("OSError", "no space", "")), "engine 1 of ipyparallel says OSError: no space"),
    ],
)  # fmt: skip
def test_an_engine_that_will_not_do(engine, sentence, monkeypatch, tmp_path):
    client = Client({0: mine(), 1: engine})
    monkeypatch.setattr(ipyparallel_job.ipyparallel, "Client", lambda *connection, **how: client)
    hosts = Hosts(Found({"interface": "tcp://10.1.0.5"}), 2, JobStatus(str(tmp_path)), 1)
    with pytest.raises(Refused, match=f"^{sentence}") as raised:
        hosts.gather()
    assert "\n" not in str(raised.value)
    if isinstance(engine.host, TimeoutError):
        assert "engine 1 of ipyparallel is busy, perhaps with a cell" in (tmp_path / "job.json").read_text()


def test_engines_that_another_notebook_has_say_whose_they_are(monkeypatch):
    with subprocess.Popen(["sleep", "1000"]) as agent:
        monkeypatch.setattr(node_agent, "_begun", [agent])
        monkeypatch.setattr(node_agent, "_session", "ada on login1, /tmp/x")
        said = node_agent.begin_agent(json.dumps({"session": "bob on login2, /tmp/y"}), 0)
        agent.kill()
    assert " are the laboratory of ada on login1, /tmp/x: end it there, lab.stop(), or work there" in said
