"""A run that is broken off and goes on, on another number of ranks, has the loss curve of one that is not."""

import pytest
import torch

from hpdl_lab.comm import sim
from hpdl_lab.data import digits
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel import checkpoint
from hpdl_lab.parallel.data import DataParallel
from hpdl_lab.parallel.training import Recipe, train

STEPS, EVERY = 8, 3


def run(p, path="", **recipe):
    """The results of training a small network on p simulated ranks."""
    recipe = Recipe(**{"steps": STEPS, "batch": 50, "checkpoint": str(path), **recipe})

    def body(comm):
        model = mlp((64, 16, 10), dtype="float64")
        return train(comm, model, DataParallel(), digits.load("float64"), recipe)

    return sim.run(p, body)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, optimizer):
    path, kind = tmp_path / "run.pt", {"optimizer": optimizer, "lr": 0.01}
    whole = run(2, **kind)[0]
    broken_off = run(3, path, steps=7, checkpoint_every=EVERY, **kind)[0]
    for p in (1, 2, 4):
        rest = run(p, path, resume=True, **kind)
        assert broken_off.losses[:6] + rest[0].losses == pytest.approx(whole.losses, abs=1e-10), "6 = 2 checkpoints"
        assert all(float((one.parameters - whole.parameters).abs().max()) < 1e-10 for one in rest)


def test_the_momentum_is_part_of_it(tmp_path):
    path = tmp_path / "run.pt"
    run(2, path, steps=EVERY, checkpoint_every=EVERY)
    whole, rest = run(1)[0], run(1, path, resume=True)[0]
    state = torch.load(path, weights_only=True)
    state["optimizer"]["state"] = {}
    torch.save(state, path)
    forgetful = run(1, path, resume=True)[0]
    assert (
        rest.losses[-1] == pytest.approx(whole.losses[-1], abs=1e-10) != pytest.approx(forgetful.losses[-1], abs=1e-4)
    )


def test_a_write_that_fails_leaves_the_file_before_it(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    run(2, path, steps=EVERY, checkpoint_every=EVERY)
    before = path.read_bytes()

    def half(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", half)
    with pytest.raises(OSError, match="No space left"):
        run(2, path, checkpoint_every=EVERY)
    assert path.read_bytes() == before


def test_what_it_cannot_go_on_from_is_said_on_every_rank(tmp_path):
    path = tmp_path / "run.pt"
    with pytest.raises(FileNotFoundError, match="no checkpoint at .* nothing to go on from"):
        run(2, path, resume=True)
    run(2, path, steps=EVERY, checkpoint_every=EVERY)
    with pytest.raises(ValueError, match="another course of training: batch 50, now 60; seed 0, now 1"):
        run(2, path, resume=True, batch=60, seed=1)
    with pytest.raises(ValueError, match="holds 3 steps already: ask for more than steps=3"):
        run(2, path, resume=True, steps=3)
    for content in (b"no checkpoint", path.read_bytes()[:-2000]):
        (tmp_path / "damaged.pt").write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read, .*: it is damaged, or no checkpoint"):
            run(2, tmp_path / "damaged.pt", resume=True)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    run(1, path, steps=EVERY, checkpoint_every=EVERY)

    def body(comm):
        model = mlp((64, 17, 10), dtype="float64")
        recipe = Recipe(steps=STEPS, batch=50)
        return checkpoint.restore(comm, path, model, recipe.optimizer_for(model), recipe.facts())

    with pytest.raises(ValueError, match=r"of another model or optimizer: .*size mismatch for 0\.weight"):
        sim.run(2, body)
