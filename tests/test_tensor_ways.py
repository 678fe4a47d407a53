"""lab.tensor and what notebook 09 runs: bytes equal formulas, wrong functions are not timed, cut models are right."""

import pytest
import torch

from hpdl_lab import data
from hpdl_lab.comm import sim
from hpdl_lab.lab.tensor import tensor
from hpdl_lab.parallel.scripts import convolve_strips, train_gpt
from hpdl_lab.parallel.tensor import ways as tensor_ways
from hpdl_lab.parallel.tensor.linear import column_linear, row_linear
from hpdl_lab.parallel.tensor.spatial import halo_exchange
from hpdl_lab.parallel.tensor.ways import Parts, Shape, bytes_sent, try_way


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


def test_the_verb_says_draws_and_compares_with_the_model():
    result = tensor(ranks=2, shape=(1, 8, 8), prediction=500)
    assert result["pair"]["forward"] == result["pair"]["model_forward"] == 256
    assert result["pair"]["seconds"] == pytest.approx(result["pair"]["model_seconds"], rel=1e-3)  # whole ns
    assert "columns, then rows" in repr(result) and "2 simulated ranks" in repr(result)
    texts = {text.get_text() for text in result.figure.texts}
    assert {"your prediction", "model", "x + mlp(norm(x)), x (1, 8, 8), on 2 simulated ranks"} <= texts
    with pytest.raises(LookupError, match="no way is called 'rows': 'whole', 'by layer', 'pair', 'sequence'"):
        result["rows"]


def whole_linear(comm, x, weight, bias):
    return torch.nn.functional.linear(x, weight, bias)


def returns_nothing(comm, x, weight, bias):
    pass


@pytest.mark.parametrize(
    ("functions", "says"),
    [
        ((column_linear, whole_linear), "'pair' is not timed: its y on rank 0 is off by .* lab.check says why"),
        ((whole_linear, row_linear), "'pair' is not timed: its x.grad on rank 0 is off by .* lab.check says why"),
        ((returns_nothing, row_linear), "returns_nothing returned nothing; lab.check says why"),
    ],
)
def test_a_wrong_function_is_not_timed(functions, says):
    with pytest.raises(ValueError, match=says):
        tensor(*functions, ranks=2, shape=(1, 8, 8))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shape": (1, 9, 8)}, "2 ranks cannot share 9 tokens and a width of 8 equally"),
        ({"shape": (8, 8)}, r"\(batch, tokens, width\), three whole numbers above 0, got \(8, 8\)"),
        ({"shape": 8}, r"three whole numbers above 0, got 8"),
        ({"shape": (1, 0, 8)}, "above 0"),
        ({"prediction": "many"}, "a prediction is a number of bytes, such as 1_500_000, got 'many'"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(options, says):
    with pytest.raises(ValueError, match=says):
        tensor(column_linear, row_linear, ranks=2, **options)


@pytest.mark.parametrize("fn", [3, "row_linear"])
def test_what_is_no_function_is_refused(fn):
    with pytest.raises(TypeError, match="lab.tensor needs functions, such as lab.tensor"):
        tensor(fn, ranks=2)


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
