"""lab.train: one verb for the lesson's network and for your own, with an answer that says what happened."""

import numpy as np
import pytest

from hpdl_lab import lab
from hpdl_lab.collectives import ring
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.data import DataParallel, DataParallelNaive
from hpdl_lab.plots import live


@pytest.fixture(autouse=True)
def no_engines(monkeypatch):
    monkeypatch.setattr("hpdl_lab.lab.ranks.running", lambda: None)


def test_four_simulated_ranks_learn_the_digits_and_say_that_they_are_simulated():
    trained = lab.train(all_reduce=ring.all_reduce)
    assert trained.test_accuracy >= 0.97 and len(trained.losses) == 300
    assert "4 simulated ranks" in repr(trained) and "virtual time" in repr(trained)
    assert "drift" not in repr(trained) and trained.events


def test_the_loss_curve_of_four_ranks_is_that_of_one():
    kwargs = {"all_reduce": ring.all_reduce, "dtype": "float64", "steps": 40}
    four, one = lab.train(ranks=4, **kwargs), lab.train(ranks=1, **kwargs)
    assert np.abs(np.array(four.losses) - one.losses).max() < 1e-10


def test_a_model_and_a_strategy_as_in_the_tour_of_the_house():
    model = mlp((64, 32, 10))
    trained = lab.train(model, DataParallelNaive(ring.all_reduce), steps=20, ranks=2)
    assert len(trained.losses) == 20 and trained.where == "2 simulated ranks"


def test_a_wrong_all_reduce_is_seen_in_the_drift():
    def forgets_rank_0(comm, x):
        if comm.rank:
            return ring.all_reduce(comm, x)
        ring.all_reduce(comm, x.clone())

    trained = lab.train(all_reduce=forgets_rank_0, steps=10)
    assert trained.drift > 1e-3 and "drifted apart" in repr(trained)


def test_a_strategy_and_an_all_reduce_are_too_much():
    with pytest.raises(ValueError, match="not both"):
        lab.train(strategy=DataParallel(), all_reduce=ring.all_reduce)


@pytest.mark.parametrize("ranks", [0, -1, 2.0, "4"])
def test_a_number_of_ranks_that_is_none_is_refused(ranks):
    with pytest.raises(ValueError, match="whole number of at least 1"):
        lab.train(ranks=ranks)


def test_an_error_on_a_rank_comes_back_and_the_picture_is_finished(monkeypatch):
    drawn = []
    monkeypatch.setattr(live.Live, "finish", lambda self, rows, steps, title, *_: drawn.append((len(rows), title)))
    calls = []

    def breaks_later(comm, x):
        calls.append(comm.rank)
        if len(calls) > 40:
            raise RuntimeError("not today")
        return ring.all_reduce(comm, x)

    with pytest.raises(RuntimeError, match="not today"):
        lab.train(all_reduce=breaks_later, steps=50)
    assert drawn == [(10, "mlp on digits, 4 simulated ranks: stopped")]
    with pytest.raises(RuntimeError, match="not today"):
        lab.train(all_reduce=breaks_later, steps=50)
    assert len(drawn) == 1  # a run without any step leaves no empty picture
