"""Real weights, decode on several ranks, disaggregation, and load: each against one rank, or on paper."""

import itertools
import statistics
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpdl_lab import cli, lab, models
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import Switch
from hpdl_lab.data.dataset import DataError
from hpdl_lab.inference import load, weights
from hpdl_lab.inference.engine import Engine
from hpdl_lab.inference.sampling import Sampling
from hpdl_lab.inference.stages import part_for_rank, run_interleaved
from hpdl_lab.inference.transfer import generate_disaggregated
from hpdl_lab.mesh import DeviceMesh
from hpdl_lab.plots import live
from tests.wording import raises

# -- weights ----------------------------------------------------------------------------------------------------------


def test_the_stored_weights_load_at_once_and_know_the_book():
    begin = time.perf_counter()
    model, draft = weights.load("moby_dick"), weights.load("moby_dick_draft")
    assert time.perf_counter() - begin < 1 and not model.training
    assert weights.held_out_loss(model) < 1.55 and weights.held_out_loss(draft) < 1.85  # nats per character; blind: 4.4
    assert weights.mean_acceptance(model, draft) > 0.8  # 0.848
    files = [weights.FOLDER / f"{name}.safetensors" for name in weights.TRAINED]
    assert sum(file.stat().st_size for file in files) < 3e6


def test_the_command_writes_files_of_the_same_form(tmp_path, capsys):
    assert cli.main(["weights", "--steps", "1", "--folder", str(tmp_path)]) == 0
    assert "nats per character" in capsys.readouterr().out
    for name in weights.TRAINED:
        new, stored = (load_file(folder / f"{name}.safetensors") for folder in (tmp_path, weights.FOLDER))
        assert {key: (x.shape, x.dtype) for key, x in new.items()} == {
            key: (x.shape, x.dtype) for key, x in stored.items()
        }
        assert weights.held_out_loss(weights.load(tmp_path / f"{name}.safetensors")) < 4.5


def test_weights_of_another_model_are_refused(tmp_path):
    path = weights.FOLDER / "moby_dick_draft.safetensors"
    with raises(ValueError, "weights of another model", "Llama", "only"):
        weights.load_tensors(models.build("llama"), path)
    with raises(ValueError, "another model", "(64,)", "(32,)"):
        fields = weights.TRAINED["moby_dick_draft"].fields | {"width": 32}
        weights.load_tensors(models.build("gpt", vocabulary=81, **fields), path)


def test_files_that_are_no_weights(tmp_path):
    with raises(LookupError, "'moby_duck'", "moby_dick_draft"):
        weights.load("moby_duck")
    with raises(DataError, "hpdl weights"):
        weights.load(tmp_path / "none.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    with raises(DataError, "hpdl weights"):
        weights.load(tmp_path / "broken.safetensors")
    save_file({"x": torch.ones(3)}, tmp_path / "other.safetensors")
    with raises(DataError, "Moby-Dick"):
        weights.load(tmp_path / "other.safetensors")


# -- decode on several ranks ------------------------------------------------------------------------------------------

FIELDS = {"vocabulary": 30, "block": 40, "layers": 3, "heads": 4, "width": 16}
KINDS = {"gpt": FIELDS, "llama": FIELDS | {"kv_heads": 2, "hidden": 24}}
SMALL = {"slots": 3, "page_size": 4, "budget": 8}
NEW = 6


@pytest.fixture(scope="module", params=KINDS)
def asked(request):
    """A model, prompts, and their tokens on one rank."""
    model = models.build(request.param, dtype="float64", **KINDS[request.param]).eval()
    with torch.no_grad():
        for p in model.parameters():
            p *= 2  # so that tokens differ
    prompts = [torch.randint(30, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 17, 1, 9, 12)]
    return model, prompts, Engine(model, **SMALL).generate(prompts, NEW)


def on_mesh(comm, model, prompts, tp, pp):
    part = part_for_rank(DeviceMesh(comm, pp=pp, tp=tp), model)
    return Engine(part, **SMALL).generate(prompts, NEW)


@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 3), (2, 2)])
def test_every_rank_of_a_mesh_has_the_tokens_of_one_rank(asked, tp, pp):
    model, prompts, want = asked
    assert sim.run(tp * pp, on_mesh, model, prompts, tp, pp) == [want] * (tp * pp)


def test_a_step_of_decode_adds_twice_per_layer():
    model, b = models.build("llama", dtype="float64", **KINDS["llama"]), 3

    def steps(comm):
        engine = Engine(part_for_rank(DeviceMesh(comm, tp=2), model), slots=b)
        streams = [engine.submit([1, 2, 3], 4) for _ in range(b)]
        engine.step()
        before = len(comm.trace.events)
        engine.step()
        assert len(streams) == b
        return [e.nbytes for e in comm.trace.events[before:] if e.op == "send"]

    sent = sim.run(2, steps)[1]  # of two ranks: to rank 0, which adds
    assert sent.count(b * 16 * 8) == 2 * 3 + 1  # b d numbers, two for each layer and the embedding
    assert len(sent) == 2 * 3 + 1 + 1  # and its part of the logits


def in_groups(comm, model, prompts, groups):
    stage = part_for_rank(DeviceMesh(comm, pp=comm.size), model)
    engines = [Engine(stage, **SMALL) for _ in range(groups)]
    streams = [engines[i % groups].submit(prompt, NEW) for i, prompt in enumerate(prompts)]
    run_interleaved(stage, engines)
    return [stream.request.output_tokens for stream in streams]


def test_stages_work_for_several_groups_in_turn(asked):
    model, prompts, want = asked
    seconds = {}
    for groups in (1, 3):
        found = sim.run(3, in_groups, model, prompts * groups, groups, network=Switch(alpha=1e-3))
        assert found == [want * groups] * 3
        seconds[groups] = found.seconds
    assert seconds[1] == pytest.approx(17 * 4e-3, rel=1e-3)  # each step: two hops, and logits to two ranks
    assert seconds[3] < 1.6 * seconds[1]  # for three times as many requests


def test_more_stages_than_blocks_are_refused(asked):
    with raises(ValueError, "3 blocks", "4 stages"):
        sim.run(4, on_mesh, *asked[:2], 1, 4)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
def test_prompts_that_another_rank_has_read(asked, sampling):
    model, prompts, _ = asked
    ranks = sim.run(3, generate_disaggregated, model, prompts, NEW, sampling)
    want = Engine(model).generate(prompts, NEW, sampling)
    assert ranks[0] == {} and ranks[1] | ranks[2] == dict(enumerate(want))
    assert sorted(ranks[1]) == [0, 2, 4]
    sent = [event.nbytes for event in ranks.events if event.op == "send"]
    kv_heads = 2 if hasattr(model, "head") else 4
    per_token = 2 * 3 * kv_heads * 4 * 8  # 2 L n_kv d bytes of float64
    assert sorted(sent) == sorted([per_token * len(p) for p in prompts] + [30 * 8] * len(prompts))


def test_one_rank_cannot_read_for_another(asked):
    with raises(ValueError, "2 ranks", "got 1"):
        sim.run(1, generate_disaggregated, *asked[:2], NEW)
    with raises(ValueError, "at least one token"):
        sim.run(2, generate_disaggregated, asked[0], [[1], []], NEW)


# -- load -------------------------------------------------------------------------------------------------------------

LOAD = load.Load(torch.arange(1000) % 30, requests=24, prompts=(2, 8), new=(4, 12))


def test_arrivals_are_a_poisson_process_of_requests_that_do_not_depend_on_the_rate():
    many = replace(LOAD, requests=2000)
    slow, fast = many.arrivals(1.0), many.arrivals(50.0)
    gaps = [b.seconds - a.seconds for a, b in itertools.pairwise(slow)]
    assert statistics.fmean(gaps) == pytest.approx(1.0, rel=0.07)
    assert statistics.stdev(gaps) == pytest.approx(1.0, rel=0.1)  # as the mean, where gaps are exponential
    assert [(a.prompt, a.new) for a in slow] == [(a.prompt, a.new) for a in fast]
    assert fast[-1].seconds == pytest.approx(slow[-1].seconds / 50)
    assert {len(a.prompt) for a in slow} == set(range(2, 9)) and {a.new for a in slow} == set(range(4, 13))


def test_a_step_on_paper():
    model = models.build("llama", **KINDS["llama"])

    def on_paper(comm):
        return load.step_model(comm, part_for_rank(DeviceMesh(comm, tp=2), model))

    step, other = sim.run(2, on_paper, network=Switch(alpha=1e-5, beta=1e-9))
    assert step == other
    assert step.cached == 2 * 3 * 1 * 4 * 4  # 2 L n_kv d b, of one of two key heads
    assert step.messages == 2 * 3 + 2 and step.message == 16 * 4
    assert (step.alpha, step.beta) == pytest.approx((2e-5, 2e-9), rel=0.01)  # gathered, and sent back
    assert step.flops == pytest.approx(1e12) and step.bandwidth == load.SIMULATED_BANDWIDTH
    nbytes = step.weights + 50 * step.cached
    assert step.seconds(2, 50) == pytest.approx(nbytes / 20e9 + 8 * (2e-5 + 2 * 64 * 2e-9), rel=0.01)
    assert step.work(1e6, 0) == pytest.approx(2e6 * step.parameters / 1e12)  # bound by arithmetic


def test_throughput_follows_the_rate_until_slots_run_out():
    model, few = models.build("gpt", **FIELDS), replace(LOAD, requests=12)
    found = sim.run(2, load.serve_rates, model, few, (2000.0, 12000.0, 100000.0), 4)
    line, rows = found.rows[0]["line"], [row for row in found.rows[1:] if row["done"] == 12]
    first, middle, last = rows
    assert first == sim.run(2, load.serve_rates, model, few, (2000.0,), 4).rows[-1]  # the same again
    assert line == found[0].line(few, 4)
    assert {row["tokens"] for row in rows} == {sum(arrival.new for arrival in few.arrivals(1))}
    assert 0 < first["running"] < middle["running"] < last["running"] <= 4
    assert last["idle_slots"] == 4 - last["running"]
    assert first["first_s"] < last["first_s"] and first["throughput"] < middle["throughput"] < last["throughput"]
    most, between = line[-1]
    assert last["throughput"] < 1.05 * most and last["between_s"] == pytest.approx(between, rel=0.15)
    seconds = few.arrivals(2000.0)[-1].seconds
    assert first["seconds"] == pytest.approx(seconds, rel=0.4)  # it ends soon after the last arrival


def test_the_verb_draws_and_says_what_it_measured(monkeypatch):
    drawn = []
    monkeypatch.setattr(live.Live, "update", lambda self, rows, line, *_: drawn.append((len(rows), len(line))))
    small = {"model": models.build("gpt", **FIELDS), "requests": 6, "prompts": (2, 8), "new": (4, 12), "slots": 3}
    result = lab.serve((1000.0, 20000.0), prediction=9000.0, **small)
    assert drawn[0] == (0, 3) and drawn[-1] == (2, 3) and [row["rate"] for row in result.rows] == [1000, 20000]
    assert result.throughput == max(row["throughput"] for row in result.rows)
    assert "1 simulated rank" in repr(result) and "idle slots" in repr(result)
    assert "your guess" in [text.get_text() for text in result.figure.legends[0].texts]


def test_what_cannot_be_served():
    with raises(ValueError, "a rate", "above 0", "-1"):
        lab.serve((-1,))
    with raises(ValueError, "prediction", "'many'"):
        lab.serve(prediction="many")
    with raises(ValueError, "the most of prompts", "at least 9", "3"):
        lab.serve(prompts=(9, 3))
    with raises(ValueError, "longer than the context", "256"):
        lab.serve((1.0,), prompts=(250, 250))
    with raises(ValueError, "4 heads", "3 ranks"):
        lab.serve((1.0,), ranks=3)
    with raises(TypeError, "5.0", "a list"):
        lab.serve(5.0)
    with raises(TypeError, "gpt, llama or deepseek", "ViT"):
        lab.serve((1.0,), model=models.build("vit"))


def test_engines_share_each_layer_and_agree_on_who_has_arrived(cluster, monkeypatch):
    monkeypatch.setattr("hpdl_lab.verbs.cluster._notebook._cluster", cluster)
    small = {"model": models.build("gpt", **FIELDS), "requests": 4, "prompts": (2, 8), "new": (4, 12), "slots": 3}
    result = lab.serve(ranks=2, deadline=30, **small)  # rates come from a model that each rank has measured
    assert len(result.rows) == len(load.SHARES) and {row["done"] for row in result.rows} == {4}
    assert "2 engines" in repr(result) and result.model.overhead > 0 and result.model.alpha > 0
