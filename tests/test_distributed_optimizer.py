"""DistributedOptimizer beside what scripts do: clipping, closures, scalers, several backwards, steps that fail."""

import re
import warnings

import pytest
import torch
from torch import nn

from hpdl_lab.comm import sim
from hpdl_lab.comm.errors import Mismatch
from hpdl_lab.parallel.data_parallel import broadcast_parameters
from hpdl_lab.parallel.horovod.fusion import DistributedOptimizer

ROWS = torch.arange(48.0, dtype=torch.float64).sin().view(8, 6)


def steps(comm, one_step, n=3, **fusion):
    """Let `one_step(model, optimizer, x)` take n steps on this rank's rows; returns the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(optimizer, comm, model.named_parameters(), threshold=0, **fusion)
    for _ in range(n):
        optimizer.zero_grad()
        one_step(model, optimizer, ROWS[comm.rank :: comm.size])
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_clipping_after_synchronize_is_as_on_one_rank():
    def clipped(model, optimizer, x):
        (100 * model(x).pow(2).mean()).backward()
        optimizer.synchronize()
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
        optimizer.step()

    (alone,) = sim.run(1, steps, clipped)
    for mine in sim.run(2, steps, clipped):
        assert float((mine - alone).abs().max()) < 1e-12


def test_synchronize_then_step_averages_once():
    def early(model, optimizer, x):
        model(x).sum().backward()
        optimizer.synchronize()
        optimizer.step()

    once = sent(sim.run(2, steps, plain))
    assert sent(sim.run(2, steps, early)) == once


def sent(results):
    """How many messages were sent, and how many bytes."""
    nbytes = [e.nbytes for e in results.events if e.op == "send"]
    return len(nbytes), sum(nbytes)


def plain(model, optimizer, x):
    model(x).sum().backward()
    optimizer.step()


def test_a_closure_is_refused_on_every_rank():
    def given(model, optimizer, x):
        optimizer.step(lambda: model(x).sum())

    def named(model, optimizer, x):
        optimizer.step(closure=lambda: model(x).sum())

    for with_closure in (given, named):
        with pytest.raises(ValueError, match=r"Call closure\(\) yourself, then step\(\)"):
            sim.run(2, steps, with_closure)


def test_more_backwards_than_passes_are_refused_by_name():
    def twice(model, optimizer, x):
        for half in x.tensor_split(2):
            model(half).sum().backward()
        optimizer.step()

    with pytest.raises(
        ValueError, match=r"another backward than the 1 of this step came to 2\.(weight|bias), .*`passes`"
    ):
        sim.run(2, steps, twice)
    sim.run(2, lambda comm: steps(comm, twice, passes=2))


@pytest.mark.parametrize("bad, word", [("nan", "NaN"), ("inf", "infinity|NaN")])
@pytest.mark.parametrize("good_steps", [0, 2])
def test_nan_on_one_rank_is_named_on_every_rank_before_the_update(bad, word, good_steps):
    told = []

    def body(comm):
        left = [good_steps]

        def spoiled(model, optimizer, x):
            left[0] -= 1
            loss = model(x).sum()
            if left[0] < 0 and comm.rank == 1:
                loss = loss + float(bad) * model[0].bias.sum()
            loss.backward()
            before = [p.detach().clone() for p in model.parameters()]
            try:
                optimizer.step()
            except FloatingPointError as error:
                told.append(str(error))
                assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

        steps(comm, spoiled, good_steps + 1)

    with_bad = sent(sim.run(3, body))
    assert len(told) == 3 and len(set(told)) == 1
    assert re.match(rf"rank 1 has ({word}) in the gradient of 0\.bias", told[0])
    assert sent(sim.run(3, steps, plain, good_steps + 1)) < with_bad, "ranks tell more only then"


def test_a_gradient_scaler_is_refused_in_one_sentence():
    scalers = {}

    def scaled(model, optimizer, x):
        scaler = scalers.setdefault(id(model), torch.amp.GradScaler("cpu", init_scale=4.0))
        loss = model(x).pow(2).mean() * (float("inf") if len(scalers) == 2 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)

    with pytest.raises(ValueError, match="ranks would skip different steps"):
        sim.run(2, steps, scaled)


@pytest.mark.parametrize(
    "build, sentence",
    [
        (lambda r: nn.Linear(2 + 4 * r, 6 - 4 * r), r"weight is number 0 of shape \(6, 2\) in float32 on rank 0, "),
        (lambda r: nn.Linear(3, 3).to([torch.float32, torch.float64][r]), r"weight .* float32 on rank 0, .* float64"),
        (lambda r: nn.Linear(3, 3, bias=r == 0), r"bias is number 1 of shape \(3,\) .* on rank 0, missing on rank 1"),
    ],
)
def test_ranks_with_other_parameters_are_told_before_the_first_step(build, sentence):
    def body(comm):
        model = build(comm.rank)
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model.named_parameters())

    with pytest.raises(ValueError, match=sentence) as error:
        sim.run(2, body)
    assert "on simulated ranks 0, 1 of 2" in error.value.__notes__[0]


def test_ranks_with_other_options_are_told():
    def body(comm):
        w = nn.Parameter(torch.zeros(1))
        DistributedOptimizer(torch.optim.SGD([w], lr=0.1), comm, passes=1 + comm.rank)

    with pytest.raises(ValueError, match="rank 1 has .*passes=2"):
        sim.run(2, body)


def test_broadcast_parameters_sends_what_it_has_and_refuses_another_dtype():
    def body(comm, dtypes):
        model = nn.Linear(6, 2).to(dtypes[comm.rank])
        model.register_buffer("mask", torch.tensor([True, False, comm.rank == 0]))
        broadcast_parameters(comm, model)
        return model.mask.tolist()

    assert sim.run(2, body, [torch.float16] * 2) == [[True, False, True]] * 2
    with pytest.raises(Mismatch, match="dtypes differ: rank 0 sends float16, rank 1 expects bfloat16"):
        sim.run(2, body, [torch.float16, torch.bfloat16])


def test_the_mean_in_float16_is_finite_where_the_sum_is_not():
    def body(comm):
        w = nn.Parameter(torch.zeros(2, dtype=torch.float16))
        optimizer = DistributedOptimizer(torch.optim.SGD([w], lr=1.0), comm)
        w.grad = torch.full((2,), 30_000.0, dtype=torch.float16)
        optimizer.step()
        return w.grad.tolist()

    assert sim.run(4, body) == [[30_000.0] * 2] * 4


def test_a_sum_that_overflows_float16_is_named_where_it_is_not_divided():
    def body(comm):
        w, v = (nn.Parameter(torch.zeros(2, dtype=torch.float16)) for _ in range(2))
        named = [("w", w), ("v", v)]
        optimizer = DistributedOptimizer(torch.optim.SGD([w, v], lr=1.0), comm, named, average=False)
        w.grad, v.grad = torch.full_like(w, 30_000.0), torch.ones_like(v)
        try:
            optimizer.step()
        except FloatingPointError as error:
            return str(error), w.tolist()

    run = sim.run(3, body)
    assert run == [run[0]] * 3 and run[0][1] == [0, 0], "no rank has taken the step"
    assert run[0][0].startswith("the sum of all ranks overflows float16 in the gradient of w, though it is finite")


@pytest.mark.parametrize("later", [False, True])
def test_a_forgotten_broadcast_is_named_in_the_first_step(later):
    """Also on a rank alone, and where parameters are broadcast after the optimizer was made, as many scripts do."""

    def body(comm, forgotten):
        torch.manual_seed(7 * (comm.rank == 2))
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        model[0].bias.data.fill_(1.0)
        if not forgotten and not later:
            broadcast_parameters(comm, model)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model.named_parameters())
        if not forgotten and later:
            broadcast_parameters(comm, model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            try:
                optimizer.step()
            except ValueError as error:
                return str(error)
        return "trained"

    assert sim.run(3, body, False) == ["trained"] * 3 and sim.run(1, body, True) == ["trained"]
    told = "rank 2 began with other parameters than rank 0, first in 0.weight: they would stay apart"
    assert [text[: len(told)] for text in sim.run(3, body, True)] == [told] * 3


@pytest.mark.parametrize("failing", [3, 7])
def test_a_step_whose_all_reduce_fails_says_so_and_the_next_one_is_clean(failing):
    """After a known sum: the second one of the first step, which is negotiated, and of the second, which is not."""

    def body(comm):
        count = [0]
        told = []

        def all_reduce(comm, x):
            count[0] += 1
            if count[0] == failing:
                raise RuntimeError("a bug in the all_reduce")
            return comm.all_reduce(x)

        def caught(model, optimizer, x):
            try:
                plain(model, optimizer, x)
            except RuntimeError as error:
                told.append(str(error))

        return steps(comm, caught, 3, all_reduce=all_reduce), told

    (first, told), (second, _) = sim.run(2, body)
    assert told == ["a bug in the all_reduce"]
    assert torch.equal(first, second)
    assert torch.allclose(first, sim.run(2, steps, plain, 2)[0])


@pytest.mark.parametrize("failing_step", [0, 1])
def test_after_a_backward_that_failed_on_one_rank_synchronize_makes_a_clean_start(failing_step):
    def body(comm):
        left = [failing_step]

        def fails_once(model, optimizer, x):
            left[0] -= 1
            h = model[1](model[0](x))
            if left[0] == -1 and comm.rank == 1:
                h.register_hook(broken)
            try:
                model[2](h).sum().backward()
                failed = False
            except ArithmeticError:
                failed = True
            if failed or left[0] == -1:
                optimizer.synchronize()
                optimizer.zero_grad()
            else:
                optimizer.step()

        return steps(comm, fails_once, 3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "no gradient on some ranks", which is so
        first, second = sim.run(2, body)
    assert torch.equal(first, second)
    assert torch.allclose(first, sim.run(2, steps, plain, 2)[0])


def broken(grad):
    raise ArithmeticError("in backward")


def test_after_a_backward_that_failed_the_next_one_says_what_to_do():
    def body(comm):
        def fails(model, optimizer, x):
            h = model[1](model[0](x))
            h.register_hook(broken)
            with pytest.raises(ArithmeticError):
                model[2](h).sum().backward()

        steps(comm, fails, 2)

    # The hook of a parameter comes before that of h: so the second backward ends in another error than broken()'s.
    with pytest.raises(ValueError, match=r"call synchronize\(\) and zero_grad\(\) on every rank first"):
        sim.run(2, body)


@pytest.mark.parametrize("threads", [False, True])
def test_what_one_rank_raises_before_its_step_is_what_ends_the_run(threads):
    """Not a ForgottenWait, nor the time limit: nothing goes on beside a rank that has failed."""

    def body(comm):
        def fails(model, optimizer, x):
            model(x).sum().backward()
            if comm.rank == 1:
                raise LookupError("mine")
            optimizer.step()

        steps(comm, fails)

    with pytest.raises(LookupError, match="mine"):
        sim.run(2, body, threads=threads)


def test_one_optimizer_is_wrapped_once():
    def body(comm):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        DistributedOptimizer(DistributedOptimizer(optimizer, comm), comm)

    with pytest.raises(ValueError, match="averages its gradients already"):
        sim.run(1, body)
