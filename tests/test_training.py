"""The training loop: every model learns, the loss is the mean over answers, and what cannot be trained is said."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from hpdl_lab import data, models
from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.data.dataset import digits
from hpdl_lab.data.loading import Reader, batch_indices
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.data_parallel import DataParallel
from hpdl_lab.parallel.training import Recipe, evaluate, train
from tests.wording import raises

ADAMW = {"optimizer": "adamw", "lr": 3e-3}
COPY = data.load("copy", n=200, length=4, vocabulary=6)
FEW = COPY._replace(train_x=COPY.train_x[:31], train_y=COPY.train_y[:31])


def trained(p, name, its_data, threads=False, reader=None, dtype="float32", fields=None, **recipe):
    """What each of p simulated ranks returns after training the tiny model of this name; the Results of the run."""
    model = models.build_for(its_data, name, dtype=dtype, **(fields or {}))
    return sim.run(p, train, model, DataParallel(), its_data, Recipe(**recipe), reader, threads=threads)


@pytest.mark.parametrize(
    ("name", "what", "recipe", "first", "last"),
    [  # the loss of knowing nothing is ln(10) = 2.30, ln(81) = 4.39
        ("mlp", "digits", {"steps": 60}, 2.3, 0.4),
        ("cnn", "digit_images", {"steps": 60, "lr": 0.1}, 2.5, 1.0),
        ("vit", "digit_images", {"steps": 60, "batch": 64, **ADAMW}, 2.4, 1.4),
        ("gpt", "text", {"steps": 30, "batch": 16, **ADAMW}, 4.4, 2.9),
    ],
)
def test_each_tiny_model_learns_in_seconds(name, what, recipe, first, last):
    whole = data.load(what)
    (result,) = trained(1, name, whole._replace(test_x=whole.test_x[:300], test_y=whole.test_y[:300]), **recipe)
    assert result.losses[0] == pytest.approx(first, abs=0.2)
    assert sum(result.losses[-5:]) / 5 < last
    assert result.test_loss < last + 0.2
    assert result.test_accuracy > 1.5 * math.exp(-first)  # than by guessing


def test_nobody_is_better_than_the_best_loss_that_is_known():
    (result,) = trained(1, "gpt", data.load("copy"), steps=70, batch=64, **ADAMW)
    assert result.losses[0] == pytest.approx(2.9, abs=0.2)  # knowing nothing: ln(16) = 2.77
    assert 0 < result.test_loss - 7 / 15 * math.log(16) < 0.05  # 8 of 15 tokens are copied, 7 are guessed
    made = data.load("synthetic", n=4000, shape=(6,), classes=3, noise=0.15)
    (result,) = trained(1, "mlp", made, fields={"hidden": (32,)}, steps=200, lr=0.05)
    assert -0.05 < result.test_loss - 0.53 < 0.15  # -(1 - e) ln(1 - e) - e ln(e / 2) for a noise e of 0.15


def by_hand(model, its_data, steps, batch, lr):
    """The losses of plain torch: one process, no communicator, the mean over all answers of a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _, indices in zip(range(steps), batch_indices(len(its_data.train_y), batch), strict=False):
        optimizer.zero_grad()
        logits = model(its_data.train_x[indices])
        loss = cross_entropy(logits.flatten(0, -2), its_data.train_y[indices].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("micro_batches", [1, 3, 9])
@pytest.mark.parametrize("p", [1, 3])
def test_the_loss_is_the_mean_over_examples_and_positions(p, micro_batches):
    """Batches of 13 give the ranks 5, 4 and 4 examples, and 9 micro-batches of them are partly empty."""
    recipe = {"steps": 4, "batch": 13, "lr": 0.05}
    expected = by_hand(models.build_for(FEW, "gpt", dtype="float64"), FEW, **recipe)  # 31 mod 13 = 5: a short one
    for result in trained(p, "gpt", FEW, dtype="float64", micro_batches=micro_batches, **recipe):
        assert result.losses == pytest.approx(expected, abs=1e-10)


def test_the_parts_of_a_step_are_in_the_timeline_in_their_order():
    results = trained(2, "gpt", COPY, steps=2, micro_batches=2, reader=Reader(seconds=1e-3))
    spans = [e.op for e in results.events if e.rank == 1 and e.lane == "" and e.op in NAMES]
    step = ["input", "forward", "backward", "forward", "backward", "add gradients", "update"]
    assert spans == 2 * step
    cost = [e.t1_ns - e.t0_ns for e in results.events if e.rank == 1 and e.op == "input"]
    assert cost == [64_000_000, 36_000_000]  # ns: batches of 128 and 72 by two ranks, 1 ms per example


NAMES = ("input", "forward", "backward", "add gradients", "update")


@pytest.mark.parametrize("p", [1, 3, 7])
def test_the_test_set_is_shared_by_the_ranks(p):
    few = COPY._replace(test_x=COPY.test_x[:5], test_y=COPY.test_y[:5])  # 7 ranks have nothing to do for 2 of them
    model = models.build_for(few, "gpt", dtype="float64")
    with torch.no_grad():
        logits = model(few.test_x).flatten(0, 1)
    loss = cross_entropy(logits, few.test_y.flatten()).item()
    right = (logits.argmax(1) == few.test_y.flatten()).double().mean().item()
    for found in sim.run(p, evaluate, model, few.test_x, few.test_y):
        assert found == pytest.approx((loss, right), abs=1e-12)
    nothing = sim.run(1, evaluate, model, few.test_x[:0], few.test_y[:0])[0]
    assert nothing == (0, 0)  # and not NaN


def test_ranks_that_differ_in_recipe_or_data_are_named_before_the_first_step():
    recipes = sim.PerRank([Recipe(), Recipe(seed=5), Recipe()])
    mlp = models.build("mlp")
    with raises(ValueError, "rank 1", "seed=5"):
        sim.run(3, train, mlp, DataParallel(), data.load("digits"), recipes)
    sets = sim.PerRank([data.load("synthetic", n=n) for n in (100, 100, 101)])
    with raises(ValueError, "rank 2", "101 examples"):
        sim.run(3, train, mlp, DataParallel(), sets, Recipe())


def test_a_batch_smaller_than_the_ranks_is_refused_on_every_rank():
    with raises(ValueError, "3 examples", "4 ranks") as raised:
        trained(4, "gpt", COPY, batch=3)
    assert "on simulated ranks 0" in "".join(raised.value.__notes__)  # to 3: none of them waits for the others
    with raises(ValueError, "5 examples", "8 ranks"):
        trained(8, "gpt", data.load("copy", n=5))


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"steps": 0}, ("steps", "at least 1", "0")),
        ({"micro_batches": 0}, ("micro_batches", "at least 1", "0")),
        ({"optimizer": "adam"}, ("optimizer='adam'",)),
        ({"checkpoint_every": 5}, ()),
        ({"seed": 2**70}, ("seed", "1180591620717411303424")),
        ({"lr": float("nan")}, ("lr", "at least 0", "nan")),
    ],
)
def test_recipes_that_cannot_be_are_refused_with_the_numbers(recipe, says):
    with raises(ValueError, *says):
        Recipe(**recipe)


def test_a_model_that_cannot_learn_is_refused():
    for model in (torch.nn.Flatten(), torch.nn.Linear(3, 3).requires_grad_(False)):
        with raises(ValueError, f"{type(model).__name__}"):
            sim.run(2, train, model, DataParallel(), data.load("digits"), Recipe())


def test_uneven_and_empty_shards_are_weighted_rightly():
    p = 8
    # 1,437 examples in batches of 718: steps of 718, 718, 1: the last leaves all ranks but one without any.
    recipe, data = Recipe(steps=6, batch=718, lr=0.1), digits("float64")
    one, *_ = sim.run(1, train, mlp(dtype="float64"), DataParallel(), data, recipe)
    many = sim.run(p, train, mlp(dtype="float64"), DataParallel(ring.all_reduce), data, recipe)
    assert np.abs(np.array(many[p - 1].losses) - one.losses).max() < 1e-10
    assert (many[0].parameters - one.parameters).abs().max() < 1e-10


def test_an_all_reduce_that_works_in_place_and_returns_nothing_plugs_in_and_every_step_is_reported():
    def quiet(comm, x):
        ring.all_reduce(comm, x)

    found, want = (
        sim.run(2, train, mlp(), DataParallel(f), digits(), Recipe(steps=3)) for f in (quiet, ring.all_reduce)
    )
    assert found[0].losses == want[0].losses
    assert len(found.rows) == 3 and set(found.rows[0]) == {"rank", "step", "loss", "samples_per_s"}
