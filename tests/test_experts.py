"""Mixture of experts: the layer is DeepSeek-V3's, ranks that share experts equal one rank, and loads even out."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpdl_lab import data, lab, models
from hpdl_lab.collectives.pairwise import all_to_all_v
from hpdl_lab.comm import sim
from hpdl_lab.mesh import DeviceMesh
from hpdl_lab.models.experts import MixtureOfExperts, accepted, imbalance
from hpdl_lab.parallel import experts
from hpdl_lab.parallel.experts import (
    bytes_per_token,
    combine,
    dispatch,
    expert_layer,
    expert_parallel,
    mixtures_of,
    update_biases,
)
from hpdl_lab.parallel.precision import Precision
from hpdl_lab.parallel.scripts import route_tokens, train_experts
from hpdl_lab.parallel.tensor.cuts import add_partial_gradients, gather_parameters, tensors_of
from hpdl_lab.trace import bytes_sent
from tests.wording import raises

EXACT = 1e-10
RANKS = [1, 2, 3, 4]
E, K, D, HIDDEN = 12, 2, 8, 6
NOBODY = -100.0  # a bias with which no token chooses an expert


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_of(seed=0, dtype=torch.float64, **fields):
    layer = MixtureOfExperts(**{"width": D, "hidden": HIDDEN, "experts": E, "top_k": K} | fields).to(dtype)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(numbers(*p.shape, seed=seed + i) / 2)
    return layer


def uneven(p):
    """A layer of which expert 1 gets nothing, and of several ranks the last one."""
    layer = layer_of(scale=2.5)
    layer.router.bias[1] = NOBODY
    if p > 1:
        layer.router.bias[-(E // p) :] = NOBODY
    return layer


# -- one rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"shared": 2}, {"groups": 4, "top_groups": 2, "scale": 2.5}])
def test_the_layer_is_that_of_transformers(fields):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    layer = layer_of(dtype=torch.float32, top_k=4, **fields)
    config = DeepseekV3Config(
        hidden_size=D,
        moe_intermediate_size=HIDDEN,
        n_routed_experts=E,
        num_experts_per_tok=4,
        n_shared_experts=fields.get("shared", 1),
        n_group=fields.get("groups", 1),
        topk_group=fields.get("top_groups", 1),
        routed_scaling_factor=fields.get("scale", 1.0),
    )
    theirs, ours = DeepseekV3MoE(config), layer.experts
    layer.router.bias.copy_(numbers(E, seed=7) / 20)
    state = {
        f"shared_experts.{name}_proj.weight": getattr(layer.shared, name).weight for name in ("gate", "up", "down")
    }
    state |= {"experts.gate_up_proj": torch.cat([ours.gate, ours.up], 1), "experts.down_proj": ours.down}
    state |= {"gate.weight": layer.router.weight, "gate.e_score_correction_bias": layer.router.bias}
    theirs.load_state_dict(state)
    x = numbers(3, 20, D).float()
    assert (theirs(x) - layer(x)).abs().max() < 1e-5
    without = layer(x)
    layer.router.bias.zero_()
    assert not torch.equal(layer(x), without), "the bias has chosen"


def test_a_token_gets_the_weighted_sum_of_its_experts():
    layer, x = layer_of(scale=2.5), numbers(9, D)
    y = layer(x)
    chosen, weights = layer.router(x)
    stacks = layer.experts.gate, layer.experts.up, layer.experts.down
    for t, token in enumerate(x):
        total = layer.shared(token)
        for e, weight in zip(chosen[t], weights[t], strict=True):
            gate, up, down = (stack[e] for stack in stacks)
            total = total + weight * (down @ (nn.functional.silu(gate @ token) * (up @ token)))
        assert (y[t] - total).abs().max() < EXACT
    assert torch.allclose(weights.sum(1), torch.tensor(2.5, dtype=torch.float64)), "weights add up to the scale"
    assert layer.counts.sum() == 9 * K and torch.equal(layer.loads[0], chosen.flatten().bincount(minlength=E))


def test_the_bias_chooses_and_does_not_weigh():
    layer, x = layer_of(), numbers(5, D)
    scores = (x @ layer.router.weight.T).sigmoid()
    layer.router.bias[3] = 100
    chosen, weights = layer.router(x)
    assert (chosen == 3).any(1).all()
    mine = scores.gather(1, chosen)
    assert torch.allclose(weights, mine / mine.sum(1, keepdim=True))


def test_the_bias_moves_by_gamma_against_the_load():
    layer = layer_of()
    layer.update_bias(torch.tensor([9, 1, *[4] * 4, *[5] * 6]), gamma=0.01)  # the mean is 56 / 12 = 4.67
    assert torch.allclose(layer.router.bias, torch.tensor([-0.01, *[0.01] * 5, *[-0.01] * 6], dtype=torch.float64))
    layer(numbers(7, D))
    layer.eval()(numbers(50, D))
    assert layer.counts.sum() == 7 * K, "only training counts"
    layer.update_bias()
    assert layer.counts.sum() == 0


def test_in_mixed_precision_the_router_stays_in_float32():
    layer = layer_of(dtype=torch.float32)
    Precision("bfloat16").lower(layer)
    assert {p.dtype for p in layer.experts.parameters()} == {torch.bfloat16}
    assert layer.router.weight.dtype == layer.router.bias.dtype == torch.float32
    assert layer(numbers(5, D)).dtype == torch.float32
    for _ in range(1000):
        layer.update_bias(torch.arange(E))
    assert layer.router.bias[0] == pytest.approx(1.0, rel=1e-4), "in bfloat16 it would stop at 0.5"


def test_no_expert_takes_more_than_its_capacity_and_the_first_come_first():
    loads = torch.tensor([[3, 0, 5], [2, 4, 4]])
    assert accepted(loads, 1.0).tolist() == [[3, 0, 5], [2, 4, 1]], "ceil(18 / 3) = 6"
    assert accepted(loads, 0.5).tolist() == [[3, 0, 3], [0, 3, 0]]
    layer, x = layer_of(shared=0), numbers(6, D)
    layer.router.bias[:K] = 100.0  # all choose experts 0 and 1, which take ceil(1.1 * 12 / 12) = 2 each
    layer.capacity = 1.1
    full = layer(x).detach()
    assert full[:2].abs().min() > 0 and (full[2:] == 0).all()
    assert layer.loads.sum() == 6 * K, "loads are what was asked for"


def test_layers_that_cannot_be_are_refused():
    with raises(ValueError, "12 experts", "5 groups"):
        layer_of(groups=5)
    with raises(ValueError, "4 of 3 experts", "1 of 4 groups"):
        layer_of(groups=4, top_k=4)


# -- several ranks ---------------------------------------------------------------------------------------------------


def mine(comm, x):
    return x.tensor_split(comm.size)[comm.rank]


def trained(layer, x, g):
    """What a layer does with its part of x, and its gradients."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * g).sum().backward()
    return y.detach(), x.grad, layer


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize(("p", "n"), [*((p, 11) for p in RANKS), (4, 3)])
def test_ranks_that_share_experts_equal_one_rank(p, n, capacity):
    """11 tokens are dealt out unevenly, 3 to 4 ranks leave the last one without; so does the router."""
    x, g, whole = numbers(n, D), numbers(n, D, seed=1), uneven(p)

    def one_of(comm):
        layer = expert_parallel(comm, uneven(p), capacity)
        y, dx, _ = trained(layer, mine(comm, x), mine(comm, g))
        add_partial_gradients(comm, layer)
        return y, dx, layer.loads, {name: param.grad for name, param in layer.named_parameters()}

    whole.capacity = capacity
    y, dx, _ = trained(whole, x, g)
    right = {name: param.grad for name, param in whole.named_parameters()}
    run = sim.run(p, one_of, threads=True)
    assert (torch.cat([out[0] for out in run]) - y).abs().max() < EXACT
    assert (torch.cat([out[1] for out in run]) - dx).abs().max() < EXACT
    loads = run[0][2]
    assert loads.sum() == n * K and loads[:, 1].sum() == 0 and all(torch.equal(out[2], loads) for out in run)
    if capacity is None and p > 1:
        assert loads.unflatten(1, (p, -1)).sum((0, 2))[-1] == 0, "the last rank gets nothing"
    if capacity is not None:
        assert accepted(loads, capacity).sum() < n * K, "something is dropped"
    for name, grad in right.items():
        parts = [out[3][name] for out in run]
        got = torch.cat(parts) if name.startswith("experts.") else parts[0]
        assert (got - grad).abs().max() < EXACT, name
        assert name.startswith("experts.") or all(torch.equal(part, got) for part in parts), name


@pytest.mark.parametrize("p", RANKS)
def test_rows_go_where_they_are_sent_and_come_back(p):
    """Rank r sends (r + s) % 3 rows to rank s."""

    def there_and_back(comm):
        sent = [(comm.rank + s) % 3 for s in range(p)]
        x = (numbers(sum(sent), 2) * 0 + comm.rank).requires_grad_()
        there = dispatch(comm, x, sent, sent)
        back = combine(comm, there * 2, sent, sent)
        back.backward(numbers(*back.shape, seed=comm.rank))
        return there.tolist(), torch.equal(back, 2 * x), x.grad - 2 * numbers(*back.shape, seed=comm.rank)

    for r, (there, back, off) in enumerate(sim.run(p, there_and_back, threads=True)):
        assert there == [[s, s] for s in range(p) for _ in range((r + s) % 3)] and back
        assert not off.any(), "backward of dispatch is combine"


def test_rows_that_are_not_all_sent_are_refused():
    def too_many(comm):
        all_to_all_v(comm, torch.zeros(3), [1, 1], [1, 1])

    with raises(ValueError, "rank 0", "3 rows", "2"):
        sim.run(2, too_many)


@pytest.mark.parametrize("p", RANKS)
def test_only_copies_for_other_ranks_travel(p):
    x, n = numbers(13, D), 13

    def one_of(comm, backward):
        layer = expert_parallel(comm, layer_of())
        before = len(comm.trace.events)
        y = layer(mine(comm, x).clone().requires_grad_())
        if backward:
            y.sum().backward()
        return sum(e.nbytes for e in comm.trace.events[before:] if e.op == "send")

    sent, both = (sum(sim.run(p, one_of, back, threads=True)) for back in (False, True))
    route = experts.routing(layer_of(), x, p)
    travels = int(route.traffic.sum() - route.traffic.diagonal().sum())
    sizes = sim.run(p, lambda comm: comm.all_gather(torch.zeros(E, dtype=torch.int64)))
    gather = sum(bytes_sent(sizes.events).values()) if p > 1 else 0
    assert sent - gather == travels * bytes_per_token(1, D, 8, 8) == travels * D * 16
    assert both - sent == sent - gather, "as much in backward"
    assert route.traffic.sum() == n * K


def test_bytes_of_a_token_in_deepseek_v3():
    assert bytes_per_token(8, 7168) == 172_032


@pytest.mark.parametrize("bad", [5, 24])
def test_experts_that_ranks_cannot_share_are_refused(bad):
    with raises(ValueError, "12", f"{bad} ranks"):
        sim.run(bad, lambda comm: expert_parallel(comm, layer_of()))


def test_models_without_experts_and_capacities_that_are_none_are_refused():
    with raises(ValueError, "Linear"):
        sim.run(1, lambda comm: expert_parallel(comm, nn.Linear(2, 2)))
    with raises(ValueError, "capacity", "0"):
        sim.run(1, lambda comm: expert_parallel(comm, layer_of(), 0))


# -- training --------------------------------------------------------------------------------------------------------

STEPS, BATCH, BLOCK, GAMMA = 3, 8, 6, 0.02


def deepseek(**fields):
    """A DeepSeek-V3 of one dense layer and two with experts, whose routers have clear preferences."""
    fields = {"vocabulary": 11, "width": D, "block": BLOCK, "layers": 3, "heads": 2, "hidden": HIDDEN} | fields
    ranks = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 2}
    model = models.build(
        "deepseek", dtype="float64", n_routed_experts=E, moe_intermediate_size=HIDDEN, **ranks, **fields
    )
    with torch.no_grad():
        for layer in mixtures_of(model):
            layer.router.weight.mul_(2)
    return model


def tokens():
    x = torch.randint(11, (STEPS, BATCH, BLOCK + 1), generator=torch.Generator().manual_seed(3))
    return x[..., :-1], x[..., 1:]


def losses_of(model, x, y, add=lambda model: None, update=lambda model: None):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for some, answers in zip(x, y, strict=True):
        optimizer.zero_grad()
        loss = cross_entropy(model(some).flatten(0, 1), answers.flatten(), reduction="sum") / (BATCH * BLOCK)
        loss.backward()
        add(model)
        optimizer.step()
        update(model)
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"ep": 3}, {"dp": 2, "ep": 2}])
def test_training_with_shared_experts_equals_one_rank(sizes):
    def update(model):
        for layer in mixtures_of(model):
            layer.update_bias(gamma=GAMMA)

    def one_of(comm):
        mesh = DeviceMesh(comm, **sizes)
        ep, dp = mesh["ep"], mesh["dp"]

        def add(model):
            add_partial_gradients(ep, model)
            for param in model.parameters() if dp.size > 1 else ():
                dp.all_reduce(param.grad)

        model, (x, y) = expert_parallel(ep, deepseek()), tokens()
        x, y = (t.tensor_split(comm.size, 1)[comm.rank] for t in (x, y))
        losses = losses_of(model, x, y, add, lambda model: update_biases(dp, model, GAMMA))
        return comm.all_reduce(losses), gather_parameters(ep, model)

    whole = deepseek()
    losses = losses_of(whole, *tokens(), update=update)
    assert all(layer.router.bias.abs().max() > 1.5 * GAMMA for layer in mixtures_of(whole)), "the bias takes part"
    for found, gathered in sim.run(math.prod(sizes.values()), one_of, threads=True):
        assert (found - losses).abs().max() < EXACT
        assert all((gathered[name] - tensor).abs().max() < EXACT for name, tensor in tensors_of(whole))
        copy.deepcopy(whole).load_state_dict(gathered, strict=False)


def test_training_without_the_bias_is_at_least_1_4_times_as_imbalanced():
    x = torch.randint(64, (40, 32, BLOCK + 1), generator=torch.Generator().manual_seed(3))

    def course(gamma):
        """Of each step and layer: the largest load over the mean."""
        model, found = deepseek(vocabulary=64, width=16), []

        def update(model):
            found.append([imbalance(layer.counts) for layer in mixtures_of(model)])
            for layer in mixtures_of(model):
                layer.update_bias(gamma=gamma)

        losses_of(model, x[..., :-1], x[..., 1:], update=update)
        return torch.tensor(found)

    without, with_bias = course(0.0), course(GAMMA)
    assert torch.equal(without[0], with_bias[0])
    assert (without[-5:].mean(0) > 1.4 * with_bias[-5:].mean(0)).all(), (without[-5:], with_bias[-5:])


def test_the_scripts_of_the_notebook_say_what_they_have_done():
    text = data.load("text", block=8)
    (alone,), two = sim.run(1, train_experts, text, 2), sim.run(2, train_experts, text, 2, threads=True)
    assert max(abs(a - b) for a, b in zip(alone.losses, two[0].losses, strict=True)) < EXACT
    assert [load.tolist() for load in alone.loads] == [load.tolist() for load in two[1].loads]
    assert alone.loads[0].sum() == 16 * 8 * 2 and alone.held == alone.whole > two[0].held
    layer, x = layer_of(experts=3, shared=0), numbers(10, D)
    for r, routed in enumerate(run := sim.run(3, route_tokens, expert_layer, layer, x)):
        away = int((routed.chosen != r).sum()) + sum(int((o.chosen == r).sum()) for o in run if o is not routed)
        assert routed.off < EXACT and 0 < routed.nbytes - away * D * 8 <= 2 * 8, "and sizes"
    with raises(ValueError, "3 experts on 2 ranks"):
        sim.run(2, route_tokens, expert_layer, layer, x)


# -- the exercise's function, pictures -------------------------------------------------------------------------------


def test_one_expert_per_rank_is_the_layer_with_as_many_experts():
    """expert_layer with a scale for an expert: y = sum of weight * (rank + 1) * x."""
    x, chosen = numbers(9, D), numbers(9, 3).argsort(1)[:, :2]
    weights = numbers(9, 2, seed=1)

    def one_of(comm):
        parts = (mine(comm, t) for t in (x, chosen, weights))
        return expert_layer(comm, *parts, lambda there: there * (comm.rank + 1))

    right = (weights * (chosen + 1)).sum(1, keepdim=True) * x
    assert (torch.cat([*sim.run(3, one_of)]) - right).abs().max() < EXACT


def test_groups_keep_a_token_on_few_ranks():
    x = numbers(50, D)
    assert experts.routing(layer_of(top_k=4), x, 4).reached.max() == 4
    assert experts.routing(layer_of(top_k=4, groups=4, top_groups=2), x, 4).reached.max() == 2
    with raises(ValueError, "12 experts", "5 ranks"):
        experts.routing(layer_of(), x, 5)


def test_the_routing_is_a_heat_map():
    route = experts.routing(layer_of(), numbers(150, D), 4)
    shown = lab.show(route)
    assert len(shown.data) == 150 * K and {row["rank"] for row in shown.data} == {0, 1, 2, 3}
    assert all(row["rank"] == row["expert"] // 3 for row in shown.data)
    assert [sum(row["source"] == r for row in shown.data) for r in range(4)] == [76, 76, 74, 74]
    above, below = shown.figure.axes
    heat = below.images[0].get_array()
    assert heat.sum() == 150 * K and heat.sum(0).tolist() == route.loads.sum(0).tolist()
    assert [bar.get_height() for bar in above.patches] == route.loads.sum(0).tolist()
    assert "300 copies of 150 tokens" in str(shown)
    with raises(ValueError, "token"):
        lab.show(experts.routing(layer_of(), numbers(0, D)))


def test_the_balance_before_and_after_is_drawn():
    layer = layer_of()
    found = experts.balance(layer, numbers(200, D), steps=60, gamma=0.02)
    assert found.loads.shape == (61, E) and (found.loads.sum(1) == 200 * K).all() and not layer.router.bias.any()
    assert found.imbalances[0] > 1.5 and max(found.imbalances[-5:]) < 1.2
    shown = lab.show(found)
    assert shown.data == found.imbalances and len(shown.figure.axes[0].patches) == 2 * E
