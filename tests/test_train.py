"""lab.train: one verb for the lesson's model and for your own, with an answer that says what happened."""

import math

import numpy as np
import pytest
import torch

from hpdl_lab import data, lab, models
from hpdl_lab.collectives import ring
from hpdl_lab.comm.base import Done
from hpdl_lab.data import synthetic
from hpdl_lab.mesh import Grid
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.data_parallel import DataParallel, DataParallelNaive, DataParallelOverlapped
from hpdl_lab.plots import live
from hpdl_lab.verbs.choice import MODEL_FOR, model_and_data
from tests.wording import raises


@pytest.fixture(autouse=True)
def no_engines(monkeypatch):
    monkeypatch.setattr("hpdl_lab.verbs.world.running", lambda: None)


def test_four_simulated_ranks_learn_the_digits_and_say_that_they_are_simulated():
    trained = lab.train(all_reduce=ring.all_reduce)
    assert trained.test_accuracy >= 0.97 and len(trained.losses) == 300
    assert "4 simulated ranks" in repr(trained) and "virtual time" in repr(trained)
    assert "drift" not in repr(trained) and trained.events


def test_the_loss_curve_of_four_ranks_is_that_of_one():
    kwargs = {"all_reduce": ring.all_reduce, "dtype": "float64", "steps": 15}
    four, one = lab.train(ranks=4, **kwargs), lab.train(ranks=1, **kwargs)
    assert np.abs(np.array(four.losses) - one.losses).max() < 1e-10
    trained = lab.train(mlp((64, 32, 10)), DataParallelNaive(ring.all_reduce), steps=20, ranks=2)
    assert len(trained.losses) == 20 and trained.where == "2 simulated ranks"


def test_a_language_model_by_name_says_its_perplexity():
    trained = lab.train(model="gpt", data="text", steps=12, batch=16, ranks=2)
    logits = trained.model(data.load("text").test_x[:512])  # as many answers as are tested
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data.load("text").test_y[:512].flatten())
    assert loss.item() == pytest.approx(trained.test_loss, rel=1e-4), "the model is not the one that was trained"
    assert trained.perplexity == pytest.approx(math.exp(trained.test_loss))
    assert f"perplexity {trained.perplexity:.3g} of 81" in repr(trained)
    assert trained.losses[0] == pytest.approx(math.log(81), abs=0.3) and trained.perplexity < 60
    assert trained.figure.texts[0].get_text() == f"gpt on text, 2 simulated ranks: {trained.learned}"


def test_a_cnn_with_batch_norm_waits_inside_backward_on_simulated_ranks():
    model = models.build("cnn", norm="batch", widths=(4, 8))
    trained = lab.train(model, data="digit_images", steps=3, ranks=3, lr=0.05)
    assert len(trained.losses) == 3 and trained.drift < 1e-6 and "test accuracy" in trained.learned


@pytest.mark.parametrize(
    ("model", "what", "words", "dims"),
    [
        (None, None, "mlp on digits", 2),
        ("cnn", None, "cnn on digit images", 4),
        ("vit", "digits", "vit on digits", 4),
        (None, "copy", "gpt on copy", 2),
        (None, synthetic.teacher(20, (1, 4, 4)), "cnn on your data", 4),
        (torch.nn.Linear(64, 10), "synthetic", "Linear on synthetic", 2),
    ],
)
def test_what_is_not_said_suits_what_is(model, what, words, dims):
    choice = model_and_data(model, what)
    assert choice.words == words and choice.data.train_x.ndim == dims
    assert choice.model(choice.data.train_x[:3]).shape[-1] == choice.data.classes
    assert set(MODEL_FOR) == set(data.SETS)
    assert (model_and_data("gpt").recipe["optimizer"], model_and_data(mlp()).recipe) == ("adamw", {})


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"model": "gtp"}, LookupError, ("gtp",)),
        ({"data": "mnist"}, LookupError, ("mnist",)),
        ({"model": "gpt", "data": "digits"}, ValueError, ("windows of tokens",)),
        ({"model": 5}, TypeError, ("model=5",)),
        ({"data": [1, 2]}, TypeError, ("data is a list",)),
        ({"data": synthetic.teacher(20, (2, 2))}, ValueError, ("(2, 2)",)),
        ({"dtype": "float33"}, ValueError, ("float33",)),
        ({"model": torch.nn.Linear(3, 10)}, ValueError, ("(64,)",)),
        ({"model": torch.nn.Linear(64, 10).double()}, ValueError, ("Double",)),
        ({"model": torch.nn.Linear(64, 3)}, ValueError, ("(2, 3)", "(2, 10)")),
        ({"model": torch.nn.LSTM(64, 10)}, ValueError, ("(2, 10)",)),
        (
            {"deadline": -1},
            ValueError,
            (
                "deadline",
                "-1",
            ),
        ),
        ({"schedule": "gpipe"}, ValueError, ("mesh",)),
        ({"batch": 3}, ValueError, ("3", "4 ranks")),
        ({"optimizer": "adam"}, ValueError, ("sgd, adamw",)),
        ({"stepz": 3}, TypeError, ("no stepz: a recipe has steps",)),
        ({"all_reduce": 3}, TypeError, ("all_reduce=3",)),
        ({"strategy": ring.all_reduce}, TypeError, ("strategy=all_reduce", "all_reduce=")),
        ({"strategy": DataParallel}, TypeError, ("strategy=DataParallel",)),
        ({"strategy": DataParallel(), "all_reduce": ring.all_reduce}, ValueError, ("not both",)),
        *(({"ranks": ranks}, ValueError, ("1", f"{ranks!r}")) for ranks in (0, 2.0, "4")),
        ({"mesh": 3}, TypeError, ("mesh=3",)),
        ({"mesh": {"dp": 2}, "ranks": 3}, ValueError, ("2 places", "ranks=3")),
        ({"mesh": {"dp": 2}, "all_reduce": print}, ValueError, ("give a mesh, or",)),
        ({"mesh": {"dp": 3}, "batch": 16}, ValueError, ("16", "dp=3")),
    ],
)
def test_what_cannot_be_trained_is_said(options, error, says):
    with raises(error, *says):
        lab.train(**options)


def forgets_rank_0(comm, x):
    if comm.rank:
        return ring.all_reduce(comm, x)
    ring.all_reduce(comm, x.clone())


def forgets_the_last(comm, x):
    """Wrong, and the same on every rank."""
    ring.all_reduce(comm, x[:-1])
    comm.broadcast(x)


def in_half_precision(comm, x):
    y = x.bfloat16()
    ring.all_reduce(comm, y)
    x.copy_(y / 1.01)


@pytest.mark.parametrize(
    ("all_reduce", "says"),
    [
        (forgets_rank_0, ("element 0", "9", "4")),
        (forgets_the_last, ("element 8", "9", "14", "4")),
        (lambda comm, x: ring.all_reduce(comm, x).div_(comm.size), ("element 0", "9", "4", "1")),
        (in_half_precision, ("element 0", "9", "4", "3.9")),
        (lambda comm, x: x[:3], ("(9,)", "(3,)")),
    ],
)
def test_an_all_reduce_that_does_not_add_up_is_refused_before_the_first_step(all_reduce, says):
    with raises(ValueError, *says):
        lab.train(all_reduce=all_reduce, steps=10)


def test_one_that_goes_wrong_later_is_seen_in_the_drift():
    def sometimes(comm, x):
        return forgets_rank_0(comm, x) if len(x) > 100 else ring.all_reduce(comm, x)

    trained = lab.train(all_reduce=sometimes, steps=10)
    assert trained.drift > 1e-3 and "drifted apart" in repr(trained)


def test_a_hook_that_waits_for_messages_inside_backward():
    """As an attendee may write it at first: nothing overlaps, but the sums are right."""

    def waits(comm, reducer, index):
        reducer.collect(index)
        reducer.missing[reducer.bucket_of[index]] -= 1
        while len(reducer.works) < len(reducer.buckets) and not reducer.missing[len(reducer.works)]:
            packed = reducer.buckets[len(reducer.works)].packed()
            reducer.works.append(Done(reducer.all_reduce(comm, packed)))

    own = DataParallelOverlapped(ring.all_reduce, bucket_nbytes=20_000, first_nbytes=1000, gradient_ready=waits)
    kwargs = {"dtype": "float64", "steps": 6, "ranks": 3}
    many, one = lab.train(strategy=own, **kwargs), lab.train(**kwargs)
    assert np.abs(np.array(many.losses) - one.losses).max() < 1e-10 and many.drift == 0


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ({"dp": 2, "pp": 2}, {"micro_batches": 2}),
        (Grid(pp=2, tp=2), {"micro_batches": 4}),
        ({"pp": 2}, {"schedule": "zero_bubble_h1", "micro_batches": 3}),
    ],
)
def test_a_training_on_a_mesh_takes_the_steps_of_one_rank(mesh, more):
    course = {"dtype": "float64", "steps": 3, "batch": 24}
    one, many = lab.train(**course, ranks=1), lab.train(**course, mesh=mesh, **more)
    assert many.losses == pytest.approx(one.losses, abs=1e-10) and many.drift == 0
    assert many.test_loss == pytest.approx(one.test_loss, abs=1e-10)


def test_an_error_on_a_rank_comes_back_and_the_picture_is_finished(monkeypatch):
    drawn = []
    monkeypatch.setattr(live.Live, "finish", lambda self, rows, steps, title, *_: drawn.append((len(rows), title)))
    calls = []

    def breaks_later(comm, x):
        calls.append(comm.rank)
        if len(calls) > 40:
            raise RuntimeError("not today")
        return ring.all_reduce(comm, x)

    for _ in range(2):  # of 4 calls a step, and 4 before the first; a run without any step leaves no empty picture
        with pytest.raises(RuntimeError, match="not today"):
            lab.train(all_reduce=breaks_later, steps=50)
    assert drawn == [(9, "mlp on digits, 4 simulated ranks: stopped")]
