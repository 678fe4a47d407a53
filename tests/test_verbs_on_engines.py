"""train, measure, scaling and timeline on four real engines: right, labelled, drawn from rows that stream."""

import numpy as np
import pytest

from hpdl_lab import features, lab
from hpdl_lab.collectives import ring
from hpdl_lab.collectives.sweep import WrongAnswer
from hpdl_lab.comm import sim
from hpdl_lab.data.dataset import digits
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.data_parallel import DataParallelBucketed, DataParallelNaive, DataParallelOverlapped
from hpdl_lab.parallel.parameter_server import StaleSynchronous
from hpdl_lab.parallel.training import Recipe, train
from hpdl_lab.plots import live, style
from tests.wording import raises

CROWDED = features.cores() < 4


@pytest.fixture(autouse=True)
def engines(cluster, monkeypatch, tmp_path):
    """The verbs use the engines that tests share."""
    monkeypatch.setattr("hpdl_lab.verbs.cluster._notebook._cluster", cluster)
    monkeypatch.setenv("HPDL_HOME", str(tmp_path))


def texts(figure):
    return " ".join(t.get_text() for t in figure.texts)


def test_four_engines_learn_the_digits_while_the_picture_grows(monkeypatch, within):
    seen = []
    monkeypatch.setattr(live.Live, "update", lambda self, rows, *args: seen.append(len(rows)))
    trained = lab.train(all_reduce=ring.all_reduce, steps=60)  # notebook 04 takes 300, to 97%
    assert trained.test_accuracy >= 0.9 and trained.seconds < within(4)
    assert seen == list(range(1, 61)) and "4 engines" in repr(trained) and "virtual" not in repr(trained)


def test_some_of_the_engines_have_the_loss_curve_of_one_rank(monkeypatch):
    kwargs = {"dtype": "float64", "steps": 30, "batch": 131}
    many = lab.train(all_reduce=ring.all_reduce, ranks=3, **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr("hpdl_lab.verbs.world.running", lambda: None)
        one = lab.train(ranks=1, **kwargs)
    assert np.abs(np.array(many.losses) - one.losses).max() < 1e-10


def test_a_transformer_by_name_has_the_loss_curve_of_one_rank(monkeypatch):
    kwargs = {"model": "gpt", "data": "copy", "dtype": "float64", "steps": 5, "batch": 30}
    many = lab.train(**kwargs)
    monkeypatch.setattr("hpdl_lab.verbs.world.running", lambda: None)
    one = lab.train(ranks=1, **kwargs)
    assert np.abs(np.array(many.losses) - one.losses).max() < 1e-10 and many.learned == one.learned


def test_the_race_has_a_row_for_every_function_and_size():
    def all_reduce(comm, x):
        return ring.all_reduce(comm, x)

    result = lab.measure(all_reduce, ("4", "64KiB"), prediction={"4": 20})
    names = ["your all_reduce", "compiled ring", "shared memory", "MPI", "gloo"]
    assert [(r["size"], r["name"]) for r in result.rows] == [(size, name) for size in (4, 65536) for name in names]
    for r in result.rows:
        assert 0 < r["p25_us"] <= r["time_us"] <= r["p75_us"] and r["ranks"] == 4 and r["cores"] == features.cores()
    assert 0 < result.alpha < 0.1 and result.gamma > 0
    assert (style.OVERSUBSCRIBED in texts(result.figure)) is CROWDED


def test_a_wrong_function_is_refused_with_one_sentence():
    def forgets_the_last(comm, x):
        ring.all_reduce(comm, x[:-1])

    sentence = "your forgets_the_last is not timed.*on rank 0, 1 of 256 elements, first at index 255"
    with pytest.raises(WrongAnswer, match=sentence):
        lab.measure(forgets_the_last, ("1KiB",), against=())
    assert lab.run(lambda comm: comm.rank) == [0, 1, 2, 3]


@pytest.fixture
def short(monkeypatch):
    """Few steps for each point of lab.scaling: what they tell is not asserted here."""
    monkeypatch.setattr("hpdl_lab.verbs.scaling_points.POINT_S", 0.1)
    monkeypatch.setattr("hpdl_lab.verbs.scaling_points.REHEARSALS_S", 0.1)


def test_scaling_measures_and_simulates(short):
    """How well both agree is a test of its own, on a quiet machine: test_times_on_engines.py."""
    result = lab.scaling(all_reduce=ring.all_reduce, n=64, simulate=(8, 1024), prediction={2: 1.9}, deadline=40)
    points = [(kind, p) for kind in ("strong", "weak") for p in (1, 2, 4)]
    assert [(r["kind"], r["ranks"]) for r in result.rows] == points == list(result.agreement())
    assert [r["ranks"] for r in result.simulated] == [1, 2, 4, 8, 1024] * 2 and len(result.model) == 10
    assert result.rows[0]["efficiency"] == 1 and all(r["p25"] <= r["rate"] <= r["p75"] for r in result.rows)
    assert all(0 <= r["exposed"] < 1 and r["overlap"] == 0 and r["imbalance"] >= 1 for r in result.rows)
    assert result.rows[0]["exposed"] < result.rows[2]["exposed"], "one rank has nobody to wait for"
    assert (style.OVERSUBSCRIBED in texts(result.figure)) is CROWDED
    assert ("more ranks than" in repr(result)) is CROWDED
    assert "messages as between" in texts(result.figure)


def test_scaling_overlaps_on_engines(short):
    strategy = DataParallelOverlapped(bucket_nbytes=100_000, first_nbytes=20_000)
    result = lab.scaling(strategy=strategy, n=256, ranks=2, simulate=())
    assert result.rows[0]["overlap"] > 0 and result.simulated[0]["overlap"] > 0


def test_more_ranks_than_engines_are_refused_with_the_remedy():
    with raises(ValueError, "8 ranks", "4 engines", "lab.stop()", "lab.start(8)"):
        lab.train(ranks=8)


def test_the_timeline_of_the_last_run():
    lab.run(ring.all_reduce, np.ones(100))
    assert repr(lab.show()) == "48 events of 4 ranks"


def test_every_strategy_on_engines_has_the_loss_curve_of_one_rank():
    recipe, whole = Recipe(steps=8, batch=131), digits("float64")
    small = {"bucket_nbytes": 50_000, "first_nbytes": 2_000}
    strategies = [
        DataParallelNaive(),
        DataParallelBucketed(**small),
        DataParallelOverlapped(**small),
        DataParallelOverlapped(ring.all_reduce, **small),
        StaleSynchronous(staleness=0),
    ]

    def curves(comm):
        return [train(comm, mlp(dtype="float64"), strategy, whole, recipe).losses for strategy in strategies]

    one = np.array(sim.run(1, train, mlp(dtype="float64"), DataParallelNaive(), whole, recipe)[0].losses)
    for curves_of_rank in lab.run(curves):
        assert np.abs(np.array(curves_of_rank) - one).max(axis=1) == pytest.approx(np.zeros(len(strategies)), abs=1e-10)
    trained = lab.train(strategy=strategies[2], dtype="float64", steps=8, batch=131)
    assert np.abs(np.array(trained.losses) - one).max() < 1e-10 and trained.drift == 0
