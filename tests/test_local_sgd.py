"""Replicas that meet now and then: what equals data parallelism, how many bytes travel, who ends with what."""

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from hpdl_lab.comm import sim
from hpdl_lab.data.loading import shard_indices
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.compression import DataParallelCompressed, PowerSGD, TopK
from hpdl_lab.parallel.data_parallel import DataParallel
from hpdl_lab.parallel.local_sgd import ONE_PEER, DiLoCo, Gossip, LocalSGD, Tournament, local_sgd
from hpdl_lab.parallel.training import train_step
from hpdl_lab.trace import bytes_sent
from tests.wording import raises

SIZES = (6, 5, 3)
N = 6 * 5 + 5 + 5 * 3 + 3
BATCH = 12
AS_DATA_PARALLEL = [LocalSGD(every=1), DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0)]


def examples(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    return x, x[:, :3].argmax(1)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def course(comm, strategy, steps, momentum=0.0, batch=BATCH):
    """[parameters after each step], with those after `finish` at the end."""
    strategy, model = copy.deepcopy(strategy), mlp(SIZES, seed=1).double()
    strategy.start(comm, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=momentum)
    kept = []
    for step in range(steps):
        x, y = examples(batch, step)
        mine = shard_indices(torch.arange(batch), comm.rank, comm.size)
        train_step(comm, model, strategy, optimizer, x[mine], y[mine], batch)
        kept.append(flat(model))
    strategy.finish(comm, model)
    return [*kept, flat(model)]


def bytes_of_meetings(strategy, steps, p=4):
    """Bytes that all ranks send in so many steps, without those of the beginning and the end."""
    whole, none = (sim.run(p, course, strategy, n).events for n in (steps, 0))
    return sum(bytes_sent(whole).values()) - sum(bytes_sent(none).values())


@pytest.mark.parametrize("strategy", AS_DATA_PARALLEL, ids=repr)
@pytest.mark.parametrize(("p", "momentum", "batch"), [(1, 0, 12), (2, 0, 12), (3, 0.9, 12), (5, 0, 7)])
def test_a_meeting_after_every_step_is_data_parallelism(strategy, p, momentum, batch):
    want = sim.run(p, course, DataParallel(), 4, momentum, batch)[0]
    for kept in sim.run(p, course, strategy, 4, momentum, batch):
        assert max(float((a - b).abs().max()) for a, b in zip(kept, want, strict=True)) < 1e-12


def test_replicas_differ_between_meetings_and_are_their_mean_there():
    run = sim.run(3, course, LocalSGD(every=3), 5)
    apart = [max(float((rank[step] - run[0][step]).abs().max()) for rank in run) for step in range(6)]
    assert [value > 1e-3 for value in apart] == [True, True, False, True, True, False]
    mean = sum(rank[4] for rank in run) / 3
    assert (run[1][5] - mean).abs().max() < 1e-14


def test_diloco_is_nesterov_on_what_the_mean_has_gone():
    run = sim.run(2, course, DiLoCo(every=2, outer_lr=0.7, outer_momentum=0.9), 4)
    w, velocity = flat(mlp(SIZES, seed=1).double()), 0.0

    def after(w, batches):
        """The mean of two ranks that take SGD's steps from w."""
        ends = []
        for rank in range(2):
            model = mlp(SIZES, seed=1).double()
            torch.nn.utils.vector_to_parameters(w.clone(), model.parameters())
            for step in batches:
                x, y = examples(BATCH, step)
                mine = shard_indices(torch.arange(BATCH), rank, 2)
                model.zero_grad()
                cross_entropy(model(x[mine]), y[mine]).backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.3 * p.grad
            ends.append(flat(model))
        return sum(ends) / 2

    for batches in ((0, 1), (2, 3)):
        gradient = w - after(w, batches)
        velocity = 0.9 * velocity + gradient
        w = w - 0.7 * (gradient + 0.9 * velocity)
        assert (run[0][batches[1]] - w).abs().max() < 1e-13


@pytest.mark.parametrize(
    ("strategy", "meetings"),
    [
        (DataParallel(), 12),
        (LocalSGD(every=1), 12),
        (LocalSGD(every=4), 3),
        (DiLoCo(every=6), 2),
        (LocalSGD(every=5), 2),
    ],
    ids=repr,
)
def test_bytes_are_those_of_data_parallelism_over_h(strategy, meetings):
    flag = 8 if type(strategy) is DataParallel else 0
    assert bytes_of_meetings(strategy, 12) == meetings * 2 * 3 * (8 * N + flag)


@pytest.mark.parametrize("name", ["ring", "wheel", "exponential", "random", ONE_PEER])
def test_gossip_keeps_the_mean_and_sends_to_neighbors_only(name):
    """From one step to the next the mean moves by the mean of the gradients alone, as in data parallelism."""
    alone = sim.run(4, course, LocalSGD(every=100), 1)
    run = sim.run(4, course, Gossip(name), 1)
    assert (sum(r[0] for r in run) - sum(r[0] for r in alone)).abs().max() < 1e-12
    peers = {"ring": 2, "wheel": 3, "exponential": 3, ONE_PEER: 1}
    if name in peers:
        assert bytes_of_meetings(Gossip(name), 3) == 3 * 4 * peers[name] * 8 * N


def test_one_peer_after_another_averages_exactly_in_log2_p_steps():
    def work(comm):
        strategy, model = Gossip(ONE_PEER), mlp(SIZES, seed=1).double()
        strategy.start(comm, model)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.full_like(p, float(comm.rank)))
        for _ in range(3):
            strategy.after_step(comm, model)
        return flat(model)

    assert all((w == 3.5).all() for w in sim.run(8, work))


@pytest.mark.parametrize("p", [2, 3, 4])
def test_in_a_tournament_the_better_model_stays(p):
    x, y = examples(60, 99)

    def work(comm):
        strategy, model = Tournament(x, y, every=1), mlp(SIZES, seed=1).double()
        strategy.start(comm, model)
        with torch.no_grad():
            for param in model.parameters():
                param *= 1.0 - comm.rank / 4  # other models, from those that are wrong with confidence to timid ones
        own, share = flat(model), shard_indices(torch.arange(60), comm.rank, comm.size)
        strategy.after_step(comm, model)
        met, loss = flat(model), strategy.loss(model, share)
        strategy.finish(comm, model)
        return own, met, loss, flat(model), strategy.loss(model, torch.arange(60))

    run = sim.run(p, work)
    owns = [own for own, *_ in run]

    def loss(w, indices):
        model = mlp(SIZES).double()
        torch.nn.utils.vector_to_parameters(w, model.parameters())
        return cross_entropy(model(x[indices]), y[indices]).item()

    for rank, (own, met, now, last, _) in enumerate(run):
        share = shard_indices(torch.arange(60), rank, p)
        assert any(torch.equal(met, other) for other in owns) and now <= loss(own, share) + 1e-12
        assert torch.equal(last, run[0][3])
    everything = torch.arange(60)
    assert run[0][4] == pytest.approx(min(loss(met, everything) for _, met, *_ in run))
    assert len({tuple(met.tolist()) for _, met, *_ in run}) < p or p == 3


def test_a_tournament_exchanges_one_model_per_rank():
    x, y = examples(12, 99)
    assert bytes_of_meetings(Tournament(x, y, every=2), 6) == 3 * 4 * 8 * N


@pytest.mark.parametrize(("steps", "every"), [(7, 3), (6, 3), (2, 5), (4, 1)])
def test_the_exercise_averages_after_each_block(steps, every):
    target = np.random.default_rng(0).normal(size=(4, steps, 9))

    def work(comm):
        w, batches = torch.zeros(9, dtype=torch.float64), iter(torch.from_numpy(target[comm.rank]))
        return local_sgd(comm, w, lambda w: (1 + comm.rank / 4) * (w - next(batches)), steps, 0.5, every)

    run, want = sim.run(4, work), np.zeros((4, 9))
    for step in range(steps):
        want -= 0.5 * (1 + np.arange(4)[:, None] / 4) * (want - target[:, step])  # else when they meet would not matter
        if (step + 1) % every == 0 or step + 1 == steps:
            want[:] = want.mean(0)
    assert all(np.abs(got.numpy() - want[0]).max() < 1e-14 for got in run)
    assert sum(bytes_sent(run.events).values()) == -(-steps // every) * 2 * 3 * 8 * 9


def test_what_cannot_be_is_a_sentence():
    for make, facts in (
        (lambda: LocalSGD(every=0), ("every", "1", "0")),
        (lambda: DiLoCo(outer_lr=0), ("outer_lr", "0")),
        (lambda: sim.run(3, course, Tournament(*examples(2)), 1), ("2", "3")),
    ):
        with raises(ValueError, *facts):
            make()
    with raises(LookupError, "'torus'", "ring", ONE_PEER):
        Gossip("torus")


def test_a_bad_gradient_is_named():
    def work(comm):
        strategy, model = LocalSGD(), mlp(SIZES)
        strategy.start(comm, model)
        (model(torch.ones(1, 6)).sum() * (float("nan") if comm.rank == 1 else 1.0)).backward()
        strategy.add_gradients(comm, model)

    with raises(FloatingPointError, "rank 1", "0.weight"):
        sim.run(2, work)


@pytest.mark.parametrize(
    "strategy",
    [
        DataParallelCompressed(TopK(0.1)),
        DataParallelCompressed(PowerSGD(1)),
        DiLoCo(every=2),
        Gossip("ring"),
        Gossip(ONE_PEER),
        Tournament(*examples(12, 99), every=2),
    ],
    ids=repr,
)
def test_engines_do_what_simulated_ranks_do(cluster, strategy):
    want, got = sim.run(3, course, strategy, 4), cluster.run(course, strategy, 4, ranks=[0, 1, 2])
    for rank in range(3):
        assert max(float((a - b).abs().max()) for a, b in zip(got[rank], want[rank], strict=True)) < 1e-12
