"""The model of grids: what autograd really keeps, what simulated ranks really take, and which grid is best."""

import functools
import time
from dataclasses import replace

import pytest
import torch

from hpdl_lab import cli, models, schedules
from hpdl_lab.bench import hybrid
from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import Islands, Switch
from hpdl_lab.parallel.grid import memory
from hpdl_lab.parallel.grid import search as grid_search
from hpdl_lab.parallel.grid.machine import MACHINES, Machine, grid_of, message_cost
from hpdl_lab.parallel.grid.measure import bytes_over_axes, grid_steps, measured, spec_of
from hpdl_lab.parallel.grid.memory import SavedBytes, collectives_per_step, memory_of, state_bytes
from hpdl_lab.parallel.grid.model import predict_step
from hpdl_lab.parallel.grid.search import best, best_grid, grids, search_grids
from hpdl_lab.parallel.grid.simulation import simulate_step
from hpdl_lab.parallel.grid.spec import SPECS, gpt, transformer_block
from hpdl_lab.parallel.hybrid.model import cross_entropy_per_answer
from hpdl_lab.parallel.scripts import price
from hpdl_lab.schedules.evaluation import pipeline_time
from tests.wording import raises

CLUSTER = MACHINES["dgx_a100"]
SMALL = gpt("a small gpt", layers=10, width=512, heads=8, vocabulary=4096, positions=256)


@functools.cache
def gpt_of(batch, block, **sizes):
    """A gpt of four layers, which ranks copy, a batch for it, and its Spec."""
    model, tokens = models.build("gpt", layers=4, block=block, **sizes), torch.zeros(batch, block).long()
    return model, tokens, spec_of(model, tokens[:2])


# -- specs and memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_spec_of_a_gpt_is_what_autograd_keeps_and_its_parameters(dtype):
    """The formulas of grid_spec.gpt against the model itself, layer by layer; in numbers, so for any dtype."""
    model = models.build("gpt", vocabulary=18, block=6, layers=2, heads=4, width=16, dtype=dtype)
    read = spec_of(model, torch.zeros(2, 6, dtype=torch.int64))
    formulas = gpt("GPT", 2, 16, 4, 18, 6, read.training)
    assert read == formulas
    assert read.parameters == sum(p.numel() for p in model.parameters())


def test_a_transformer_layer_keeps_34_sbh_without_dropout_masks():
    """Korthikanti et al. 2022, equation 1: sbh (34 + 5 a s / h) bytes; 2 sbh are masks, the last term falls away."""
    s, d = 2048, 12288
    kept = 2 * SPECS["gpt3"].layers[2].saved_on(1, False)  # bytes in 16 bits, b = 1
    assert kept == pytest.approx(32 * s * d, rel=0.003)  # means, deviations and softmax sums come on top
    with_sequence = 2 * SPECS["gpt3"].layers[2].saved_on(8, True)
    assert with_sequence == pytest.approx(4 * s * d + 28 * s * d / 8, rel=0.003)


def test_eager_attention_keeps_34_sbh_and_5_a_s_over_h_more():
    """Korthikanti et al. 2022, table 2: bytes of a layer; selective recomputation drops the weights."""
    s, d, a, t = 2048, 12288, 96, 8
    layer = transformer_block("blocks.0", d, a, s, eager=True)
    rest = 2 * (4 + a) * s  # means, deviations and softmax sums, which they leave out
    assert 2 * layer.saved - rest == s * d * 34 + 5 * a * s * s
    assert 2 * layer.saved_on(t, False) == pytest.approx(s * d * (10 + 24 / t) + 5 * a * s * s / t, rel=0.001)
    gathered = 4 * s * d  # what norms put out, see the docstring
    cut = (s * d * 34 + 5 * a * s * s - gathered) / t
    assert 2 * layer.saved_on(t, True) == pytest.approx(gathered + cut, rel=0.001)
    spec = gpt("a gpt", 8, d, a, 51200, s, "mixed adam", eager=True)
    rows = [memory_of(spec, grid_of(), micro_batches=1, recompute=how)[0] for how in (False, "attention", "blocks")]
    whole, selective, blocks = (row.activations for row in rows)
    assert whole - selective == 8 * 5 * a * s * s
    assert blocks == 2 * 8 * s * d + 2 * max(layer.saved - s * d, spec.layers[-1].saved + spec.layers[-2].saved)


@pytest.mark.parametrize("n", [1, 2, 64])
def test_zero_holds_16_4_12_2_14_and_16_bytes_of_a_parameter(n):
    """Rajbhandari et al. 2020, figure 1, exactly; temporaries apart."""
    spec = gpt("a gpt", 2, 64, 2, 192, 64, "mixed adam")  # whose parameters 64 divides
    for stage, each in enumerate((16, 4 + 12 / n, 2 + 14 / n, 16 / n)):
        held = memory_of(spec, grid_of(dp=n), stage=stage)[0]
        assert sum(held[:3]) == each * spec.parameters == sum(state_bytes(spec.parameters, n, stage))
        assert (held.temporaries > 0) == (n > 1 and stage > 1)
        in_32_bits = memory_of(replace(spec, training="adam"), grid_of(dp=n), stage=stage)[0]
        assert in_32_bits[:3] == state_bytes(spec.parameters, n, stage, mixed=False)


@pytest.mark.parametrize(
    ("recipe", "stage", "whole", "divided"),
    [("mixed adam", 1, 4, 12), ("fsdp2 adam", 3, 0, 16), ("megatron adam", 1, 6, 12), ("adam", 1, 8, 8)],
)
def test_recipes_hold_what_their_authors_say(recipe, stage, whole, divided):
    """Megatron Core, "Distributed Optimizer"; FSDP2: dtypes of parameters, gradients and states counted in torch."""
    spec = gpt("a gpt", 4, 64, 2, 192, 64, recipe)
    plain, held = (memory_of(spec, grid_of(dp=64), stage=n)[0] for n in (0, stage))
    assert sum(plain[:3]) == (whole + divided) * spec.parameters
    assert sum(held[:3]) == (whole + divided / 64) * spec.parameters
    gathered = spec.parameters - 2 * spec.layers[2].parameters  # of four blocks two are whole at once
    assert held.temporaries == (gathered * (2 + 4) if stage == 3 else 0)
    assert plain.temporaries == (2 * spec.parameters if recipe == "fsdp2 adam" else 0), "copies that compute"


@pytest.mark.parametrize("k", [1, 2, 16])
def test_micro_batches_multiply_the_messages_of_stages_2_and_3(k):
    """Counted in torch's FSDP2: 2 k all-gathers and k reduce-scatters of each unit."""
    assert [collectives_per_step(stage, k) for stage in range(4)] == [(1, 1), (1, 1), (1, k), (2 * k, k)]


@pytest.mark.parametrize(("name", "shape"), [("mlp", (4, 64)), ("cnn", (4, 1, 8, 8)), ("vit", (4, 1, 8, 8))])
def test_the_memory_of_a_step_is_measured_as_predicted(name, shape):
    """One rank, one micro-batch: what autograd keeps at most, all layers together, is what memory_of says."""
    model, x = models.build(name), torch.randn(shape)
    spec = spec_of(model, x)
    (row,) = memory_of(spec, grid_of(), micro_batches=1, micro_batch=len(x))
    with SavedBytes([*model.parameters(), x]) as kept:
        loss = cross_entropy_per_answer(model(x), torch.zeros(len(x), dtype=torch.int64))
    assert kept.most == pytest.approx(row.activations, rel=0.01, abs=64 * len(x))  # integers, such as targets
    assert row.parameters == row.gradients == row.optimizer == 4 * sum(p.numel() for p in model.parameters())
    assert loss.item() > 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble_h1", "dualpipe", "gems_master"])
def test_what_stages_keep_is_measured_as_predicted(schedule, recompute):
    """Both ranks of a pipeline, the most that autograd keeps in a step: within 4%, as the loss keeps a little more."""
    (model, tokens, spec), grid = gpt_of(vocabulary=12, block=16, heads=2, width=32, batch=8), grid_of(pp=2)
    options = {"schedule": schedule, "micro_batches": 4, "recompute": recompute}
    costs = [layer.flops for layer in spec.layers]
    # in threads, each of which autograd tells what it keeps
    taken = sim.run(2, grid_steps, model, grid, tokens, tokens, options | {"costs": costs}, 1, threads=True)
    for row, rank in zip(memory_of(spec, grid, schedule, 4, 2, recompute), taken, strict=True):
        inputs = recompute * 6 * 2 * 16 * 32 * 4  # which autograd does not keep: of 6 micro-batches, at most, in flight
        assert row.activations == pytest.approx(rank.held.activations, rel=0.04, abs=inputs)


def test_sharing_divides_what_it_should():
    whole = memory_of(SMALL, grid_of(), micro_batches=4)[0]
    for axis in ("pp", "tp"):
        part = memory_of(SMALL, grid_of(**{axis: 4}), micro_batches=4)
        assert sum(row.parameters for row in part) >= whole.parameters if axis == "pp" else True
        assert max(row.parameters for row in part) < 0.4 * whole.parameters
    assert memory_of(SMALL, grid_of(dp=4), micro_batches=4)[0] == whole
    tensor, sequence = (memory_of(SMALL, grid_of(tp=4), sequence=option)[0].activations for option in (False, True))
    assert sequence < tensor < memory_of(SMALL, grid_of())[0].activations
    assert (
        memory_of(SMALL, grid_of(), recompute=True)[0].activations < memory_of(SMALL, grid_of())[0].activations * 1.01
    )


def in_flight(assignment):
    """Per rank the most micro-batches, over its stages, whose activations it holds."""
    return [max(sum(live for _, live, _ in moment) for moment in rank) for rank in assignment.fullest]


@pytest.mark.parametrize(
    ("schedule", "wanted"), [("gpipe", [16] * 4), ("1f1b", [4, 3, 2, 1]), ("gems_master", [1] * 4)]
)
def test_in_flight_micro_batches_are_those_of_the_schedule(schedule, wanted):
    assert in_flight(memory.assign_stages(schedule, 4, 16)) == wanted


@pytest.mark.parametrize("name", schedules.CATALOG)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_in_flight_micro_batches_of_long_steps_are_those_of_evaluate(name, ranks):
    ranks += name == "dualpipe" and ranks % 2
    m = 2 if name == "gems_mast" else 24
    peak = schedules.evaluate(schedules.build(name, ranks, m)).peak
    assert in_flight(memory.assign_stages(name, ranks, m)) == list(peak)


def test_recomputed_graphs_wait_for_their_weight_gradients():
    """Zero bubble does the backward in two halves: between them the whole graph is there, whatever was recomputed."""
    whole, again = (memory_of(SMALL, grid_of(pp=2), "zero_bubble_h1", 8, recompute=option) for option in (False, True))
    once = memory_of(SMALL, grid_of(pp=2), "1f1b", 8, recompute=True)
    fullest = memory.assign_stages("zero_bubble_h1", 2, 8).fullest
    assert [sum(graphs for _, _, graphs in rank[0]) for rank in fullest] == [1, 2]
    assert once[1].activations < again[1].activations <= 1.05 * whole[1].activations


# -- times -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schedules.CATALOG)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 4), (2, 6), (4, 8), (4, 64), (8, 48), (16, 96)])
def test_the_time_of_a_pipeline_is_that_of_its_schedule(name, ranks, micro_batches):
    """Exact for few micro-batches and for equal stages; within 2% where a long step is told from a short one."""
    micro_batches = 2 if name == "gems_mast" else micro_batches
    ranks += name == "dualpipe" and ranks % 2
    plan = schedules.build(name, ranks, micro_batches)
    for uneven in (0.0, 0.1):
        forward = [1 + uneven * (stage * 7 % 5) / 5 for stage in range(plan.stages)]
        costs = [(f, 2 * f, f, f) for f in forward]
        backward = [2 * f for f in forward]
        whole = schedules.evaluate(plan, forward, backward, forward, forward, transfer=0.05)
        found = pipeline_time(name, ranks, micro_batches, costs, 0.05).seconds
        few = micro_batches <= 2 * ranks
        assert found == pytest.approx(whole.makespan, rel=1e-9 if few else 0.02)


@pytest.mark.parametrize("machine", ["dgx_a100", "laptop"])
@pytest.mark.parametrize(
    ("sizes", "schedule", "recompute"),
    [
        ((1, 1, 2), "1f1b", False),
        ((2, 1, 1), "1f1b", False),
        ((1, 4, 1), "gpipe", False),
        ((2, 2, 1), "interleaved", True),
        ((1, 2, 2), "zero_bubble_h1", True),
        ((2, 4, 1), "gems_master", False),
        ((2, 2, 2), "1f1b", False),
        ((2, 4, 2), "1f1b", True),
    ],
    ids=str,
)
def test_the_seconds_predicted_are_those_of_all_messages(machine, sizes, schedule, recompute):
    machine = Machine(machine, MACHINES[machine].network, memory=1)  # ranks that share no cores
    grid = grid_of(*sizes)
    options = {"machine": machine, "batch": 16 * sizes[0]}
    predicted = predict_step(SMALL, grid, schedule, 8, recompute, **options)
    simulated = simulate_step(SMALL, grid, schedule, 8, recompute, **options)
    assert predicted.seconds == pytest.approx(simulated, rel=0.04)


@pytest.mark.parametrize(
    ("sizes", "schedule", "recompute", "width", "near"),
    [
        ((8, 1, 1), "gpipe", True, 512, 0.01),  # layers of unequal size, one after the other, and a tied table
        ((1, 3, 1), "gems_master", True, 64, 0.04),  # a sum per layer over both replicas: latencies
        ((1, 3, 1), "gems_master", False, 512, 0.01),
    ],
)
def test_the_sums_of_gradients_are_predicted_layer_by_layer(sizes, schedule, recompute, width, near):
    spec, dp = gpt("a gpt", 7, width, 8, 50_000 if sizes[0] == 8 else 100, 64), sizes[0]
    m = 8 if dp == 8 else 24
    row, taken = (
        f(spec, grid_of(*sizes), schedule, m, recompute, machine=CLUSTER, batch=dp * m * 2)
        for f in (predict_step, simulate_step)
    )
    assert row.seconds == pytest.approx(taken, rel=near)


@pytest.mark.parametrize(
    ("sizes", "schedule", "sequence"),
    [
        ((2, 2, 1), "1f1b", False),  # the table is summed over four ranks, all else over two
        ((1, 2, 2), "1f1b", True),  # norms are summed over tp, too
        ((2, 1, 2), "1f1b", True),
        ((2, 2, 2), "1f1b", True),
        ((1, 2, 2), "gems_master", True),
    ],
)
def test_the_bytes_of_gradients_are_those_that_ranks_send(sizes, schedule, sequence):
    (model, tokens, spec), grid = gpt_of(vocabulary=16, block=8, heads=4, width=16, batch=16), grid_of(*sizes)
    options = {"schedule": schedule, "micro_batches": 2, "sequence": sequence, "all_reduce": ring.all_reduce}
    options["costs"] = [layer.flops for layer in spec.layers]
    taken = sim.run(grid.size, grid_steps, model, grid, tokens, tokens, options, 1, threads=grid["tp"] > 1)
    row = predict_step(spec, grid, schedule, 2, sequence=sequence, batch=16)
    assert bytes_over_axes(taken, grid)["dp"] == max(table["dp"] + table["shared"] for table in row.sent)


def test_the_parts_of_a_prediction_add_up():
    row = predict_step(SMALL, grid_of(2, 2, 2), micro_batches=8, machine=CLUSTER, batch=64)
    assert sum(row.parts.values()) == pytest.approx(row.seconds)
    assert 0 < row.bubble < 0.5
    alone = predict_step(SMALL, grid_of(), micro_batches=8, machine=CLUSTER, batch=64)
    assert alone.bubble == pytest.approx(0) and set(alone.links.values()) == {0}
    assert alone.seconds == pytest.approx(64 * SMALL.flops / CLUSTER.network.flops_per_s)


def test_ranks_that_share_cores_compute_no_faster_than_the_cores():
    row = predict_step(SMALL, grid_of(dp=4), micro_batches=2, batch=8)  # a laptop of two cores
    assert row.seconds >= 8 * SMALL.flops / MACHINES["laptop"].network.flops_per_s / 2 * 0.999


def test_messages_cost_what_their_way_costs():
    inside, between = (
        message_cost(CLUSTER.network, grid_of(4, 1, 8), "tp"),
        message_cost(CLUSTER.network, grid_of(4, 1, 8), "dp"),
    )
    assert inside == (0.6e-6, pytest.approx(1 / 300e9)) and between == (2.7e-6, pytest.approx(1 / 25e9))
    few = Islands(8, "nvlink_3", "infiniband_hdr", nics=2)  # four ranks share an adapter
    assert message_cost(few, grid_of(4, 1, 8), "dp")[1] == pytest.approx(4 / 25e9)
    assert message_cost(Switch(), grid_of(2, 1, 1), "tp") == (0.0, 0.0)


# -- 1,024 ranks -------------------------------------------------------------------------------------------------------


def test_gpt3_on_1024_ranks_is_near_what_was_published():
    """NVIDIA, Megatron-LM, README.md, "GPT-3 Example": dp=8, tp=8, pp=16, batch 1536: 32 s, 138 teraFLOP/s per GPU."""
    spec, grid = SPECS["gpt3"], grid_of(8, 16, 8)
    assert spec.parameters == pytest.approx(174.6e9, rel=1e-3)
    row = predict_step(spec, grid, "1f1b", 192, recompute=True, machine=CLUSTER, batch=1536)
    assert row.seconds == pytest.approx(32, rel=0.1)
    assert row.fits and row.memory.total < 80e9
    flops = 1536 * spec.flops * 4 / 3 / 1024 / row.seconds  # recomputed ones count there
    assert flops == pytest.approx(138e12, rel=0.1)
    assert not predict_step(spec, grid, "gpipe", 192, machine=CLUSTER, batch=1536).fits


def test_1024_ranks_are_simulated():
    """A sixth of GPT-3's blocks and 2 of its 192 micro-batches; hpdl bench hybrid takes them all, and 40 s."""
    spec, grid = gpt("a sixth of GPT-3", 16, 12288, 96, 51200, 2048, "mixed adam"), grid_of(8, 16, 8)
    begin = time.process_time()
    found = simulate_step(spec, grid, "1f1b", 2, recompute=True, machine=CLUSTER, batch=16)
    assert time.process_time() - begin < 30
    predicted = predict_step(spec, grid, "1f1b", 2, recompute=True, machine=CLUSTER, batch=16)
    assert found == pytest.approx(predicted.seconds, rel=0.02)


def test_bench_hybrid_puts_published_figures_beside_ours(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(hybrid, "simulate_step", lambda *_, **__: 34.5)
    assert cli.main(["bench", "hybrid", "--markdown", str(tmp_path / "hybrid.md")]) == 0
    written = (tmp_path / "hybrid.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")] for line in written.splitlines()]
    rows = {line[1]: line[2:6] for line in cells if len(line) > 6}
    assert rows["s per step"][:3] == ["34.4", "34.5", "32"] and rows["s per step"][3].startswith("NVIDIA, Megatron-LM")
    assert "arXiv:2104.04473: (p - 1) / m of the ideal time" in written and "arXiv:1910.02054: 16 bytes" in written
    assert rows["MB kept of a block, one sequence"][:3] == ["806", "", "805"]
    assert "1,024 ranks simulated in" in capsys.readouterr().out


def test_predict_answers_in_milliseconds_and_search_in_a_second_or_two():
    """To the next order of magnitude, so that it holds on any machine."""
    spec = SPECS["gpt3"]
    begin = time.process_time()
    rows = search_grids(spec, 1024, machine=CLUSTER, batch=1536)
    assert time.process_time() - begin < 20
    begin = time.process_time()
    for _ in range(10):
        predict_step(spec, grid_of(8, 16, 8), "1f1b", 192, True, machine=CLUSTER, batch=1536)
    assert time.process_time() - begin < 1
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    assert best(rows).grid["tp"] == 8 and best(rows).fits  # as Megatron-LM is run: tp inside the node


# -- search ------------------------------------------------------------------------------------------------------------


class Priced:
    """seconds and nbytes of a grid."""

    def __init__(self, seconds, nbytes):
        self.seconds, self.nbytes = seconds, nbytes


def test_best_grid_is_the_fastest_that_fits():
    def price(dp, pp, tp):
        if tp == 3:
            raise ValueError("3 ranks cannot share 4 heads")
        return Priced(seconds=dp + 2 * pp + 3 * tp, nbytes=1000 // (pp * tp))

    assert best_grid(6, price, 1000) == (3, 2, 1)  # 10 s; (6, 1, 1) takes 11, (2, 3, 1) also 11
    assert best_grid(6, price, 400) == (2, 3, 1)
    assert best_grid(6, price, 334) == (2, 3, 1)
    with raises(ValueError, "6 ranks", "10 bytes", "166"):
        best_grid(6, price, 10)
    assert best_grid(4, lambda *grid: Priced(1.0, grid[0]), 10) == (1, 4, 1)  # equally fast: the least bytes
    assert sorted(grids(12)) == sorted(
        {(d, p, t) for d in range(13) for p in range(13) for t in range(13) if d * p * t == 12}
    )


def test_search_finds_what_best_grid_finds():
    rows = search_grids(SMALL, 16, machine=CLUSTER, batch=64, micro_batch=1, recompute=(False,))
    limit = sorted(row.nbytes for row in rows)[len(rows) // 2]
    rows = search_grids(SMALL, 16, limit, CLUSTER, 64, micro_batch=1, recompute=(False,))

    def priced(dp, pp, tp):
        count = grid_search.micro_batches(64, dp, 1)
        return predict_step(SMALL, grid_of(dp, pp, tp), "1f1b", count, machine=CLUSTER, batch=64)

    chosen = best(rows).grid
    assert best_grid(16, priced, limit) == (chosen["dp"], chosen["pp"], chosen["tp"])
    with raises(ValueError, "1 bytes"):
        best(search_grids(SMALL, 16, 1, CLUSTER, 64))


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "options", "told"),
    [
        ((1, 1, 3), {}, ("8 heads", "tp=3")),
        ((1, 32, 1), {}, ("14 layers", "32 stages")),
        ((3, 1, 1), {"batch": 16}, ("16", "dp=3", "8 micro-batches")),
        ((2, 1, 1), {"batch": 8}, ("2", "8", "=", "16")),
        ((1, 2, 1), {"schedule": "fast"}, ("'fast'",)),
        ((1, 2, 1), {"schedule": "gems_mast"}, ("one micro-batch",)),
        ((1, 3, 1), {"schedule": "interleaved"}, ("no multiple",)),
    ],
    ids=str,
)
def test_grids_that_cannot_be_are_refused_in_a_sentence(sizes, options, told):
    with raises(ValueError, *told):
        predict_step(SMALL, grid_of(*sizes), **options)
    with raises(ValueError, *told):
        simulate_step(SMALL, grid_of(*sizes), **options)


def test_a_machine_is_measured():
    """On one real rank: arithmetic takes time, messages none."""

    def time_it(comm):
        model = models.build("mlp")
        return measured(comm, model, torch.randn(8, 64), torch.zeros(8, dtype=torch.int64))

    one, two = sim.run(1, time_it)[0], sim.run(2, time_it)[1]
    assert one.network.beta == 0 and 1e6 < one.network.flops_per_s < 1e13
    assert two.network.flops_per_s > 1e6


def test_the_price_of_a_step_says_what_share_of_the_peak_it_assumes():
    half = price(8, 16, 8).seconds
    assert price(8, 16, 8, of_peak=0.5).seconds == half
    assert price(8, 16, 8, of_peak=0.4).seconds == pytest.approx(half / 0.8, rel=0.05)  # nearly all of it is arithmetic
    with raises(ValueError, "of_peak=0", "1"):
        price(8, 16, 8, of_peak=0)
