"""`hpdl doctor` beside Slurm and in its jobs: a controller that nodes would look for on their own localhost."""

import os
import re
import socket
import sys

import pytest

from hpdl_lab.engines import doctor
from hpdl_lab.engines import slurm as slurm_engines
from hpdl_lab.symptoms import found, found_in


def test_an_address_that_nodes_take_for_their_own(slurm, monkeypatch):
    if not slurm.network:
        pytest.skip("no namespaces here: both nodes are this machine, and 127.0.0.1 is right")
    monkeypatch.setenv("HOME", str(slurm.folder))
    assert found(doctor.SYMPTOMS[:1]) == []
    for told in ("127.0.0.1", "localhost, 127.0.0.2"):
        monkeypatch.setenv(slurm_engines.ADDRESS, told)
        (finding,) = found(doctor.SYMPTOMS[:1])
        assert finding.name == "controller not reached"
        assert finding.what.startswith(f"{slurm_engines.ADDRESS}={told} sends the engines of node ")
        assert finding.fix.startswith(f"unset {slurm_engines.ADDRESS}")
    monkeypatch.setenv(slurm_engines.ADDRESS, slurm.network.address)
    assert found(doctor.SYMPTOMS[:1]) == []


def test_the_doctor_works_in_a_job(slurm, monkeypatch, tmp_path):
    """On a node, which has a network and processes of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    done = slurm.ask("srun", "-N1", "-n1", "-t1", sys.executable, "-m", "hpdl_lab", "doctor")
    assert "Python           yes" in done.stdout, done
    symptoms = re.findall("^Symptom: (.*)", done.stdout, re.MULTILINE)
    assert set(symptoms) <= {"stale cluster"}, done  # what other tests leave in /dev/shm, where nodes share it
    assert done.returncode == bool(symptoms)


SIZE = (
    "import os; from mpi4py import MPI; os.write(1, b'rank %d of %d\\n' % (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size))"
)


@pytest.mark.parametrize(("how", "names"), [("none", ["wrong mpiexec"]), ("other", ["PMI of srun"]), ("pmi2", [])])
def test_ranks_of_srun_without_its_pmi_and_with_the_remedy(slurm, tmp_path, how, names):
    done = slurm.ask("srun", "-N1", "-n2", "-t1", f"--mpi={how}", sys.executable, "-c", SIZE)
    assert [finding.name for finding in found_in(doctor.KNOWN, done.stdout + done.stderr)] == names, done
    assert not names or any("srun --mpi=pmi2" in symptom.fix for symptom in doctor.KNOWN if symptom.name in names)


def test_a_port_of_this_machine_from_a_node(slurm, lasting_port):
    if not slurm.network:
        pytest.skip("no namespaces here: both nodes are this machine")
    ask = ["srun", "-N1", "-n1", "-t1", sys.executable, "-m", "hpdl_lab", "doctor", "--port"]
    place = f"{slurm.network.address}:{lasting_port}"
    with socket.create_server((slurm.network.address, lasting_port)):
        assert slurm.ask(*ask, place).stdout == f"{slurm.network.address} answers at port {lasting_port}.\n"
    done = slurm.ask(*ask, place)
    assert done.returncode == 1
    assert f"hpdl: {slurm.network.address} can be reached, but no server listens at its port" in done.stderr
