"""What may be asked of PBS, LSF, ssh and clusters of ipyparallel, and the job scripts."""

import os
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


def test_a_job_that_ends_before_its_engines_come(tmp_path, monkeypatch):
    monkeypatch.setattr(ipyparallel_job, "AGAIN", 0.1)
    monkeypatch.setattr(Hosts, "_connected", lambda hosts: SimpleNamespace(ids=[], close=lambda: None))
    job = Found(FOUND["connection"], "PBS job 7", lambda: "PBS job 7 has ended", str(tmp_path / "engines.log"))
    hosts = Hosts(job, 1, JobStatus(str(tmp_path)), 1)
    with raises(Refused, "PBS job 7 has ended", "nothing", str(tmp_path), "HPDL_SHARED"):
        hosts.gather()
    (tmp_path / "engines.log").write_text("trying\nno licence for MPI\n\n")
    with raises(Refused, "PBS job 7 has ended", "no licence for MPI"):
        hosts.gather()


def test_agents_whose_containers_share_a_folder_do_not_collide():
    with session_dir.of_an_agent() as one, session_dir.of_an_agent() as other:
        assert one != other and all(map(os.path.isdir, (one, other)))
    assert not os.path.exists(one)
