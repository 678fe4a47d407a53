"""`mpiexec -n 2 python -m pytest tests/gpu/ranks`: ranks in step, as in tests/mpi, with tensors on GPUs."""

import pytest

from hpdl_lab.comm.device.groups import mpi_groups
from hpdl_lab.comm.mpi.session import session_of_this_process
from hpdl_lab.features import Missing, gpu


@pytest.fixture(scope="session")
def ranks():
    """The MpiGroups of this process."""
    try:
        gpu.require_gpu_transfer()
    except Missing as error:
        pytest.skip(str(error))
    return mpi_groups()


@pytest.fixture
def run(ranks):
    """run(deadline=...): a fresh communicator whose tensors are on the rank's GPU; closed when the test ends."""
    session = session_of_this_process()
    session.worlds += 1
    opened = []

    def make(deadline=60.0):
        opened.append(session.comm(1000 * session.worlds + len(opened), deadline=deadline, make=ranks.comm))
        return opened[-1]

    yield make
    for comm in opened:
        comm.close()


@pytest.fixture
def comm(run):
    return run()
