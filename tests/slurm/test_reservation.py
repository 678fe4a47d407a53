"""The reservation that `hpdl plan` prints is one that Slurm takes, as it stands, and in which jobs of the class run."""

import datetime
import subprocess

import pytest

from hpdl_lab.classroom import costs
from hpdl_lab.classroom.plan import ClassPlan
from hpdl_lab.cli.plan import reservation


def printed(gpus, start):
    """The shell line of a plan for a few attendees."""
    plan = ClassPlan(costs.read_costs(costs.SHIPPED), 3, 8, 64 * 10**9, gpus)
    (line,) = (line for line in reservation(plan, start).splitlines() if "scontrol" in line)
    return line.strip()


@pytest.fixture
def reserved(slurm, tmp_path):
    """reserve(line) -> what scontrol said; the reservation is deleted at the end."""
    (tmp_path / "attendees.txt").write_text("root\nnobody\n")

    def reserve(line):
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
        return done.stdout + done.stderr

    yield reserve
    slurm.ask("scontrol", "delete", "ReservationName=hpdl")


@pytest.mark.parametrize("gpus", [0, 2])
def test_slurm_takes_the_printed_reservation(slurm, reserved, gpus):
    tomorrow = datetime.datetime.combine(datetime.date.today() + datetime.timedelta(days=1), datetime.time(9))
    assert "Reservation created: hpdl" in reserved(printed(gpus, None))
    told = slurm.ask("scontrol", "show", "reservation", "hpdl").stdout
    assert f"StartTime={tomorrow:%Y-%m-%dT%H:%M:%S}" in told and "Duration=08:00:00" in told
    assert "NodeCnt=1" in told and "Users=root,nobody" in told


def test_a_job_of_the_class_runs_in_the_reservation_and_others_do_not(slurm, reserved):
    assert "Reservation created: hpdl" in reserved(printed(0, datetime.datetime.now()))
    told = slurm.ask("scontrol", "show", "reservation", "hpdl").stdout
    node = next(word for word in told.split() if word.startswith("Nodes=")).partition("=")[2]
    inside = slurm.ask("srun", "--reservation=hpdl", "sh", "-c", "echo $SLURM_JOB_NODELIST")
    assert inside.stdout.split() == [node], inside.stderr
    outside = slurm.ask("srun", "--immediate=1", f"--nodelist={node}", "true")
    assert outside.returncode and "reserved" in outside.stderr.lower(), outside.stderr
