"""Ranks that generate and ranks that train: against one process with an engine of its own, and against a formula."""

import copy
import functools
from dataclasses import replace

import pytest
import torch

from hpdl_lab import models
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import Switch
from hpdl_lab.inference.engine import Engine
from hpdl_lab.inference.rollouts import RolloutPlan, log_probabilities, reinforce, round_seconds, share_of
from hpdl_lab.inference.sampling import Sampling

PROMPT = list(range(9)) * 2 + [1]  # more than a page, which requests share as long as weights stay
WANTED = share_of(range(4))  # of 16
PLAN = RolloutPlan(every=3, updates=16, generating=2, batch=11, new=8, lr=1e-2, seed=5)
QUICK = Switch(alpha=0.0, beta=0.0)


@functools.cache
def model(kind="gpt"):
    fields = {"hidden": 32, "kv_heads": 1} if kind == "llama" else {}
    return models.build(kind, vocabulary=16, block=32, layers=1, heads=2, width=32, dtype="float64", **fields)


@functools.cache
def alone(every):
    """Rewards, and the first rollout of each batch, of one process without any message."""
    learner, rewards, first = copy.deepcopy(model()), [], []
    optimizer = torch.optim.Adam(learner.parameters(), PLAN.lr)
    for update in range(PLAN.updates):
        if update % every == 0:
            engine = Engine(copy.deepcopy(learner))
        sampling = Sampling(temperature=1.0, seed=PLAN.seed + update * PLAN.batch)
        answers = torch.tensor(engine.generate([PROMPT] * PLAN.batch, PLAN.new, sampling))
        got = (answers < 4).double().mean(1)
        logits = learner(torch.tensor([[*PROMPT, *row] for row in answers.tolist()]))[:, len(PROMPT) - 1 : -1]
        logs = torch.distributions.Categorical(logits=logits).log_prob(answers)
        optimizer.zero_grad()
        (-(got - got.mean()) @ logs.sum(1) / answers.numel()).backward()
        optimizer.step()
        rewards.append(float(got.mean()))
        first.append(answers[0].tolist())
    return rewards, first


def same_as_alone(records, every):
    rewards, first = alone(every)
    for record in records:
        assert record.rewards == pytest.approx(rewards, abs=1e-12) and record.first.tolist() == first
        assert record.staleness == [update % every for update in range(PLAN.updates)]


@pytest.mark.parametrize(("ranks", "generating", "every"), [(2, 1, 1), (5, 2, 3), (5, 3, 3), (4, 1, 100)])
def test_any_ranks_do_what_one_process_does(ranks, generating, every):
    found = sim.run(ranks, reinforce, model(), PROMPT, WANTED, replace(PLAN, generating=generating, every=every))
    same_as_alone(found, every)
    rows = sum(e.nbytes for e in found.events if e.op == "send" and e.rank < generating <= e.peer and not e.lane)
    assert rows >= PLAN.updates * PLAN.batch * (1 + PLAN.new) * 8


def test_real_ranks_do_it_too(cluster):
    found = cluster.run(reinforce, model(), PROMPT, WANTED, PLAN)
    same_as_alone(found, PLAN.every)
    assert all(record.seconds > 0 and record.tokens_per_s > 0 for record in found)
    assert {e.rank for e in found.events if e.op == "generate"} == {0, 1}
    assert {e.rank for e in found.events if e.op == "train"} == {2, 3}


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_the_reward_rises_and_stale_rollouts_teach_less(kind):
    plan = replace(PLAN, updates=24, batch=32, generating=1)
    fresh, stale = (sim.run(2, reinforce, model(kind), [0], WANTED, replace(plan, every=every))[0] for every in (1, 12))
    assert fresh.rewards[0] == stale.rewards[0] < 0.4 and min(fresh.rewards[-4:]) > 0.9
    assert max(stale.rewards[:12]) < 0.45, "nobody who generates knows of the updates"
    assert sum(fresh.rewards) > sum(stale.rewards) + 4


@pytest.mark.parametrize("rollout_s", [0.01, 0.08])
def test_the_formula_gives_the_virtual_time(rollout_s):
    generate, update = 8 * rollout_s, 4 * 0.06
    for every in (1, 2, 8):
        plan = RolloutPlan(every, updates=16, batch=8, new=2, rollout_s=rollout_s, row_s=0.06)
        found = sim.run(3, reinforce, model(), [0], WANTED, plan, network=QUICK)
        assert found.seconds == pytest.approx(16 / every * round_seconds(every, generate, update))
        assert found[0].tokens_per_s == pytest.approx(16 * 8 * 2 / found.seconds)


def test_more_between_two_sends_is_faster_up_to_the_slower_kind():
    rates = [every / round_seconds(every, 2.0, 3.0, send=0.5) for every in (1, 2, 4, 1000)]
    assert rates == sorted(rates) and rates[0] == 1 / 5.5 and rates[-1] == pytest.approx(1 / 3, rel=0.01)


def test_rewards_and_probabilities_on_paper():
    answers = torch.tensor([[1, 5, 3, 9], [9, 9, 9, 9]])
    assert share_of([3, 1])(answers).tolist() == [0.5, 0.0]
    uniform = models.build("gpt", vocabulary=16, block=32, layers=1, heads=2, width=32)
    torch.nn.init.zeros_(uniform.tokens.weight)
    assert torch.allclose(log_probabilities(uniform, [1, 2, 3], answers).exp(), torch.tensor(1 / 16))


def test_what_cannot_be_is_refused_on_every_rank():
    for ranks, plan in (
        (2, RolloutPlan(generating=2)),
        (4, RolloutPlan(batch=2)),
        (4, RolloutPlan(batch=2, generating=3)),
    ):
        with pytest.raises(ValueError, match="at least one has to train"):
            sim.run(ranks, reinforce, model(), [0], WANTED, plan)
    with pytest.raises(ValueError, match="every"):
        RolloutPlan(every=0)
    plans = sim.PerRank([RolloutPlan(new=2), RolloutPlan(new=2, seed=1)])
    with pytest.raises(ValueError, match="plan"):
        sim.run(2, reinforce, model(), [0], WANTED, plans)
