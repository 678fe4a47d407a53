"""What sliders explore: right numbers, a sentence for what cannot be, and an answer before the hand has moved on."""

import statistics
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from hpdl_lab import lab, schedules
from hpdl_lab.collectives import table
from hpdl_lab.parallel.scripts import price
from hpdl_lab.plots import live
from hpdl_lab.verbs import explore_inference, explorers
from hpdl_lab.verbs.adjustable import Control, doublings, logarithmic
from hpdl_lab.verbs.explore import Explored
from hpdl_lab.verbs.explorers import EXPLORERS
from hpdl_lab.verbs.result import draw_picture

NO_CHANCE = {("rate", "seed"), ("graph", "seed")}  # of a whole batch, of a ring
NAMES = list(EXPLORERS)


def explored(name, **values):
    return Explored(name, *EXPLORERS[name]).set(**values)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_every_slider_is_answered(name):
    """By a picture and one line, or by a sentence about why not."""
    found = explored(name)
    assert found.picture is not None, "the first thing that is seen"
    first, texts = found.text, set()
    for key, control in found.controls.items():
        before = len(texts)
        for value in control.values[:: max(1, len(control.values) // 5)]:
            found.set(**{key: value})
            texts.add(found.text)
            assert "\n" not in found.text and (found.picture is None) == bool(found.why)
        assert len(texts) > before or (name, key) in NO_CHANCE, f"{key} changes nothing"
        found.set(**{key: control.start})
    assert found.text == first


@pytest.fixture(scope="module")
def plain_picture_s():
    """Seconds of a core for one loss curve of 300 steps, the least that any answer costs."""

    def seconds():
        begin = time.process_time()
        rows = [{"step": step, "loss": 4 - step / 100, "samples_per_s": 100.0} for step in range(300)]
        live.png(draw_picture(live.draw, rows, 300, "training", text="training").figure, 1)
        return time.process_time() - begin

    seconds()
    return statistics.median(seconds() for _ in range(9))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_takes_no_longer_than_four_plain_pictures(name, plain_picture_s):
    """From the slider's event to the bytes of the picture; the median over all sliders.

    In seconds of a core, for which this process may wait on a busy machine; tests/browser measures those of a clock.
    """
    found, times = explored(name), []
    for key, control in found.controls.items():
        for value in control.values[:: max(1, len(control.values) // 4)]:
            begin = time.process_time()
            if found.set(**{key: value}).picture is not None:
                live.png(found.picture.figure, 1)
            times.append(time.process_time() - begin)
        found.set(**{key: control.start})
    assert statistics.median(times) < 4 * plain_picture_s


def test_sliders_are_checked_and_wrong_ones_named():
    for start, says in (
        ({"rates": 1}, "'rates': rate, batch, seed"),
        ({"rate": 3}, "3: a number from 0.005 to 2"),
        ({"rate": "much"}, "'much'"),
    ):
        with pytest.raises(ValueError, match=says):
            lab.explore("rate", **start)
    with pytest.raises(ValueError, match="A100, H100"):
        lab.explore("days", hardware="VAX")
    with pytest.raises(ValueError, match="tensor marks no guess"):
        lab.explore("tensor", prediction=3)
    assert lab.explore("share", prediction="many").text == "'many' is no prediction for share"
    with pytest.raises(LookupError, match="'rats': days"):
        lab.explore("rats")


def test_in_a_terminal_it_is_one_line(capsys):
    found = lab.explore("rate", rate=0.123)
    assert capsys.readouterr().out == found.text + "\n" and 0.123 in found.controls["rate"].values


def test_scales():
    assert logarithmic(0.2, 20, (1, 3)) == (0.3, 1, 3, 10)
    assert doublings(1, 17) == (1, 2, 4, 8, 16)


def test_what_cannot_be_is_a_sentence_and_the_next_value_a_picture():
    def answer(n):
        if n > 1:
            raise ValueError(f"n={n} is too much")
        return EXPLORERS["rate"][1](0.1, 442, 0)

    found = Explored("n", {"n": Control((1, 2), 1)}, answer)
    assert found.set(n=2).text == "n=2 is too much" and found.picture is None
    with pytest.raises(ValueError, match="too much"):
        found.save("never.png")
    assert found.set(n=1).picture is not None and not found.why


# -- what the numbers say ---------------------------------------------------------------------------------------------


def test_days_are_those_of_the_published_training():
    """34 days for GPT-3 on 1,024 A100 at 140 teraFLOP/s each, a quarter of them recomputation. arXiv:2104.04473."""
    share = 140e12 * 6 / 8 / 312e12
    assert f"{34:.0f}" in f"{float(explored('days', share_of_peak=share).text.split(': ')[1].split()[0]):.0f}"


def test_a_small_batch_walks_noisily_and_the_whole_one_does_not():
    noisy, smooth = (explored("rate", batch=batch).picture.figure.axes[1].lines[0].get_ydata() for batch in (4, 442))
    assert all(b <= a for a, b in zip(smooth, smooth[1:], strict=False))
    assert sum(b > a for a, b in zip(noisy, noisy[1:], strict=False)) > len(noisy) / 4
    assert "diverges" in explored("rate", rate=2).text


@pytest.mark.parametrize("k", [1, 4, 64])
def test_gradient_accumulation_sends_more_with_stages_2_and_3(k):
    """In units of all parameters, 2 bytes each: an all-reduce is 2 of them."""
    unit = 2 * 63 / 64 * explorers._model_spec("7B", explorers.MIXED).parameters
    sent = [explorers.sent_in_step("7B", explorers.MIXED, stage, 64, 1, 1, k) / unit for stage in range(4)]
    assert sent == pytest.approx([2, 2, k + 1, 3 * k])
    megatron = [explorers.sent_in_step("7B", "Megatron: 2 + 4 + 12", stage, 64, 1, 1, k) / unit for stage in range(4)]
    assert megatron == pytest.approx([4, 3, 2 * k + 1, 4 * k]), "gradients of 4 bytes, parameters of 2"
    bars = explored("memory", micro_batches=k).picture.figure.axes[1].patches
    assert [bar.get_height() / unit for bar in bars] == pytest.approx(sent)
    text = explored("memory", micro_batches=k, stage=3).text
    assert f": {k} reduce-scatter" in text and f", {2 * k} all-gathers." in text


# -- as widgets -------------------------------------------------------------------------------------------------------

WIDGETS = """
from hpdl_lab.verbs.explorers import EXPLORERS
from hpdl_lab.verbs.explore import Explored
from hpdl_lab.verbs.widgets import Sliders
from hpdl_lab.lab import explore

panel = Sliders(Explored("rate", *EXPLORERS["rate"]))
before = panel.picture.value, panel.line.value
panel.moved["batch"].value = 8
assert before[0] != panel.picture.value and "mini-batches of 8" in panel.line.value
explored = panel.shown
explored.answer = lambda **values: 1 / 0
panel.moved["batch"].value = 16
assert "ZeroDivisionError" in panel.line.value, "an error of a callback is told where one looks"
def refuse(**values): raise ValueError("that cannot be")
explored.answer = refuse
panel.moved["batch"].value = 32
assert "that cannot be" in panel.line.value and panel.picture.layout.visibility == "hidden"
"""


def test_widgets_follow_and_say_what_is_wrong():
    subprocess.run([sys.executable, "-c", WIDGETS], check=True)


def test_gossip_by_matrices_is_that_of_ranks():
    name, n = "random", 9
    ranks = lab.gossip((name,), n=n, steps=20).errors[name]
    assert explorers.decay(name, n, 0)[1][:21] == pytest.approx(ranks / ranks[0], rel=1e-6)


def test_half_of_the_time_is_latency_at_n_half(monkeypatch):
    monkeypatch.setattr(explorers, "last_ping_pong", lambda: None)
    found = explored("message", alpha=1e-5, bandwidth=1.0, size=10_000)
    assert "10 µs + 10 µs = 20 µs" in found.text and "10 kB" in found.text and "lab.ping_pong()" in found.text
    points = SimpleNamespace(nbytes=[1000, 10_000], seconds=[1.1e-5, 2e-5])
    monkeypatch.setattr(explorers, "last_ping_pong", lambda: points)
    assert "off by 0%" in found.set(alpha=1e-5).text
    assert found.picture.figure.axes[0].lines[1].get_xdata().tolist() == points.nbytes


def test_times_of_algorithms_are_those_of_the_table():
    for name in explorers.SIX:
        cost, options = (
            table.find_algorithm(name).cost,
            {"segments": 4} if name in ("double_tree", "hierarchical") else {},
        )
        (found,) = explorers.all_reduce_seconds(name, 12, np.array([2.0**20]), 1e-6, 1e-9)
        assert found <= cost(12, 2**20, **options).seconds(1e-6, 1e-9) * (1 + 1e-12)
        if not options:
            assert found == pytest.approx(cost(12, 2**20).seconds(1e-6, 1e-9))
    assert ": ring takes" in explored("algorithms", ranks=12, size=2**30).text, "no power of two"
    assert ": halving-doubling takes" in explored("algorithms", ranks=16, size=2**30).text


def test_the_star_is_the_least_of_all_numbers_of_segments():
    axes = explored("segments").picture.figure.axes[1]
    curve, star, now = axes.lines
    assert star.get_ydata()[0] <= min(curve.get_ydata()) and now.get_ydata()[0] > star.get_ydata()[0]


@pytest.mark.parametrize("ratio", [0.2, 1.0, 5.0])
def test_the_last_bucket_ends_when_the_step_does(ratio):
    profile, time_of = explorers.bucketed(5_000_000, 48, ratio)
    step, when = explorers.step_with_buckets(5_000_000, 48, ratio), 0.0
    for sent in profile.messages:
        when = max(when, sent.at) + time_of(sent.nbytes)
    assert when == pytest.approx(step.seconds) and sum(m.nbytes for m in profile.messages) == 48 * (10**8 // 48)
    large, small = (explorers.step_with_buckets(n, 96, 1.0).exposed for n in (10**8, 10**5))
    assert min(large, small) > explorers.step_with_buckets(7_000_000, 96, 1.0).exposed, (
        "neither one bucket nor one per layer"
    )


def test_nvlink_ends_at_the_node():
    inside, outside = (explorers.layer_on(tp, 12288, "nvlink_4") for tp in (8, 16))
    assert inside[0] == pytest.approx(2 * outside[0]) and outside[1] > 5 * inside[1]
    assert inside[2] == 4 * 2 * 7 / 8 * 2048 * 12288 * 2, "four all-reduces of s d numbers of two bytes"
    assert explored("tensor", tp=64).text == "96 heads of 128 cannot be shared by tp=64 ranks: tp must divide them"


@pytest.mark.parametrize("name", explorers.ORDERS)
def test_the_curve_of_bubbles_goes_through_the_schedule_that_is_drawn(name):
    times = schedules.evaluate(schedules.build(name, 4, 32), 1, 3, 1.5, 1.5)
    assert explorers.bubble_of(name, 4, 32, 3.0) == pytest.approx(times.bubble)
    assert f"{times.bubble:.1%}" in explored("pipeline", schedule=name, micro_batches=32, backward=3.0).text
    assert "no multiple" in explored("pipeline", schedule="interleaved", micro_batches=6).text


def test_the_published_step_at_half_of_the_peak():
    found = explored("share")
    assert f"{price(8, 16, 8).seconds:.3g} s, +8% of the 32 s" in found.text
    assert "-" in found.set(share_of_peak=0.6).text.split(" of the 32 s")[0][-4:]


def test_caches_of_published_models_and_what_bytes_alone_allow():
    for model, numbers in (("GPT-2 small", 18_432), ("Llama 3 8B", 65_536), ("DeepSeek-V3", 61 * 576)):
        assert explore_inference.cached(model) == numbers
    text = explored("kv_cache", batch=1, context=1024).text
    assert "131 kB of cache a token, 134 MB for 1 × 1,024, next to 16.1 GB of weights: fits into 1 × 80 GB" in text
    spec, on = explore_inference.SERVED["Llama 3 8B"], explore_inference.GPUS["H100"]
    took = explore_inference.decode_seconds("Llama 3 8B", 1024, 1, "16 bits", "16 bits", "H100", 2)
    assert took == pytest.approx((2 * spec.parameters + 1024 * 131_072) / on.bandwidth / 2)
    deepseek = explore_inference.SERVED["DeepSeek-V3"]
    assert explore_inference.parameters_read(deepseek, 1) == pytest.approx(deepseek.active)
    assert explore_inference.parameters_read(deepseek, 4096) == pytest.approx(deepseek.parameters)
    text = explored("kv_cache", model="GPT-3 175B").text
    assert "does NOT fit into 1 × 80 GB, which has room for 0 sequences" in text


def test_a_draft_pays_if_it_is_cheap_and_often_right():
    assert explore_inference.speed_up(0.8, 4, 0.1) == pytest.approx(3.3616 / 1.4)
    assert explore_inference.speed_up(0.05, 4, 0.5) < 1 < explore_inference.speed_up(0.95, 4, 0.01)
    assert "2.4 times as fast. Best γ: 6" in explored("speculation").text


def test_ranks_that_generate_for_others():
    found = explored("rollouts", every=1)
    alternate = explore_inference.generate_seconds(4, 2048) + explore_inference.update_seconds(4, 2048)
    rate = explore_inference.rollout_rate
    assert rate(4, 1, 2048) == pytest.approx(256 * 2048 / alternate, rel=0.01), "nobody works while others do"
    assert rate(4, 1, 2048) < rate(4, 16, 2048) < 2 * rate(4, 1, 2048)
    assert "staleness on average 7.5, at most 15" in found.set(every=16).text
    waves = explore_inference.generate_seconds(1, 8192) / explore_inference.generate_seconds(5, 8192)
    assert waves == pytest.approx(5), "52 caches of 8,192 tokens fit beside the weights, and 256 do not"
