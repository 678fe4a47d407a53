"""One Slurm for all tests of this folder, in which no test may leave a job."""

import time

import pytest

from tests.slurm.controller import PATIENCE, Slurm


@pytest.fixture(scope="session")
def one_slurm(private_runtime_dir):
    with pytest.MonkeyPatch.context() as patch, Slurm(hidden=[private_runtime_dir]) as slurm:
        for name, value in slurm.environment.items():
            patch.setenv(name, value)
        yield slurm


@pytest.fixture
def slurm(one_slurm):
    """Slurm with two free nodes. The test fails when a job is left at its end."""
    yield one_slurm
    give_up = time.monotonic() + PATIENCE
    while left := one_slurm.jobs():
        if time.monotonic() > give_up:
            one_slurm.ask("scancel", *left)
            pytest.fail(f"jobs {', '.join(left)} are left")
        time.sleep(0.05)
