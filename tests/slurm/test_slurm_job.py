"""The process that submits, watches and cancels the job of the engines: every way in which such a job can end."""

import os
import subprocess
import time

import pytest

from hpdl_lab.engines import slurm_job
from tests.slurm.controller import Slurm
from tests.slurm.watched import Watched


@pytest.fixture
def job(slurm, tmp_path):
    """`job(4, "sleep 100", partition=...)` starts a process that runs the script in a job."""
    started = []

    def start(n, script, **how):
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Watched(folder, n, script, **how))
        return started[-1]

    def end():
        for watched in started:
            watched.end()

    start.end = end
    yield start
    end()


def test_a_job_runs_and_is_cancelled_at_the_end(slurm, job):
    watched = job(4, "echo hello; exec sleep 1000", nodes=2, gpus=1, time="0:10:00")
    told = watched.told("running")
    assert (told["state"], told["hosts"], told["partition"]) == ("running", ["n1", "n2"], "class"), told
    shown = slurm.ask("scontrol", "--oneliner", "show", "job", told["id"]).stdout
    for asked in ("NumNodes=2 ", "NumTasks=4", "TresPerTask=gres:gpu:1", "TimeLimit=00:10:00", "Requeue=0"):
        assert asked in shown
    assert watched.end() == 0
    assert slurm.ask("squeue", "--noheader", "--states=PENDING,RUNNING").stdout == ""


def test_the_job_is_cancelled_when_the_supervisor_is_killed(slurm, tmp_path):
    command = slurm_job.argv(str(tmp_path), 1, {}, ["sleep", "1000"], str(tmp_path))
    supervisor = subprocess.Popen(["sh", "-c", '"$@" & wait', "sh", *command])
    while not slurm.jobs():
        time.sleep(0.02)
    supervisor.kill()
    supervisor.wait()  # that no job is left, the fixture sees to


def test_no_job_is_left_when_the_stop_button_is_pressed_amid_the_start(slurm, job):
    for watched in [job(1, "exec sleep 1000") for _ in range(6)]:  # at six moments
        watched.process.terminate()
        time.sleep(0.08)
    job.end()
    assert slurm.ask("squeue", "--noheader", "--states=PENDING,RUNNING").stdout == ""


def test_a_full_cluster_is_waited_for_and_the_wait_is_explained(slurm, job):
    first = job(16, "exec sleep 1000", time=1)
    assert first.told("running")["state"] == "running"
    second = job(16, "exec sleep 1000", time=5)
    told = second.told("pending", has="waits in partition class: the nodes, or the CPUs and GPUs in them, are in use")
    assert (told["state"], told["reason"]) == ("pending", "Resources")
    third = job(16, "exec sleep 1000", time=5, wait=2)
    assert second.told("pending", has="; Slurm expects it to start at 20")["state"] == "pending"
    told = third.told("ended")
    assert "; 1 job before it" in told["text"]
    assert "It was cancelled after 2 s in the queue: wait=4 waits longer" in told["text"], told
    first.end()
    assert second.told("running")["state"] == "running"


def test_what_can_never_run_is_refused_in_one_sentence(slurm, job):
    refused = [  # engines, what is asked for, the sentence
        (1, {"partition": "gpu"}, "Slurm refused the job: it has no such partition; there are: class, short, closed"),
        (1, {"partition": "closed"}, "would never start in partition closed: the partition is closed"),
        (9, {"nodes": 9}, "would never start in partition class: it asks for more nodes than the partition has"),
        (99, {}, "would never start in partition class: it asks for more than all nodes of the partition have"),
        (1, {"time": "9-0"}, "would never start in partition class: its time is more than the partition grants"),
        (1, {"gpus": 5}, "Slurm refused the job: no nodes of this partition have what is asked for, --ntasks=1 --gpus"),
        (1, {"reservation": "course"}, "Slurm refused the job: this reservation does not exist now"),
    ]
    watched = [job(n, "exec sleep 1000", **said) for n, said, _ in refused]  # at once: each takes seconds
    for one, (_, _, sentence) in zip(watched, refused, strict=True):
        assert sentence in one.told("ended")["text"]


def test_a_job_that_fails_by_itself_says_why(slurm, job):
    failed = [
        ("exit 66", "failed: the nodes do not see the folder"),
        ("echo node n1 cannot reach 10.1.0.5; exit 67", "failed: node n1 cannot reach 10.1.0.5"),
        ("exec /nowhere/python", "failed: the nodes do not have /bin/sh"),
        ("echo out of ideas; exit 3", "ended with exit code 3: out of ideas"),
        ("kill -SEGV $$", "was killed by signal 11 (SIGSEGV)"),
        ("echo done", "ended by itself: done"),
    ]
    watched = [job(1, script) for script, _ in failed]
    for one, (_, sentence) in zip(watched, failed, strict=True):
        told = one.told("ended")
        assert told["text"].startswith(f"Slurm job {told['id']} {sentence}"), told


def test_a_folder_that_the_nodes_do_not_see(slurm, job, private_runtime_dir):
    if not slurm.network:
        pytest.skip("this system allows no namespaces: both nodes share this machine, and its folders")
    folder = os.path.join(private_runtime_dir, "shared")
    os.mkdir(folder)
    told = job(1, "exec sleep 1000", shared=folder).told("ended")
    assert f"the nodes do not see the folder {folder} of this machine: set HPDL_SHARED" in told["text"], told


def test_someone_cancels_the_job(slurm, job):
    watched = job(1, "exec sleep 1000")
    slurm.ask("scancel", watched.told("running")["id"])
    assert watched.told("ended")["text"].endswith("was cancelled, with scancel or by an administrator")


def test_a_node_fails(slurm, job):
    if not slurm.network:
        pytest.skip("this system allows no namespaces: no node can fail without the other")
    watched = job(2, "exec sleep 1000", nodes=2)
    assert watched.told("running")["hosts"] == ["n1", "n2"]
    slurm.restart_controller(SlurmdTimeout=8, MessageTimeout=5, TCPTimeout=1)  # n1 may be late, and stays
    slurm.kill("n2")
    try:
        told = watched.told("ended")
        assert "was ended by Slurm because a node failed: n2 Not responding" in told["text"], told
    finally:
        slurm.start_node("n2")
        slurm.configure()
        slurm.ask("scontrol", "reconfigure")


def test_slurmctld_does_not_answer(slurm, job):
    slurm.kill("slurmctld")
    slurm.configure(MessageTimeout=2)  # so long sbatch tries
    try:
        told = job(1, "exec sleep 1000").told("ended")
    finally:
        slurm.configure()
        slurm.go_on()
    assert told["text"].startswith("Slurm refused the job: slurmctld, which takes jobs, does not answer"), told


def test_a_job_outlives_a_restart_of_slurmctld(slurm, job):
    watched = job(1, "exec sleep 1000")
    number = watched.told("running")["id"]
    slurm.stop_controller()
    slurm.go_on()
    slurm.ask("scancel", number)
    assert watched.told("ended")["text"].endswith("was cancelled, with scancel or by an administrator")


def test_the_queue_takes_no_more_jobs(job, monkeypatch):
    # It remembers no jobs that have ended, which count as well; and it counts one more than there are.
    with Slurm(alone=False, MaxJobCount=2) as another:
        monkeypatch.setenv("SLURM_CONF", another.environment["SLURM_CONF"])
        first = job(1, "exec sleep 1000")
        assert first.told("running")["state"] == "running"
        told = job(1, "exec sleep 1000").told("ended")
        assert told["text"].startswith("Slurm refused the job: its queue is full, for everybody"), told
        assert another.jobs() == [first.told("running")["id"]]
        first.end()
