"""2 x 2 x 2 on eight ranks of the other MPI, four to a core."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpdl_lab import features

EIGHT = Path(__file__).parent.parent / "mpi" / "test_hybrid.py"


@pytest.mark.timeout(260)
def test_two_by_two_by_two_on_eight_ranks():
    environment = {**os.environ, **features.launch_environment(), "OMP_NUM_THREADS": "1"}
    command = [str(features.mpiexec()), "-n", "8", sys.executable, str(EIGHT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 ranks: right" in done.stdout
