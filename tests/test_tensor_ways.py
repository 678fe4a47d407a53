"""lab.tensor and what notebook 09 runs: bytes equal formulas, wrong functions are not timed, cut models are right."""

import pytest
import torch

from hpdl_lab import data, lab
from hpdl_lab.comm import sim
from hpdl_lab.parallel.scripts import convolve_strips, train_gpt
from hpdl_lab.parallel.tensor import ways as tensor_ways
from hpdl_lab.parallel.tensor.linear import column_linear, row_linear
from hpdl_lab.parallel.tensor.spatial import halo_exchange
from hpdl_lab.parallel.tensor.ways import Parts, Shape, bytes_sent, try_way
from tests.wording import raises


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_every_way_sends_the_bytes_of_its_formula_and_holds_its_share(p):
    shape = Shape(2, 12, 12)
    rows = {way: sim.run(p, try_way, way, Parts(), shape, 1, threads=True) for way in tensor_ways.WAYS}
    for way, ranks in rows.items():
        for row in ranks:
            assert (row["forward"], row["backward"]) == bytes_sent(way, p, shape.nbytes)
        share = 1 if way == "whole" else 1 / p
        matrices = 4 * 8 * 12 * 12 * share
        assert matrices < rows[way][0]["weights"] <= matrices + 4 * 5 * 12
    if p > 1:
        kept = [rows[way][0]["kept"] for way in tensor_ways.WAYS]
        assert kept[0] >= kept[1] > kept[2] > kept[3]


@pytest.fixture
def small(monkeypatch):
    """A layer whose tensors are small; no engines."""
    monkeypatch.setattr("hpdl_lab.verbs.tensor.SIZE", 8)
    monkeypatch.setattr("hpdl_lab.verbs.world.running", lambda: None)


def test_the_verb_says_draws_and_compares_with_the_model(small):
    result = lab.tensor(ranks=2, prediction=500)
    assert result["pair"]["forward"] == result["pair"]["model_forward"] == 512
    assert result["pair"]["seconds"] == pytest.approx(result["pair"]["model_seconds"], rel=1e-3)  # whole ns
    assert "columns, then rows" in repr(result) and "2 simulated ranks" in repr(result)
    assert any(t.get_text() == "your guess" for t in result.figure.legends[0].get_texts())
    with raises(LookupError, "'rows'", "'whole'", "'by layer'", "'pair'", "'sequence'"):
        result["rows"]


def whole_linear(comm, x, weight, bias):
    return torch.nn.functional.linear(x, weight, bias)


def returns_nothing(comm, x, weight, bias):
    pass


@pytest.mark.parametrize(
    ("functions", "options", "error", "says"),
    [
        ((column_linear, whole_linear), {}, ValueError, ("'pair'", "rank 0")),
        ((whole_linear, row_linear), {}, ValueError, ("'pair'", "x.grad", "rank 0")),
        ((returns_nothing, row_linear), {}, ValueError, ("returned nothing",)),
        ((3,), {}, TypeError, ("3",)),
        ((), {"prediction": "many"}, ValueError, ("'many'",)),
    ],
)
def test_a_wrong_function_is_not_timed(functions, options, error, says, small):
    with raises(error, *says):
        lab.tensor(*functions, ranks=2, **options)


def test_the_notebooks_gpt_takes_the_steps_of_one_rank_with_two_sums_per_layer_each_way():
    text = data.load("text")
    (one,), two = sim.run(1, train_gpt, text, 2), sim.run(2, train_gpt, text, 2, threads=True)
    assert max(abs(a - b) for a, b in zip(one.losses, two[1].losses, strict=True)) < 1e-10
    assert len(two[0].forward) == len(two[0].backward) == 2 * 2 + 1
    assert two[0].whole / 2 < two[0].held < 0.6 * two[0].whole


def test_strips_of_images_are_convolved_as_the_whole_ones():
    images, kernel = torch.rand(2, 3, 11, 6), torch.rand(4, 3, 5, 5)
    found = sim.run(3, convolve_strips, halo_exchange, images, kernel)
    assert max(strip.off for strip in found) < 1e-5
    assert [strip.rows for strip in found] == [4, 4, 3]
    assert [strip.nbytes for strip in found] == [n * 2 * 2 * 3 * 6 * 4 for n in (1, 2, 1)]
