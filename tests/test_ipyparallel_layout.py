"""What may be asked of PBS, LSF, ssh and clusters of ipyparallel, the job scripts, and which engines are taken."""

import os
import sys
from types import SimpleNamespace

import pytest

from hpdl_lab import features
from hpdl_lab.engines import ipyparallel_job, layout, session_dir
from hpdl_lab.engines.ipyparallel_job import Found, Hosts, JobStatus, Refused
from hpdl_lab.engines.layout import Layout, wanted
from tests.wording import raises

FOUND = {"connection": {"interface": "tcp://10.0.0.1"}}
SITE = Layout(4, "ipyparallel", job={"profile": "/site", "name": "profile site"})


@pytest.mark.parametrize(
    ("time", "minutes"),
    [
        ("90", 90),
        ("1:30", 2),
        ("1:00", 1),
        ("0:30:00", 30),
        ("1:30:00", 90),
        ("0:00:01", 1),
        ("1-12", 2160),
        ("1-12:30", 2190),
        ("2-0:00:01", 2881),
    ],
)
def test_times_in_minutes(time, minutes):
    assert layout.minutes(time) == minutes


@pytest.mark.parametrize(
    ("asked", "running", "found"),
    [
        ({"hosts": ["a"]}, None, Layout(4, "ssh", job={"hosts": ["a"]})),
        ({"hosts": ("a", "b"), "wait": 9}, None, Layout(4, "ssh", job={"hosts": ["a", "b"], "wait": 9})),
        ({"partition": "x"}, None, Layout(4, "slurm", job={"partition": "x"})),
        ({"queue": "x"}, None, Layout(4, "pbs", job={"queue": "x"})),
        (
            {"where": "lsf", "queue": "x", "gpus": 2},
            None,
            Layout(4, "lsf", device="cuda", job={"queue": "x", "gpus": 2}),
        ),
        ({"where": "pbs", "time": 90}, None, Layout(4, "pbs", job={"time": "90"})),
        ({"account": "y"}, Layout(4, "lsf", job={"queue": "x"}), Layout(4, "lsf", job={"queue": "x", "account": "y"})),
        ({"where": "local"}, Layout(4, "ssh", job={"hosts": ["a"]}), Layout(4)),
        ({"where": "ipyparallel", "wait": 9}, SITE, SITE._replace(job=SITE.job | {"wait": 9})),
        ({"where": "ipyparallel", **FOUND}, SITE, SITE._replace(job=FOUND)),  # of another name
        (
            {"where": "ipyparallel", **FOUND},
            SITE._replace(job=SITE.job | {"wait": 9}),
            SITE._replace(job=FOUND | {"wait": 9}),
        ),
    ],
)
def test_options_imply_their_place(asked, running, found):
    assert wanted(4, **asked, running=running) == found
    assert wanted(running=running, **found.asked()) == found


@pytest.mark.parametrize(
    ("asked", "facts"),
    [
        ({"where": "slurm", "queue": "x"}, ("queue=", "'pbs'", "'lsf'", 'where="pbs"')),
        ({"where": "pbs", "partition": "x"}, ("partition=", "'slurm'", 'partition="gpu"')),
        ({"where": "lsf", "hosts": ["a"]}, ("hosts=", "'ssh'", 'hosts=["n1", "n2"]')),
        ({"where": "ssh", "hosts": ["a"], "nodes": 2}, ("nodes=", "'slurm'", "'pbs'", "'lsf'")),
        ({"where": "ssh"}, ('where="ssh"', 'hosts=["n1", "n2"]')),
        ({"where": "ssh", "hosts": 2}, ("link=", "hosts=", "emulated")),
        ({"hosts": []}, ("hosts=[]", '["n1"]')),
        ({"hosts": ["a b"]}, ("hosts=['a b']", '["n1"]')),
        ({"where": "ipyparallel"}, ('where="ipyparallel"', 'profile="site"', "client=")),
        ({"where": "pbs", "queue": "a b"}, ("queue='a b'", "blanks")),
        ({"where": "pbs", "nodes": 5}, ("4 engines", "1 to 4", "5")),
        ({"where": "lsf", "time": "soon"}, ("time='soon'", "minutes")),
    ],
)
def test_options_of_another_place(asked, facts):
    with raises(ValueError, *facts):
        wanted(4, **asked)


def test_job_scripts(monkeypatch):
    monkeypatch.setattr(features, "mpiexec", lambda: "/opt/my mpi/mpiexec")
    asked = {"nodes": 2, "gpus": 1, "time": "1-1:30", "queue": "{x}", "account": "y"}
    pbs, lsf = (ipyparallel_job.batch_template(where, 3, asked).splitlines() for where in ("pbs", "lsf"))
    assert "#PBS -l select=2:ncpus=2:mpiprocs=2:ngpus=2" in pbs and "#PBS -l walltime=25:30:00" in pbs
    assert {"#PBS -q {{x}}", "#PBS -A y", "#PBS -l place=scatter"} < {*pbs}
    assert {'#BSUB -R "span[ptile=2]"', "#BSUB -n 3", '#BSUB -gpu "num=1/task"', "#BSUB -W 1530", "#BSUB -P y"} < {*lsf}
    assert pbs[-1] == lsf[-1] and pbs[-1].startswith("'/opt/my mpi/mpiexec' -n 3 {program_and_args} --profile-dir='{")


class Answering(Hosts):
    """Hosts whose engines answer what is in `answers`, each (WHO, VERSIONS)."""

    def __init__(self, tmp_path, *answers):
        self.answers = answers
        super().__init__(Found(FOUND["connection"]), len(answers), JobStatus(str(tmp_path)), 1)

    def _connected(self):
        return SimpleNamespace(ids=[], close=lambda: None)

    def _ask(self, engine, expression, seconds=0):
        return self.answers[engine][expression != ipyparallel_job.WHO]


def test_engines_of_another_environment(tmp_path):
    mine = {name: eval(ipyparallel_job.VERSIONS)[name] for name in ipyparallel_job.SAME}
    who = (sys.version_info[:2], "/env/bin/python", "n1")
    same = (who, mine)
    Answering(tmp_path, same, same)._require_equal([0, 1])
    without = {name: number for name, number in mine.items() if name != "mpi4py"}
    for other, facts in {
        (((3, 6), *who[1:]), "same"): ("engine 1 on n1", "Python 3.6", "/env/bin/python", sys.prefix),
        (who, "old"): ("engine 1 on n1", "numpy 0.1", "/env/bin/python", mine["numpy"], sys.prefix),
        (who, "none"): ("engine 1 on n1", "no mpi4py", mine["mpi4py"]),
    }.items():
        theirs = {"same": mine, "old": mine | {"numpy": "0.1"}, "none": without}[other[1]]
        with raises(Refused, *facts):
            Answering(tmp_path, same, (other[0], theirs))._require_equal([0, 1])


def test_a_job_that_ends_before_its_engines_come(tmp_path, monkeypatch):
    monkeypatch.setattr(ipyparallel_job, "AGAIN", 0.1)
    hosts = Answering(tmp_path, "one engine")
    hosts.ended, hosts.log = (lambda: "PBS job 7 has ended"), str(tmp_path / "engines.log")
    with raises(Refused, "PBS job 7 has ended", "nothing", str(tmp_path), "HPDL_SHARED"):
        hosts.gather()
    (tmp_path / "engines.log").write_text("trying\nno licence for MPI\n\n")
    with raises(Refused, "PBS job 7 has ended", "no licence for MPI"):
        hosts.gather()


def test_agents_whose_containers_share_a_folder_do_not_collide():
    with session_dir.of_an_agent() as one, session_dir.of_an_agent() as other:
        assert one != other and all(map(os.path.isdir, (one, other)))
    assert not os.path.exists(one)
