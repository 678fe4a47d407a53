"""Lessons 09 and 11: clumsy answers are told plainly what to do, and right ones may look different on engines."""

import pytest
import torch
from torch.nn.functional import linear

from hpdl_lab.checks.exercises import check, find
from hpdl_lab.comm import sim


def nan_gradients(mesh, parameters):
    for placed in parameters:
        placed.parameter.grad = placed.parameter.detach() * float("nan")


def keeps_gradients_to_itself(mesh, parameters):
    for placed in parameters:
        placed.parameter.grad = None


@pytest.mark.parametrize(
    ("number", "answer", "says"),
    [
        ("9.1", lambda comm, x, weight: x, "takes 3 positional arguments but 4 were given"),
        ("9.1", lambda comm, x, weight, bias: [1], "something of type list: return this rank's columns"),
        ("9.1", lambda comm, x, weight, bias: linear(x, weight, bias) / 0 * 0, "NaN is no number"),
        ("9.1", lambda comm, x, weight, bias: x @ weight, "mat1 and mat2 shapes cannot be multiplied"),
        ("9.1", lambda comm, x, weight, bias: torch.tensor(3.0), "returned shape (), where (2, 3, 6) is right"),
        ("9.2", lambda comm, x, weight, bias: comm.send(x, 7), "rank 0 sends to rank 7: ranks here are 0 to 1"),
        ("9.3", lambda rank, ranks, heads, width: torch.arange(3.0), "one flat tensor of them, int64"),
        ("9.3", lambda rank, ranks, heads, width: [10**6], "there is no row 1000000: the packed weight has 3 x 8"),
        ("9.3", lambda rank, ranks, heads, width: [], "your rows hold q of no head, k of no head, v of no head"),
        ("9.4", lambda comm, x, *rest: x.view(3, 3), "shape '[3, 3]' is invalid for input of size 120"),
        ("9.5", lambda comm, x, layer: layer, "something of type function: return this rank's positions"),
        ("9.6", lambda comm, x, rows: comm.isend(x[:, :, :1], 1), "use x.contiguous()"),
        ("9.6", lambda comm, x, rows: x[0], "1 + 3 + 1 rows, those above, its own and those below"),
        ("11.1", lambda rank, sizes: torch.tensor([0, 0]), "returned tensor([0, 0]): return a tuple of ints"),
        ("11.1", lambda rank, sizes: (), "one coordinate per axis, 2 in all"),
        ("11.2", lambda sizes, axis: {0: [1]}, "groups are a list of lists of ranks"),
        ("11.2", lambda sizes, axis: [[rank] for rank in range(12)], "Ranks 0 and 6 differ along axis 0 only"),
        ("11.3", lambda mesh, parameters: mesh["ddp"], "no axis of a mesh is called 'ddp'"),
        ("11.3", keeps_gradients_to_itself, "still has no gradient, while other replicas have the sum"),
        ("11.3", nan_gradients, "should be 7 and is nan. It has to be added over dp"),
        ("11.4", lambda ranks, predict, limit: predict, "something of type Prices: return (dp, pp, tp), three ints"),
        ("11.4", lambda ranks, predict, limit: predict(1, 1), "missing 1 required positional argument: 'tp'"),
        ("11.4", lambda ranks, predict, limit: (-1, -1, 12), "dp -1 x pp -1 x tp 12, which cannot be"),
    ],
)
def test_clumsy_answers_are_told_plainly(number, answer, says):
    result = check(find(number), answer)
    assert not result
    assert says in result.message, result.message
    assert len(result.message) < 420


@pytest.mark.parametrize("number", ["9.1", "9.2", "9.4", "9.5", "9.6", "11.3"])
@pytest.mark.parametrize("engines", [1, 3, 5])
def test_any_number_of_engines_will_do(number, engines):
    exercise = find(number)
    result = check(exercise, exercise.reference, lambda fn, *args: sim.run(engines, fn, *args, threads=True))
    assert result, result.message
    assert any(f"right on {engines} MPI rank" in fact for fact in result.facts)


@pytest.mark.parametrize("number", ["9.1", "9.6", "11.3"])
def test_what_is_right_on_simulated_ranks_may_be_wrong_on_engines(number):
    def runner(fn, *args):
        results = sim.run(4, fn, *args, threads=True)
        results[2] = results[1]
        return results

    result = check(find(number), find(number).reference, runner)
    assert not result
    assert "on 4 engines" in result.message.lower()
