"""The model of grids with context and expert parallel and ZeRO: published models, what ranks hold and send, search."""

from dataclasses import replace

import pytest
import torch

from hpdl_lab import models
from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.models.deepseek import SIZES
from hpdl_lab.models.llama import SIZES as LLAMA_SIZES
from hpdl_lab.models.llama import LlamaConfig
from hpdl_lab.parallel.grid.ledger import adam
from hpdl_lab.parallel.grid.machine import MACHINES, grid_of
from hpdl_lab.parallel.grid.measure import bytes_over_axes, grid_steps, spec_of
from hpdl_lab.parallel.grid.memory import memory_of
from hpdl_lab.parallel.grid.model import predict_step
from hpdl_lab.parallel.grid.search import best, every_grid, grids, search_grids
from hpdl_lab.parallel.grid.simulation import simulate_step
from hpdl_lab.parallel.grid.spec import SPECS, deepseek, gpt, llama
from tests.wording import raises

CLUSTER = MACHINES["dgx_a100"]
LLAMA_CONFIG = LlamaConfig(4096, 256, layers=8, heads=8, kv_heads=4, width=512, hidden=1024, rope_theta=10_000)
LLAMA = llama("a llama", LLAMA_CONFIG)
EXPERTS_CONFIG = replace(SIZES["small"], vocabulary=4096, block=256, layers=8, heads=8, width=512, hidden=1024)
EXPERTS_CONFIG = replace(EXPERTS_CONFIG, moe_intermediate_size=128, kv_lora_rank=64)
EXPERTS = deepseek("a deepseek", EXPERTS_CONFIG)
GPT = gpt("a gpt", 10, 512, 8, 4096, 256, "mixed adam")


# -- published models --------------------------------------------------------------------------------------------------


def test_specs_have_the_parameters_of_published_models():
    """Llama 3: those of its checkpoints; DeepSeek-V3, arXiv:2412.19437: 671B in all, 37B active."""
    assert SPECS["llama3_70b"].parameters == SPECS["llama3_70b"].active == 70_553_706_496
    assert SPECS["llama3_405b"].parameters == SPECS["llama3_405b_long"].parameters == 405_853_388_800
    assert SPECS["deepseek_v3"].parameters == 671_026_404_352
    assert SPECS["deepseek_v3"].active == pytest.approx(37e9, rel=0.02)
    forward = SPECS["llama3_405b"].flops / 3 / 8192  # per token: 2 per parameter, attention comes on top
    assert forward == pytest.approx(2 * 405.85e9, rel=0.05)


def test_published_grids_fit_and_without_their_axes_nothing_does():
    """Llama 3, arXiv:2407.21783, table 4: tp 8, cp 16, pp 16, dp 8; DeepSeek-V3, section 3.2: pp 16, ep 64, ZeRO-1."""
    machine, long, v3 = MACHINES["dgx_h100"], SPECS["llama3_405b_long"], SPECS["deepseek_v3"]
    how = {"machine": machine, "batch": 128, "recompute": True, "zero": 1}
    assert predict_step(long, grid_of(8, 16, 8, cp=16), "1f1b", 16, **how).fits
    assert not predict_step(long, grid_of(128, 16, 8), "1f1b", 1, **how).fits
    how["batch"] = 15360
    published = predict_step(v3, grid_of(2, 16, ep=64), "1f1b", 120, **how)
    assert published.fits and not predict_step(v3, grid_of(128, 16), "1f1b", 120, **how).fits
    assert published.parts["ep"] > 0.4 * published.seconds  # what DualPipe is for
    assert 0 < sum(predict_step(long, grid_of(8, 16, 8, cp=16), "1f1b", 16, machine=machine).parts.values())


FIELDS = {"vocabulary": 48, "block": 16, "layers": 2, "heads": 4, "width": 16}
LATENTS = {"q_lora_rank": 8, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
OTHERS = ("name", "flops", "saved", "saved_cut", "saved_positions", "output_positions", "attention_flops")


def test_the_specs_of_a_llama_and_a_deepseek_are_those_of_the_models():
    """Exactly; but torch's kernels keep more than fused ones, compute what is masked, and know no sequence parallel."""
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, **LATENTS}
    fields = {"llama": FIELDS | {"kv_heads": 2, "hidden": 24}}
    fields["deepseek"] = FIELDS | {"first_k_dense_replace": 1, "hidden": 24, "moe_intermediate_size": 12} | routed
    for name, formula in (("llama", llama), ("deepseek", deepseek)):
        model = models.build(name, **fields[name])
        formulas = formula(name, replace(models.module_of(name).SIZES["tiny"], **fields[name]))
        read = spec_of(model, tokens)
        assert read.parameters == formulas.parameters == sum(p.numel() for p in model.parameters())
        same_but = {"layers": (), "name": "", "training": "", "latent": 0}  # the latter is for decoding
        assert replace(read, **same_but) == replace(formulas, **same_but)
        for real, said in zip(read.layers, formulas.layers, strict=True):
            same = [name for name in said._fields if name not in OTHERS]
            assert [getattr(real, name) for name in same] == [getattr(said, name) for name in same], real.name
            assert real.flops - real.attention_flops == said.flops - said.attention_flops
            assert real.attention_flops == 2 * said.attention_flops


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "cp": 2}, {"cp": 4}], ids=str)
@pytest.mark.parametrize(("zero", "each"), [(0, 16), (1, 4 + 12 / 4), (2, 2 + 14 / 4), (3, 16 / 4)])
def test_zero_holds_16_bytes_per_parameter_or_a_share_of_them(sizes, zero, each):
    """Rajbhandari et al. 2020, arXiv:1910.02054, for N = 4 ranks that hold the same parameters."""
    (held,) = memory_of(GPT, grid_of(**sizes), stage=zero)
    assert sum(held[:3]) == each * GPT.parameters


def test_experts_are_divided_by_ep_and_shared_out_over_dp_and_cp():
    dense, routed = EXPERTS.parameters - 7 * 16 * 3 * 512 * 128, 7 * 16 * 3 * 512 * 128
    for zero, of_dense, of_routed in ((0, 16, 16), (1, 4 + 12 / 16, 4 + 12 / 4), (3, 16 / 16, 16 / 4)):
        (held,) = memory_of(EXPERTS, grid_of(2, ep=4, cp=2), stage=zero)
        assert sum(held[:3]) == pytest.approx(of_dense * dense + of_routed * routed / 4, rel=1e-6)


def test_cp_divides_activations_and_nothing_else():
    whole, part = (memory_of(LLAMA, grid_of(pp=2, cp=cp)) for cp in (1, 4))
    for one, quarter in zip(whole, part, strict=True):
        assert one[:3] == quarter[:3] and one.activations == 4 * quarter.activations


SMALL = {"vocabulary": 48, "block": 32, "layers": 2, "heads": 4, "width": 256, "hidden": 256}
CHOSEN = {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
CHOSEN |= {"moe_intermediate_size": 64}


@pytest.mark.parametrize(
    ("name", "sizes", "zero"),
    [
        ("gpt", {"dp": 2, "cp": 2}, 0),
        ("gpt", {"tp": 2, "cp": 2}, 0),
        ("deepseek", {"dp": 2, "ep": 2}, 0),
        ("deepseek", {"pp": 2, "ep": 2}, 0),
        ("deepseek", {"ep": 2, "cp": 2}, 2),
    ],
    ids=str,
)
def test_what_ranks_hold_and_send_is_predicted(name, sizes, zero):
    """Within 2%, where each token goes to all experts, so that their loads are balanced; integers come on top."""
    fields = {n: v for n, v in SMALL.items() if name != "gpt" or n != "hidden"} | (CHOSEN if name != "gpt" else {})
    model, (x, y) = models.build(name, **fields), torch.randint(0, 48, (2, 8, 32))
    spec, grid = spec_of(model, x[:2], training="adam"), grid_of(**sizes)
    options = {"micro_batches": 2, "costs": [layer.flops for layer in spec.layers], "zero": zero}
    args = model, grid, x, y, {**options, "all_reduce": ring.all_reduce}, 0, adam
    run = sim.run(4, grid_steps, *args, threads=True)
    row = predict_step(spec, grid, micro_batches=2, batch=8, zero=zero)
    held = max((rank.held for rank in run), key=lambda held: held.total)
    for kind in ("parameters", "gradients", "optimizer", "activations"):
        assert getattr(held, kind) == pytest.approx(getattr(row.memory, kind), rel=0.02)
    sent = bytes_over_axes(run, grid)
    for axis in ("pp", "cp", "ep", "tp") if zero else ("dp", "pp", "cp", "ep", "tp"):
        assert sent[axis] == pytest.approx(row.links[axis] + (axis == "dp") * row.links["shared"], rel=0.02)
    assert all(sent[axis] for axis in sizes if axis != "dp")


# -- seconds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "sizes", "zero", "recompute"),
    [
        (LLAMA, (2, 2, 1, 2, 1), 0, False),
        (LLAMA, (2, 1, 2, 2, 1), 1, True),
        (LLAMA, (4, 1, 1, 2, 1), 3, False),
        (EXPERTS, (2, 2, 1, 1, 4), 0, False),
        (EXPERTS, (2, 2, 1, 2, 2), 1, False),
        (EXPERTS, (2, 1, 1, 2, 4), 2, False),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_seconds_predicted_are_those_of_all_messages(spec, sizes, zero, recompute):
    grid = grid_of(*sizes)
    how = {"machine": CLUSTER, "batch": 16 * grid["dp"] * grid["ep"], "recompute": recompute, "zero": zero}
    predicted = predict_step(spec, grid, "1f1b", 8, **how)
    assert predicted.seconds == pytest.approx(simulate_step(spec, grid, "1f1b", 8, **how), rel=0.02)
    assert sum(predicted.parts.values()) == pytest.approx(predicted.seconds)


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe_v"])
def test_pairs_hide_the_all_to_all_of_one_micro_batch_behind_the_arithmetic_of_another(schedule):
    how = {"machine": CLUSTER, "micro_batches": 16, "batch": 64}
    alone, pairs = (predict_step(EXPERTS, grid_of(pp=2, ep=4), name, **how) for name in ("1f1b", schedule))
    assert pairs.parts["ep"] < 0.6 * alone.parts["ep"] and pairs.seconds < 0.85 * alone.seconds
    assert pairs.seconds == pytest.approx(simulate_step(EXPERTS, grid_of(pp=2, ep=4), schedule, **how), rel=0.03)
    assert sum(pairs.parts.values()) == pytest.approx(pairs.seconds)


def test_long_sequences_hide_the_ring_behind_attention():
    """The messages grow with the positions, attention with their square."""
    exposed = {}
    for positions in (512, 65536):
        spec = llama("a llama", replace(LLAMA_SIZES["paper"], layers=4, block=positions))
        exposed[positions] = predict_step(spec, grid_of(cp=8), micro_batches=2, machine=CLUSTER).parts["cp"]
    assert exposed[512] > 0 and exposed[65536] == 0


# -- search ------------------------------------------------------------------------------------------------------------


def test_grids_are_those_of_dp_pp_tp_unless_other_axes_are_asked_for():
    assert [tuple(grid.sizes) for grid in every_grid(1024)] == grids(1024) and len(grids(1024)) == 66
    more = every_grid(16, cp=(1, 2, 3), ep=(1, 4))
    assert all(grid.size == 16 for grid in more) and {grid["cp"] for grid in more} == {1, 2}
    assert len(more) == sum(len(grids(n)) for n in (16, 8, 4, 2))


def test_search_shares_out_sequences_and_experts_where_that_is_faster_or_fits():
    how = {"machine": CLUSTER, "batch": 64, "recompute": (False,)}
    plain, more = (
        search_grids(EXPERTS, 16, **how),
        search_grids(EXPERTS, 16, ep=(1, 2, 4), cp=(1, 2), zero=(0, 1), **how),
    )
    assert {row.zero for row in plain} == {0} and {row.grid["ep"] for row in plain} == {1}
    kept = [row for row in more if row.grid["ep"] == row.grid["cp"] == 1 and not row.zero]
    assert sorted(kept, key=repr) == sorted(plain, key=repr)
    least = min(row.nbytes for row in plain)
    assert best(search_grids(EXPERTS, 16, limit=least - 1, ep=(1, 2, 4), zero=(1,), **how)).nbytes < least
    with raises(ValueError, "12 ranks"):
        search_grids(LLAMA, 12, ep=(2,), cp=(3,), machine=CLUSTER)


@pytest.mark.parametrize(
    ("spec", "sizes", "zero", "told"),
    [
        (GPT, {"ep": 2}, 0, ("ep=2", "experts")),
        (EXPERTS, {"ep": 3}, 0, ("16 experts", "ep=3")),
        (LLAMA, {"cp": 3}, 0, ("256 positions", "6 equal")),
        (LLAMA, {"tp": 8}, 0, ("4 key heads", "tp=8")),
        (EXPERTS, {"dp": 2, "ep": 2}, 0, ("18", "2 x ep=2", "32")),
        (LLAMA, {"pp": 2}, 3, ("zero=3", "pp=2", "micro-batch")),
        (LLAMA, {"dp": 2}, 4, ("zero=4",)),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_sentence(spec, sizes, zero, told):
    with raises(ValueError, *told):
        predict_step(
            spec, grid_of(**sizes), micro_batches=8, batch=18 if "dp" in sizes and not zero else None, zero=zero
        )


def test_a_model_without_sequences_has_no_context_parallel():
    spec = spec_of(models.build("mlp"), torch.randn(2, 64))
    with raises(ValueError, "cp=2", "positions"):
        predict_step(spec, grid_of(cp=2))
