"""A run that is broken off and goes on, on another number of ranks, has the loss curve of one that is not."""

import pytest

from hpdl_lab.comm import sim
from hpdl_lab.data.dataset import digits
from hpdl_lab.data.loading import Reader
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel import checkpoint
from hpdl_lab.parallel.data_parallel import DataParallel
from hpdl_lab.parallel.training import Recipe, train
from tests.wording import raises

STEPS, EVERY = 8, 3


def run(p, path="", data=None, dtype="float64", reader=None, **recipe):
    """The results of training a small network on p simulated ranks."""
    recipe = Recipe(**{"steps": STEPS, "batch": 50, "checkpoint": str(path), **recipe})

    def body(comm):
        model = mlp((64, 16, 10), dtype=dtype)
        return train(comm, model, DataParallel(), data or digits(dtype), recipe, reader)

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


def test_a_write_that_fails_leaves_the_file_before_it(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    run(2, path, steps=EVERY, checkpoint_every=EVERY)
    before = path.read_bytes()

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run(2, path, checkpoint_every=EVERY)
    assert path.read_bytes() == before


def on_every_rank(p, path, **recipe):
    """What each of p ranks raises, in words."""
    recipe = Recipe(steps=STEPS, batch=50, checkpoint=str(path), **recipe)

    def body(comm):
        with pytest.raises(Exception) as raised:
            train(comm, mlp((64, 16, 10)), DataParallel(), digits(), recipe)
        return f"{raised.type.__name__}: {raised.value}"

    return sim.run(p, body)


@pytest.mark.parametrize("where", ["no/such/folder/run.pt", "."])
def test_where_it_cannot_be_written_is_said_before_the_first_step_on_every_rank(tmp_path, where):
    said = on_every_rank(3, tmp_path / where, checkpoint_every=STEPS + 1)
    assert len(set(said)) == 1
    assert "cannot be written on this host: " in said[0] and said[0].startswith("OSError")
    assert list(tmp_path.iterdir()) == []


def test_what_it_cannot_go_on_from_is_said_on_every_rank(tmp_path):
    path = tmp_path / "run.pt"
    for wrong, word in (path, "nothing to resume from"), (tmp_path, "cannot be read on this host: Is a dir"):
        said = on_every_rank(3, wrong, resume=True)
        assert len(set(said)) == 1 and word in said[0]
    run(2, path, steps=EVERY, checkpoint_every=EVERY)
    with raises(ValueError, "batch 50", "60", "0", "1"):
        run(2, path, resume=True, batch=60, seed=1)
    with raises(ValueError, "3 steps", "steps=3"):
        run(2, path, resume=True, steps=3)


def darker(x, numbers):
    return x / 2


def test_it_does_not_go_on_with_other_data_or_parameters_of_another_dtype(tmp_path):
    path = tmp_path / "run.pt"
    run(2, path, steps=EVERY, checkpoint_every=EVERY)
    with raises(ValueError, "'float64'", "'float32'"):
        run(2, path, resume=True, dtype="float32")
    ours = digits("float64")
    for other in (ours._replace(train_y=ours.train_y.roll(1)), ours._replace(train_x=ours.train_x + 1e-9)):
        with raises(ValueError):
            run(2, path, resume=True, data=other)
    with raises(ValueError, "'None'"):
        run(2, path, resume=True, reader=Reader(prepare=darker))


def test_a_file_in_which_one_bit_has_changed_is_refused(tmp_path):
    path, damaged = tmp_path / "run.pt", tmp_path / "damaged.pt"
    run(2, path, steps=EVERY, checkpoint_every=EVERY)
    whole = path.read_bytes()
    for position in range(checkpoint.HEAD - 1, len(whole), 997):
        content = bytearray(whole)
        content[position] ^= 1
        damaged.write_bytes(content)
        with raises(ValueError):
            sim.run(1, checkpoint.received, damaged)
    for content, why in (
        (b"", "not a checkpoint"),
        (b"something else", "not a checkpoint"),
        (whole[:-2000], "is damaged"),
    ):
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match=why):
            run(2, damaged, resume=True)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    run(1, path, steps=EVERY, checkpoint_every=EVERY)

    def body(comm):
        model = mlp((64, 17, 10), dtype="float64")
        recipe = Recipe(steps=STEPS, batch=50)
        facts = recipe.facts() | checkpoint.facts_of(digits("float64"), model) | {"prepare": "None"}
        return checkpoint.restore(comm, path, model, recipe.optimizer_for(model), facts)

    with raises(ValueError, "0.weight"):
        sim.run(2, body)
