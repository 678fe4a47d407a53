"""Real weights, decode on several ranks, disaggregation, faults, and load: each against one rank, or on paper."""

import time

import torch
from safetensors.torch import load_file, save_file

from hpdl_lab import cli, models
from hpdl_lab.data.dataset import DataError
from hpdl_lab.inference import weights
from tests.wording import raises

# -- weights ----------------------------------------------------------------------------------------------------------


def test_the_stored_weights_load_at_once_and_know_the_book():
    begin = time.perf_counter()
    model, draft = weights.load("moby_dick"), weights.load("moby_dick_draft")
    assert time.perf_counter() - begin < 1 and not model.training
    assert weights.held_out_loss(model) < 1.55 and weights.held_out_loss(draft) < 1.85  # nats per character; blind: 4.4
    assert weights.mean_acceptance(model, draft) > 0.8  # 0.848
    files = [weights.FOLDER / f"{name}.safetensors" for name in weights.TRAINED]
    assert sum(file.stat().st_size for file in files) < 3e6


def test_the_command_writes_files_of_the_same_form(tmp_path, capsys):
    assert cli.main(["weights", "--steps", "1", "--folder", str(tmp_path)]) == 0
    assert "nats per character" in capsys.readouterr().out
    for name in weights.TRAINED:
        new, stored = (load_file(folder / f"{name}.safetensors") for folder in (tmp_path, weights.FOLDER))
        assert {key: (x.shape, x.dtype) for key, x in new.items()} == {
            key: (x.shape, x.dtype) for key, x in stored.items()
        }
        assert weights.held_out_loss(weights.load(tmp_path / f"{name}.safetensors")) < 4.5


def test_weights_of_another_model_are_refused(tmp_path):
    path = weights.FOLDER / "moby_dick_draft.safetensors"
    with raises(ValueError, "weights of another model", "Llama", "only"):
        weights.fill(models.build("llama"), path)
    with raises(ValueError, "another model", "(64,)", "(32,)"):
        fields = weights.TRAINED["moby_dick_draft"].fields | {"width": 32}
        weights.fill(models.build("gpt", vocabulary=81, **fields), path)


def test_files_that_are_no_weights(tmp_path):
    with raises(LookupError, "'moby_duck'", "moby_dick_draft"):
        weights.load("moby_duck")
    with raises(DataError, "hpdl weights"):
        weights.load(tmp_path / "none.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    with raises(DataError, "hpdl weights"):
        weights.load(tmp_path / "broken.safetensors")
    save_file({"x": torch.ones(3)}, tmp_path / "other.safetensors")
    with raises(DataError, "Moby-Dick"):
        weights.load(tmp_path / "other.safetensors")
