"""Pairs of DualPipe that overlap: the gradients of the model as a whole, and all-to-alls under another's computing."""

from functools import cache

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpdl_lab import lab, models, schedules
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import Switch
from hpdl_lab.parallel.pipeline.overlap import alternate, bars_of, expert_step, exposed, hidden_by
from hpdl_lab.parallel.pipeline.run_schedule import timed_actions
from hpdl_lab.schedules import Action
from tests.wording import raises

EP, BATCH, BLOCK, SECONDS = 2, 2, 4, {"attention": 1.0, "experts": 1.0}
FIELDS = {
    "vocabulary": 11,
    "block": BLOCK,
    "width": 16,
    "heads": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 2,
}
SMALL = {
    "hidden": 12,
    "moe_intermediate_size": 8,
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
FREE = Switch(alpha=0.0, beta=0.0)


def model_of(plan):
    return models.build("deepseek", dtype="float64", layers=1 + plan.stages, **FIELDS, **SMALL)


def tokens_of(m):
    generator = torch.Generator().manual_seed(m)
    return (torch.randint(11, (m, EP, BATCH, BLOCK), generator=generator) for _ in "xy")


def one_step(comm, plan, together):
    """(losses, {name: gradient}) of this rank."""
    losses, model = expert_step(comm, plan, model_of(plan), *tokens_of(plan.micro_batches), SECONDS, together)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@cache
def run_of(name, p, m, together, network=FREE):
    plan = schedules.build(name, p, m)
    return plan, sim.run(p * EP, one_step, plan, together, network=network)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("name", "p", "m"), [("dualpipe", 4, 8), ("dualpipe_v", 2, 4), ("zero_bubble_v", 2, 3)])
def test_gradients_are_those_of_the_model_as_a_whole(name, p, m, together):
    plan, ranks = run_of(name, p, m, together)
    model, (x, y) = model_of(plan), tokens_of(m)
    loss = cross_entropy(model(x.flatten(0, 2)).flatten(0, 1), y.flatten())
    loss.backward()
    assert sum(float(one) for losses, _ in ranks for one in losses.values()) == pytest.approx(loss.item(), abs=1e-12)
    sums: dict = {}
    for rank, (_, gradients) in enumerate(ranks):
        for key, gradient in gradients.items():
            place = rank % EP if ".mlp.experts." in key else 0  # all others are parts of one sum
            parts = sums.setdefault(key, {})
            parts[place] = parts.get(place, 0) + gradient
    assert set(sums) == {key for key, _ in model.named_parameters()}
    for key, param in model.named_parameters():
        found = torch.cat([sums[key][place] for place in sorted(sums[key])])
        assert float((found - param.grad).abs().max()) < 1e-12, key


def test_without_a_network_overlap_saves_nothing_and_the_step_takes_what_is_planned():
    """A forward takes 2 s, attention and experts; a backward 4."""
    for together in (False, True):
        plan, run = run_of("dualpipe", 4, 8, together)
        planned = schedules.evaluate(plan, 2, 4, 2, 2)
        pipeline = [e._replace(rank=e.rank // EP) for e in run.events if e.rank % EP == 0]
        found = schedules.summary(timed_actions(pipeline, 4))
        assert (found.makespan, found.peak) == (pytest.approx(planned.makespan), planned.peak)


def test_what_is_in_a_pair_is_hidden_and_all_else_exposed():
    network = Switch(alpha=1e-3, beta=3e-4)  # an all-to-all takes about half a second
    plan, alone = run_of("dualpipe", 4, 8, False, network)
    _, together = run_of("dualpipe", 4, 8, True, network)
    assert together.seconds < alone.seconds
    in_pairs = {*plan.partner, *plan.partner.values()}
    for rank in range(4 * EP):
        whole, shown = exposed(alone.events, rank)
        assert shown == pytest.approx(whole) and whole > 1, "no segment of another micro-batch hides anything"
        computing, messages = bars_of(together.events, rank)
        assert len(messages) == len(bars_of(alone.events, rank)[1]) == 8 * 2 * 2
        for message in messages:
            under, rest = hidden_by(message, computing)
            if message.action in in_pairs:
                assert rest < 0.01 * (message.end - message.begin)
                assert set(under) == {str(plan.partner.get(message.action) or first(plan, message.action))}
            else:
                assert not under


def first(plan, backward):
    return next(forward for forward, second in plan.partner.items() if second == backward)


def test_programs_go_on_in_turns_and_wait_when_it_is_theirs_again():
    done = []

    class Note:
        def __init__(self, text):
            self.text = text

        def wait(self):
            done.append(self.text)

    def program(name, n):
        for i in range(n):
            done.append(f"{name}{i}")
            yield Note(f"wait {name}{i}")
        return name

    assert alternate(program("a", 2), program("b", 1)) == ["a", "b"]
    assert done == ["a0", "b0", "wait a0", "a1", "wait b0", "wait a1"]


def test_the_verb_draws_both_and_says_how_much_is_exposed():
    run = lab.dualpipe(6, ranks=2, prediction=0.5)
    assert run.together.seconds < run.alone.seconds and run.shares[0] == pytest.approx(1)
    assert 0.4 < run.shares[1] < 0.6 and "you" in repr(run)
    assert {bar.action.kind for bar in run.together.computing} == set("FBIW")
    assert Action(1, "F", 4) in {bar.action for bar in run.together.sending}


def test_schedules_without_pairs_and_models_that_stages_do_not_divide_are_refused():
    with raises(ValueError, "1f1b", "4 ranks", "8 micro-batches", "no pair"):
        lab.dualpipe(schedule="1f1b")
    with raises(ValueError, "rank", "0", "3", "4"):
        lab.dualpipe(rank=4)
    plan, model = schedules.build("dualpipe", 2, 4), models.build("deepseek", layers=4, **FIELDS, **SMALL)
    with raises(ValueError, "3 layers", "2 stages"):
        sim.run(4, expert_step, plan, model, *tokens_of(4), {}, True)
