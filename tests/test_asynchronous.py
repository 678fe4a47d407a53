"""Bounded staleness: the bound is kept, and reached, by the events; a slow rank holds up nobody who is within it."""

import pytest
import torch

from hpdl_lab.comm import sim
from hpdl_lab.comm.inject import Injection
from hpdl_lab.comm.network import Switch
from hpdl_lab.data.dataset import digits
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.data_parallel import DataParallel
from hpdl_lab.parallel.parameter_server import StaleSynchronous
from hpdl_lab.parallel.training import Recipe, train
from tests.wording import raises

CLOCKS = 12
SIZES = (64, 16, 10)


def steps(comm, staleness, seconds, clocks=CLOCKS):
    """Clocks of `seconds[rank](clock)` each; returns the virtual time when the last of them ended."""
    model, strategy = mlp(SIZES), StaleSynchronous(staleness)
    strategy.start(comm, model)
    for clock in range(clocks):
        with comm.trace.span("forward"):
            model.zero_grad()
            loss = model(torch.full((2, 64), comm.rank + 1.0)).square().mean()
            comm.compute(seconds[comm.rank](clock))
        loss.backward()
        strategy.add_gradients(comm, model)
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
    end = comm.trace.clock()
    strategy.finish(comm, model)
    strategy.stop()
    return end / 1e9, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


NBYTES = 4 * (64 * 16 + 16 + 16 * 10 + 10 + 1)  # of a message with all gradients and the flag; no other has this size


def known(results, rank, other):
    """[how many gradients of `other` had been taken in by `rank` when that began its clock] for every clock."""
    came = [e.t1_ns for e in results.events if (e.rank, e.op, e.peer, e.nbytes) == (rank, "recv", other, NBYTES)]
    begun = [e.t0_ns for e in results.events if (e.rank, e.op) == (rank, "forward")]
    return [sum(t <= begin for t in came) for begin in begun]


def always(seconds):
    return lambda clock: seconds


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_bound_is_kept_and_reached(staleness):
    """A rank that begins clock c knows the gradients of clocks 0 to c - 1 - staleness: events say when they came."""
    results = sim.run(3, steps, staleness, [always(1e-3), always(1e-3), always(3e-3)])
    for rank in range(3):
        for other in {0, 1, 2} - {rank}:
            counts = known(results, rank, other)
            assert len(counts) == CLOCKS
            assert all(count >= clock - staleness for clock, count in enumerate(counts))
    behind = [clock - count for clock, count in enumerate(known(results, 0, 2))]
    assert max(behind) == staleness, "the fast ranks run ahead as far as they may"
    assert known(results, 2, 0)[-1] >= CLOCKS - 1, "the slow rank lacks nothing"


def test_without_staleness_nothing_depends_on_who_was_how_fast():
    """A rank that is ahead may have sent its next gradient already; it belongs to the next step of the others."""
    even = sim.run(3, steps, 0, [always(1e-3)] * 3)[0][1]
    for slow in range(3):
        inject, eager = Injection({slow: 0.005}), Switch(eager_nbytes=1 << 20)  # it arrives before it is asked for
        uneven = sim.run(3, steps, 0, [always(1e-3)] * 3, inject=inject, network=eager)
        assert all(torch.equal(parameters, even) for _, parameters in uneven)


def test_jitter_costs_nothing_within_the_bound():
    """Each rank is slow in every other step, never both: synchronous steps take the slow time, the others the mean."""
    jitter = [lambda clock: 2e-3 if clock % 2 else 1e-3, lambda clock: 1e-3 if clock % 2 else 2e-3]
    together, apart = (max(end for end, _ in sim.run(2, steps, s, jitter)) for s in (0, 1))
    assert together == pytest.approx(CLOCKS * 2e-3, rel=0.05)
    assert apart == pytest.approx(CLOCKS * 1.5e-3, rel=0.1)


def test_all_ranks_end_with_one_model_also_after_uneven_steps():
    def uneven(comm):
        return steps(comm, 1, [always(1e-3)] * 3, CLOCKS + 3 * (comm.rank == 1))

    results = sim.run(3, uneven)
    assert all(torch.equal(parameters, results[0][1]) for _, parameters in results)


def test_staleness_learns_and_the_loss_is_that_of_the_global_batch():
    data, recipe = digits(), Recipe(steps=120, lr=0.05)
    stale = sim.run(2, train, mlp(), StaleSynchronous(staleness=2), data, recipe)
    synchronous = sim.run(2, train, mlp(), DataParallel(), data, recipe)[0]
    assert stale[0].test_accuracy > 0.9
    assert all(torch.equal(trained.parameters, stale[0].parameters) for trained in stale)
    assert stale[0].losses[0] == pytest.approx(synchronous.losses[0], rel=1e-5)
    assert stale[0].losses == stale[1].losses and stale[0].losses[-1] < 0.5 * stale[0].losses[0]


def test_nan_is_raised_on_its_rank_and_the_others_say_whom_they_miss():
    def bad(comm):
        model, strategy = mlp(SIZES), StaleSynchronous(1)
        strategy.start(comm, model)
        for clock in range(5):
            model.zero_grad()
            model(torch.full((1, 64), float("nan") if comm.rank == 1 and clock == 2 else 1.0)).sum().backward()
            strategy.add_gradients(comm, model)

    with raises(FloatingPointError, "rank 1", "NaN", "2.weight") as error:
        sim.run(3, bad)
    assert "rank 1 raised FloatingPointError" in str(error.value) or any(
        "rank 1 raised FloatingPointError" in note for note in error.value.__notes__
    )


def test_impossible_options_are_refused():
    for staleness in (-1, 1.5, None):
        with raises(ValueError, "0"):
            StaleSynchronous(staleness)
    mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, dtype=torch.float64))
    with raises(ValueError, "StaleSynchronous(staleness=3)", "2"):
        sim.run(2, lambda comm, model: StaleSynchronous(3).start(comm, model), mixed)
    assert repr(StaleSynchronous()) == "StaleSynchronous()"
