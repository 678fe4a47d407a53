"""Gradients in fewer bytes: what is sent and what is held back add up, and the bytes are those that are promised."""

import copy

import pytest
import torch
from hypothesis import strategies as st

from hpdl_lab.comm import sim
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.compression import Cast, DataParallelCompressed, PowerSGD, TopK, low_rank_sum, top_k_all_reduce
from hpdl_lab.parallel.data_parallel import DataParallel
from hpdl_lab.trace import bytes_sent
from tests.properties import given
from tests.wording import raises

SIZES = (64, 32, 10)
MATRICES = [torch.Size((32, 64)), torch.Size((10, 32))]
ELEMENTS = 32 * 64 + 32 + 10 * 32 + 10


def numbers(rank, step, n):
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * rank + step), dtype=torch.float64)


def add(comm, compressor, shapes, steps):
    """[(own gradients, the sum that came back)] of each step, and what this rank holds back in the end."""
    compressor = copy.deepcopy(compressor)
    n, course = sum(shape.numel() for shape in shapes), []
    for step in range(steps):
        flat = numbers(comm.rank, step, n)
        given = flat.clone()
        course.append((given, compressor.add(comm, flat, shapes, lambda comm, x: comm.all_reduce(x)).clone()))
    held = torch.zeros(n, dtype=torch.float64)
    if isinstance(compressor, TopK):
        held = compressor.error
    if isinstance(compressor, PowerSGD):
        errors = iter(compressor.errors)
        held = torch.cat([next(errors).view(-1) if compressor.factored(s) else torch.zeros(s.numel()) for s in shapes])
    return course, held


@given(st.integers(1, 5), st.integers(1, 6), st.sampled_from([TopK(0.02), TopK(0.3), PowerSGD(1), PowerSGD(3)]))
def test_what_is_sent_and_what_is_held_back_are_all_gradients(p, steps, compressor):
    shapes = [torch.Size((12, 20)), torch.Size((7,)), torch.Size((9, 3, 5)), torch.Size(())]
    run = sim.run(p, add, compressor, shapes, steps)
    for course, _ in run:
        assert all(torch.equal(a[1], b[1]) for a, b in zip(course, run[0][0], strict=True))
    sent = sum(total for _, total in run[0][0])
    gradients = sum(own for course, _ in run for own, _ in course)
    held = sum(held for _, held in run)
    assert (sent + held - gradients).abs().max() < 1e-12 * steps * p * 10
    assert held.abs().max() > 0.1


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (6, 6), (1, 9), (9, 1)], ids=str)
@pytest.mark.parametrize("more", [0, 2])
def test_power_sgd_of_full_rank_is_exact(shape, more):
    def work(comm):
        m = numbers(comm.rank, 0, shape[0] * shape[1]).view(shape)
        if more:
            m[:, 0] = 0  # a gradient that is of lower rank itself
        q = torch.zeros(shape[1], min(shape), dtype=torch.float64)  # the worst start there is
        ((p, q),) = low_rank_sum(comm, [m], [q], lambda comm, x: comm.all_reduce(x))
        return m, p @ q.T

    run = sim.run(3, work)
    assert (run[0][1] - sum(m for m, _ in run)).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("compressor", "nbytes"),  # that all of p ranks send per step, by the communicator's hub: (p - 1) up, (p - 1) down
    [
        (Cast("float16"), lambda p: 2 * (p - 1) * 2 * ELEMENTS),
        (Cast("bfloat16"), lambda p: 2 * (p - 1) * 2 * ELEMENTS),
        (TopK(0.01), lambda p: (p - 1) * (p + 1) * (4 + 4) * round(0.01 * ELEMENTS)),
        (PowerSGD(2), lambda p: 2 * (p - 1) * 4 * (2 * (32 + 64) + 2 * (10 + 32) + 42)),
        (PowerSGD(5), lambda p: 2 * (p - 1) * 4 * (5 * (32 + 64) + 320 + 42)),  # 5 (10 + 32) * 2 are not less than 320
    ],
    ids=["float16", "bfloat16", "top_k", "rank 2", "rank 5"],
)
@pytest.mark.parametrize("p", [2, 5])
def test_bytes_are_counted(compressor, nbytes, p):
    shapes = [torch.Size(s) for s in ((32, 64), (32,), (10, 32), (10,))]

    def work(comm):
        copy.deepcopy(compressor).add(comm, torch.randn(ELEMENTS), shapes, lambda comm, x: comm.all_reduce(x))

    assert sum(bytes_sent(sim.run(p, work).events).values()) == nbytes(p)


def a_step(comm, strategy, bad=None):
    """Two steps, the first with a bad number on one rank; returns what was raised, and the gradients after the second.

    A deep copy: simulated ranks share what they are given.
    """
    strategy = copy.deepcopy(strategy)
    model = mlp(SIZES, seed=1)
    strategy.start(comm, model)
    said = ""
    for broken in (bad is not None, False)[bad is None :]:
        model.zero_grad()
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(comm.rank))).square().mean().backward()
        if broken and comm.rank == 1:
            model[2].weight.grad[0, 0] = bad
        try:
            strategy.add_gradients(comm, model)
        except FloatingPointError as error:
            said = str(error)
    return said, torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("compressor", [Cast("float16"), TopK(0.1), PowerSGD(2)], ids=["float16", "top_k", "rank 2"])
def test_a_bad_gradient_is_named_and_leaves_nothing_behind(compressor):
    run = sim.run(3, a_step, DataParallelCompressed(compressor), float("nan"))
    right = sim.run(3, a_step, DataParallelCompressed(compressor))
    for (said, after), (_, want) in zip(run, right, strict=True):
        assert "rank 1" in said and "2.weight" in said and torch.equal(after, want)
    assert all(torch.equal(after, run[0][1]) for _, after in run)


def test_what_loses_nothing_equals_data_parallelism():
    want = sim.run(3, a_step, DataParallel())[0][1]
    for compressor in (TopK(1.0), PowerSGD(1, least=1e9)):
        assert torch.allclose(sim.run(3, a_step, DataParallelCompressed(compressor))[2][1], want, atol=1e-6)
    dense = DataParallelCompressed(TopK(0.01), dense_steps=1)
    assert torch.allclose(sim.run(3, a_step, dense)[2][1], want, atol=1e-7)
    for dtype, digits in (("float16", 2**-11), ("bfloat16", 2**-8)):
        got = sim.run(3, a_step, DataParallelCompressed(Cast(dtype)))[1][1]
        assert 0 < (got - want).abs().max() < 3 * digits * want.abs().max()


def test_a_float16_sum_does_not_overflow_where_the_mean_does_not():
    def work(comm):
        return Cast("float16").add(comm, torch.full((2,), 40_000.0), [torch.Size((2,))], lambda c, x: c.all_reduce(x))

    assert sim.run(4, work)[0].tolist() == pytest.approx([160_000] * 2, rel=1e-3)


def test_without_places_of_its_own_a_rank_adds_the_others():
    def work(comm):
        grad, error = torch.tensor([1.0 + comm.rank, -5.0 * comm.rank, 0.5]), torch.zeros(3)
        return top_k_all_reduce(comm, grad, error, 1).tolist(), error.tolist()

    assert list(sim.run(3, work)) == [([1.0, -15.0, 0.0], held) for held in ([0, 0, 0.5], [2.0, 0, 0.5], [3.0, 0, 0.5])]


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: Cast("float8"), ("'float8'", "float16", "bfloat16")),
        (lambda: TopK(0), ("share", "0")),
        (lambda: TopK(1.5), ("share=1.5", "1")),
        (lambda: PowerSGD(0), ("rank", "1", "0")),
        (lambda: DataParallelCompressed(PowerSGD(), dense_steps=-1), ("dense_steps", "-1")),
    ],
)
def test_what_cannot_be_is_a_sentence(make, facts):
    with raises(ValueError, *facts):
        make()


def test_a_compressor_is_needed():
    with raises(TypeError, "TopK"):
        DataParallelCompressed(0.01)
