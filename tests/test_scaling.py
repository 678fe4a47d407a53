"""lab.scaling: efficiency is against the fewest ranks; without engines there are only simulated points."""

from importlib import import_module

import numpy as np
import pytest

from hpdl_lab import lab
from hpdl_lab.collectives import ring


@pytest.fixture(autouse=True)
def no_engines(monkeypatch):
    for module in ("ranks", "scaling"):  # by import_module, because the verb lab.scaling hides the module of its name
        monkeypatch.setattr(import_module(f"hpdl_lab.lab.{module}"), "running", lambda: None)


def busy(comm, n):
    """n vectors are summed, and all ranks agree on the result."""
    x = np.zeros(1000, np.float32)
    for _ in range(n // comm.size):
        x += 1
    ring.all_reduce(comm, x)


def test_points_of_simulated_ranks():
    result = lab.scaling(busy, ranks=(1, 2, 4), n=400)
    assert result.rows == []
    assert [(r["kind"], r["ranks"]) for r in result.simulated] == [
        (k, p) for k in ("strong", "weak") for p in (1, 2, 4)
    ]
    for r in result.simulated:
        assert 0 < r["efficiency"] <= 1 + 1e-9
        assert r["p25"] == r["rate"] == r["p75"]
    assert "simulated" in repr(result) and "units/s" in repr(result)


def test_more_messages_scale_worse():
    def chatty(comm, n):
        for _ in range(50):
            busy(comm, n // 50)

    few, many = (lab.scaling(work, ranks=(1, 4), n=2000).simulated for work in (busy, chatty))
    assert many[1]["efficiency"] < few[1]["efficiency"]


def test_a_training_step_is_the_default():
    result = lab.scaling(all_reduce=ring.all_reduce, ranks=(1, 2), n=64)
    assert result.unit == "samples/s" and len(result.simulated) == 4


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="not both"):
        lab.scaling(busy, all_reduce=ring.all_reduce)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        lab.scaling(busy, n=0)
    with pytest.raises(ValueError, match="at least 1"):
        lab.scaling(busy, ranks=(0, 1))
    with pytest.raises(ValueError, match="no number of ranks"):
        lab.scaling(busy, ranks=())


def test_one_number_of_ranks_need_not_be_a_list():
    assert [r["ranks"] for r in lab.scaling(busy, ranks=2, n=10).simulated] == [2, 2]
