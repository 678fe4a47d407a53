"""What strategies promise beside the right sums: which messages, in which order, and sentences for what is wrong."""

import copy

import pytest
import torch
from hypothesis import example
from hypothesis import strategies as st
from torch import nn

from hpdl_lab.collectives import cost, ring
from hpdl_lab.comm import PerRank, sim
from hpdl_lab.comm.errors import CommError
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.data_parallel import (
    DataParallel,
    DataParallelBucketed,
    DataParallelNaive,
    DataParallelOverlapped,
    replicate,
)
from hpdl_lab.parallel.reducer import Bucket, Reducer, assign_buckets, gradient_ready
from hpdl_lab.parallel.zero import ZeRO2, ZeRO3
from tests.properties import given
from tests.wording import raises

SIZES = (64, 32, 16, 10)  # six parameter tensors: 2048, 32, 512, 16, 160, 10 elements
ELEMENTS = [2048, 32, 512, 16, 160, 10]
SMALL = {"bucket_nbytes": 2500, "first_nbytes": 100}
IN_BUCKETS = [10, 160 + 16, 512 + 32, 2048]  # of float32: 40 bytes, 704, 2176, 8192
SYNCHRONOUS = [DataParallelNaive(), DataParallel(), DataParallelBucketed(**SMALL), DataParallelOverlapped(**SMALL)]


def backward(model, comm, seed=0):
    """The backward pass of a loss on data that differs per rank."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * seed + comm.rank))
    model(x).square().mean().backward()


def a_step(comm, strategy, model):
    """Gradients over all ranks, once; returns them, each as it was and as it is."""
    strategy.start(comm, model)
    backward(model, comm)
    before = [p.grad.clone() for p in model.parameters()]
    strategy.add_gradients(comm, model)
    after = [p.grad.clone() for p in model.parameters()]
    strategy.stop()
    return before, after


# -- which messages ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 900), st.integers(1, 900))
@example([400, 40, 400, 40, 100, 10], 450, 120)
def test_buckets_lose_nothing_keep_their_limits_and_are_full(nbytes, limit, first):
    buckets = assign_buckets(nbytes, limit, first)
    assert [i for bucket in buckets for i in bucket] == list(reversed(range(len(nbytes))))
    for i, bucket in enumerate(buckets):
        room = limit if i else first
        assert len(bucket) == 1 or sum(nbytes[j] for j in bucket) <= room
        if i + 1 < len(buckets):
            assert sum(nbytes[j] for j in bucket) + nbytes[buckets[i + 1][0]] > room


@pytest.mark.parametrize(
    ("strategy", "elements"),
    [
        (DataParallelNaive, ELEMENTS),
        (DataParallel, [sum(ELEMENTS)]),
        (lambda f: DataParallelBucketed(f, **SMALL), IN_BUCKETS),
        (lambda f: DataParallelOverlapped(f, **SMALL), IN_BUCKETS),
    ],
)
def test_messages_and_bytes_are_those_of_the_docstring(strategy, elements):
    """One all_reduce per message of N + 1 elements, in this order; bytes are those that cost.py says of the ring."""
    p, calls = 3, []

    def noted(comm, x):
        if comm.rank == 0:
            calls.append(x.numel())
        return ring.all_reduce(comm, x)

    def step(comm, model):
        a_step(comm, strategy(noted), model)

    plain = sim.run(p, lambda comm, model: strategy(noted).start(comm, model), mlp(SIZES))
    results = sim.run(p, step, mlp(SIZES))
    assert calls == [n + 1 for n in elements]
    for rank in range(p):
        sent = [e for e in results.events if (e.op, e.rank) == ("send", rank)]
        at_start = [e for e in plain.events if (e.op, e.rank) == ("send", rank)]
        assert len(sent) - len(at_start) == len(elements) * 2 * (p - 1)
    total = sum(e.nbytes for e in results.events if e.op == "send")
    total -= sum(e.nbytes for e in plain.events if e.op == "send")
    assert total == sum(2 * (p - 1) * 4 * (n + 1) for n in elements)  # 2(p-1)/p per rank, times p ranks
    assert total / p == pytest.approx(sum(cost.all_reduce(p, 4 * (n + 1)).nbytes for n in elements), rel=0.01)


def reducer_of(comm, model, all_reduce):
    params = list(model.parameters())
    assigned = assign_buckets([p.nbytes for p in params], 2500, 100)
    return Reducer([Bucket(comm, [params[i] for i in part], part) for part in assigned], all_reduce)


def test_buckets_start_in_order_whatever_becomes_ready_first():
    """Buckets here: [5], [4, 3], [2, 1], [0]. Ready first on rank 1 is what is ready last on rank 0."""

    def step(comm, model):
        backward(model, comm)
        reducer = reducer_of(comm, model, lambda comm, x: ring.all_reduce(comm, x))
        started = []
        for index in [5, 4, 3, 2, 1, 0] if comm.rank == 0 else [0, 1, 2, 3, 4, 5]:
            gradient_ready(comm, reducer, index)
            started.append(len(reducer.works))
        for work in reducer.works:
            work.wait()
        return started, reducer.buckets[2].flat.clone()

    (one, a), (other, b) = sim.run(2, step, mlp(SIZES))
    assert one == [1, 1, 2, 2, 3, 4] and other == [0, 0, 0, 0, 0, 4]
    assert torch.equal(a, b)


def test_broadcast_takes_every_kind_of_tensor():
    def started(comm):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Conv2d(2, 3, 3))
        model.to(memory_format=torch.channels_last)
        model.register_buffer("mask", torch.tensor([comm.rank == 0, False]))
        model.register_buffer("float16", torch.full((2,), float(comm.rank), dtype=torch.bfloat16))
        model.register_buffer("nothing", torch.empty(0))
        replicate(comm, model)
        return model.state_dict()

    first, *others = sim.run(3, started)
    assert first["mask"].tolist() == [True, False] and first["float16"].tolist() == [0, 0]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_all_ranks_end_with_one_model_whatever_their_shards_were():
    def trained(comm, model):
        strategy = DataParallel()
        strategy.start(comm, model)
        model.zero_grad()
        backward(model, comm)
        strategy.add_gradients(comm, model)
        own = model[1].running_mean.clone()
        strategy.finish(comm, model)
        return own, model.state_dict()

    results = sim.run(3, trained, nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4)))
    assert not torch.equal(results[0][0], results[2][0])
    for _, state in results:
        assert all(torch.equal(state[name], tensor) for name, tensor in results[0][1].items())
        assert torch.equal(state["1.running_mean"], results[0][0])


# -- what ranks disagree about -----------------------------------------------------------------------------------------


def freeze(model):
    model[2].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("other", "facts"),
    [
        (lambda: mlp((64, 32, 8, 10)), ("2.weight", "(8, 32)", "rank 1", "(16, 32)", "ranks 0", "2")),
        (lambda: mlp(SIZES).double(), ("0.weight", "float64", "rank 1")),
        (lambda: freeze(mlp(SIZES)), ("2.weight", "rank 1")),
        (lambda: mlp((64, 32, 10)), ("4", "6 parameters")),
        (lambda: nn.LazyLinear(3), ()),
    ],
)
def test_another_model_on_one_rank_is_named(other, facts):
    models = [mlp(SIZES), other(), mlp(SIZES)]
    with raises(ValueError, *facts):
        sim.run(3, lambda comm, model: DataParallel().start(comm, model), PerRank(models))


def test_another_strategy_on_one_rank_is_named():
    strategies = PerRank([DataParallel(), DataParallel(), DataParallelBucketed(bucket_nbytes=1000)])
    with raises(ValueError, "rank 2", "DataParallelBucketed", "ranks 0", "1", "DataParallel"):
        sim.run(3, lambda comm, strategy, model: strategy.start(comm, model), strategies, mlp(SIZES))


def test_another_seed_is_named_and_rank_0_wins():
    models = PerRank([mlp(SIZES, seed=seed) for seed in (0, 0, 7)])
    with pytest.warns(UserWarning, match=r"rank 2 started with other values than rank 0 .* first in 0.weight"):
        results = sim.run(3, a_step_of_parameters, models)
    assert all(torch.equal(parameters, results[0]) for parameters in results)
    assert torch.equal(results[0], torch.nn.utils.parameters_to_vector(mlp(SIZES).parameters()))


def a_step_of_parameters(comm, model):
    DataParallel().start(comm, model)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


# -- what is wrong in a step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SYNCHRONOUS, ids=repr)
@pytest.mark.parametrize(("bad", "word"), [(float("nan"), "NaN"), (float("-inf"), "infinity")])
def test_a_bad_gradient_names_rank_and_layer_on_every_rank(strategy, bad, word):
    said = []

    def step(comm, model):
        strategy_here = copy.deepcopy(strategy)
        strategy_here.start(comm, model)
        if comm.rank == 2:
            model[2].weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([3]), bad))
            model[0].bias.register_hook(lambda grad: grad * bad)
        before = a_step_of_parameters(comm, model)
        backward(model, comm)
        with pytest.raises(FloatingPointError) as error:
            strategy_here.add_gradients(comm, model)
        said.append(str(error.value))
        assert torch.equal(before, torch.nn.utils.parameters_to_vector(model.parameters()))

    sim.run(3, step, mlp(SIZES))
    assert len(said) == 3 and len(set(said)) == 1
    assert said[0].startswith(f"rank 2: {word} in the gradient of 2.weight and in 1 that")


@pytest.mark.parametrize("strategy", SYNCHRONOUS, ids=repr)
def test_a_sum_that_overflows_float16_is_named(strategy):
    def step(comm, dtype):
        torch.manual_seed(0)
        model, mine = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)).to(dtype), copy.deepcopy(strategy)
        mine.start(comm, model)
        for param in model.parameters():
            param.grad = torch.full_like(param, 2.0**15 if param is model[0].bias else 1.0)
        mine.add_gradients(comm, model)
        return model[0].bias.grad.tolist()

    assert sim.run(3, step, torch.bfloat16) == [[3 * 2.0**15] * 2] * 3
    with raises(FloatingPointError, "float16", "0.bias"):
        sim.run(3, step, torch.float16)


class Branches(nn.Module):
    """`a` is always used, `b` on odd ranks only, `c` nowhere."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, odd):
        return self.b(self.a(x)) if odd else self.a(x)


@pytest.mark.parametrize("strategy", SYNCHRONOUS, ids=repr)
def test_parameters_without_gradient_are_named_once_and_nothing_hangs(strategy):
    def steps(comm, model):
        mine = copy.deepcopy(strategy)
        mine.start(comm, model)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 64), comm.rank % 2).sum().backward()
            mine.add_gradients(comm, model)
        return mine.gradient_check.unused, model.b.bias.grad, model.c.bias.grad

    with pytest.warns(
        UserWarning, match="No gradient for b.weight, b.bias on ranks 0, 2: zeros.*c.bias on any"
    ) as told:
        results = sim.run(3, steps, Branches())
    assert len(told) == 1
    nobody = {"c.weight": [0, 1, 2], "c.bias": [0, 1, 2]}
    for unused, b, c in results:
        assert unused == {"b.weight": [0, 2], "b.bias": [0, 2]} | nobody
        assert b.tolist() == [2.0] * 4 and c is None


@pytest.mark.parametrize("strategy", [DataParallelOverlapped(**SMALL), ZeRO2(), ZeRO3()], ids=repr)
def test_backward_twice_without_accumulating_is_named(strategy):
    def twice(comm, model, strategy):
        strategy.start(comm, model)
        backward(model, comm)
        backward(model, comm)

    with raises(ValueError):
        sim.run(2, twice, mlp(SIZES), strategy, threads=True)


@pytest.mark.parametrize("strategy", SYNCHRONOUS, ids=repr)
def test_misuse_is_a_sentence(strategy):
    def unstarted(comm, model):
        copy.deepcopy(strategy).add_gradients(comm, model)

    def unstarted_finish(comm, model):
        copy.deepcopy(strategy).finish(comm, model)

    def too_early(comm, model):
        mine = copy.deepcopy(strategy)
        mine.start(comm, model)
        with mine.accumulating():
            backward(model, comm)
            mine.add_gradients(comm, model)

    def changed(comm, model):
        mine = copy.deepcopy(strategy)
        mine.start(comm, model)
        freeze(model)
        backward(model, comm)
        mine.add_gradients(comm, model)

    def everybodys(comm, model):
        shared.start(comm, model)

    shared = copy.deepcopy(strategy)
    for misuse, facts in (
        (everybodys, ("rank 1", "rank 0")),
        (unstarted, ("start",)),
        (unstarted_finish, ("start",)),
        (too_early, ("accumulating",)),
        (changed, ("6", "5")),
    ):
        with raises(ValueError, *facts):
            sim.run(2, misuse, mlp(SIZES))
    sim.run(2, lambda comm, mine, model: mine.start(comm, model), shared, mlp(SIZES))  # a copy for each is well


def test_sparse_gradients_and_impossible_options_are_refused():
    def sparse(comm, model):
        strategy = DataParallel()
        strategy.start(comm, model)
        model(torch.tensor([1, 2])).sum().backward()
        strategy.add_gradients(comm, model)

    with raises(ValueError, "torch.sparse_coo"):
        sim.run(2, sparse, nn.Embedding(5, 3, sparse=True))
    for wrong in (0, "1MB", float("nan"), None):
        with raises(ValueError, "1", f"{wrong!r}", "1048576"):
            DataParallelBucketed(bucket_nbytes=wrong)
    for wrong in ({"all_reduce": ring}, {"assign_buckets": 3}, {"gradient_ready": "late"}):
        with raises(TypeError, f"{next(iter(wrong))}=", f"{next(iter(wrong))}"):
            DataParallelOverlapped(**wrong)


def test_mixed_dtypes_share_no_bucket():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 4)

        def forward(self, x):
            return self.c(self.b(self.a(x).bfloat16()).float())

    def step(comm, strategy, model):
        mine = copy.deepcopy(strategy)
        mine.start(comm, model)
        model(torch.full((2, 8), comm.rank + 1.0)).sum().backward()
        before = [p.grad.clone() for p in model.parameters()]
        mine.add_gradients(comm, model)
        return before, [p.grad for p in model.parameters()]

    for strategy in SYNCHRONOUS:
        results = sim.run(3, step, strategy, Mixed())
        for i, after in enumerate(results[1][1]):
            total = sum(before[i].float() for before, _ in results)
            assert after.dtype == results[0][0][i].dtype
            assert torch.allclose(after.float(), total, rtol=2**-7 if after.dtype == torch.bfloat16 else 1e-6)


def test_buckets_and_hooks_of_ones_own_that_are_wrong_are_sentences():
    def forgets_the_first(nbytes, limit, first):
        return assign_buckets(nbytes, limit, first)[1:]

    def starts_one(comm, reducer, index):
        reducer.collect(index)
        if not reducer.works:
            reducer.works.append(comm.background(reducer.all_reduce, reducer.buckets[0].packed()))

    with raises(ValueError, "6 parameters", "0", "5"):
        sim.run(2, a_step, DataParallelBucketed(assign_buckets=forgets_the_first, **SMALL), mlp(SIZES))
    with raises(ValueError, "1", "4 buckets"):
        sim.run(2, a_step, DataParallelOverlapped(gradient_ready=starts_one, **SMALL), mlp(SIZES))


def test_an_all_reduce_that_fails_in_the_background_is_raised_in_the_step():
    def broken(comm, x):
        raise CommError("the network is gone")

    with raises(CommError, "the network is gone"):
        sim.run(2, a_step, DataParallelOverlapped(broken, **SMALL), mlp(SIZES))
    for wrong, facts in (
        (lambda comm, x: x[:2], ("(11,)", "(2,)")),
        (lambda comm, x: x.double(), ("float32", "float64")),
        (lambda comm, x: x.numpy(), ("(11,)", "ndarray")),
    ):
        for strategy in (DataParallelOverlapped(wrong, **SMALL), DataParallelBucketed(wrong, **SMALL)):
            with raises(ValueError, *facts):
                sim.run(2, a_step, strategy, mlp(SIZES))


def test_after_a_step_that_failed_the_next_one_begins_with_nothing():
    def steps(comm, model):
        calls, said = [], []

        def fails_once(comm, x):
            calls.append(x)
            if len(calls) == 3:
                raise LookupError("of the all_reduce")
            return comm.all_reduce(x)

        strategy = DataParallelOverlapped(fails_once, **SMALL)
        strategy.start(comm, model)
        model[2].weight.register_hook(lambda grad: 1 // (len(said) != 2) * grad)
        for _ in range(5):
            model.zero_grad()
            try:
                backward(model, comm)
                strategy.add_gradients(comm, model)
                said.append("")
            except (ArithmeticError, LookupError, ValueError) as error:
                said.append(str(error))
        return said

    for said in sim.run(2, steps, mlp(SIZES)):
        assert [said[0], said[1], said[4]] == ["of the all_reduce", "", ""] and "zero" in said[2]
        assert said[3].endswith("or the backward before this one failed")
