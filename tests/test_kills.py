"""Read the sentence about a rank that should have been killed, and was not."""

import pytest
import torch

from hpdl_lab.comm import sim
from hpdl_lab.resilience.kills import KillAt


def test_the_notebook_is_not_killed():
    with pytest.raises(ValueError, match=r"simulated ranks share the process of this notebook.*lab.start\(4\)"):
        sim.run(2, KillAt(rank=0, call=1), torch.ones(3))


def test_nobody_has_died():
    with pytest.raises(RuntimeError, match="rank 9 has not died"):
        KillAt(rank=9, call=1).seconds_ago()


def test_nobody_has_died_by_the_clock():
    with pytest.raises(RuntimeError, match="rank 1 has not died after 60 s"):
        KillAt(rank=1, after_s=60).seconds_ago()
