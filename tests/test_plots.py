"""Plots: pure functions of rows and events, readable, drawn in place, and without side effects on matplotlib."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.text import Text

from hpdl_lab import lab
from hpdl_lab.checks.lessons import lesson_13_serving
from hpdl_lab.collectives import cost
from hpdl_lab.collectives import ring as ring_collective
from hpdl_lab.collectives.dataflow import of_algorithm
from hpdl_lab.collectives.table import find_algorithm
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import FatTree, Islands, Ring
from hpdl_lab.measure import Measured
from hpdl_lab.mesh import Grid
from hpdl_lab.optim import gradient_descent
from hpdl_lab.parallel import gossip
from hpdl_lab.parallel.data_parallel import DataParallel
from hpdl_lab.parallel.scaffe import SCaffe
from hpdl_lab.plots import (
    collective,
    colors,
    compare,
    decode,
    graph,
    landscape,
    live,
    measure,
    pages,
    race,
    scaling,
    serving,
    slots,
    style,
    tensor,
    timeline,
)
from hpdl_lab.trace import Event, bytes_sent
from hpdl_lab.verbs.compare import Compared
from hpdl_lab.verbs.scaling import fits_of, with_speedups

SIZES = (4, 1024, 2**14, 2**17, 2**20, 2**22)
NAMES = ("your all_reduce", "compiled ring", "shared memory", "MPI", "gloo")


def bench_rows(names=NAMES, sizes=SIZES, ranks=4, cores=2):
    rows = []
    for i, (name, size) in enumerate(itertools.product(names, sizes)):
        t = 20 + 10 * (i % 5) + size / 1e3
        busbw = 1.5 * size / t / 1e3
        rows.append({"name": name, "size": size, "time_us": t, "p25_us": 0.9 * t, "p75_us": 1.2 * t})
        rows[-1] |= {"busbw_GBps": busbw, "ranks": ranks, "cores": cores}
    return rows


def train_rows(n):
    return [{"step": i, "loss": 2.3 * 0.98**i, "samples_per_s": 30_000 + i} for i in range(n)]


def scaling_rows(kinds=("strong", "weak"), cores=2, ranks=(1, 2, 4), measured=True):
    """Points as lab.scaling has them; `cores` 0: one for each rank."""
    rows = [
        {"kind": k, "ranks": p, "cores": cores or p, "rate": 1e4 * p**0.9, "p25": 0.9e4 * p**0.9, "p75": 1.1e4 * p**0.9}
        | {"exposed": 0.12, "overlap": 0.5, "imbalance": 1.07, "how": "messages" if p < 100 else "schedule"}
        | ({"simulated": 1.04e4 * p**0.9} if measured else {})
        for k in kinds
        for p in ranks
    ]
    return with_speedups(rows)


def scaling_figure(most, engines=(1, 2, 4), cores=2):
    """The whole figure: everything that can be in it, up to `most` ranks."""
    far = [p for p in (1, 2, 4, 8, 16, 64, 256, 1024) if p <= most]
    rows = scaling_rows(ranks=[p for p in engines if p <= most], cores=cores)
    simulated = scaling_rows(ranks=far, cores=0, measured=False)
    guess = {2: 1.9, most: 0.4 * most}
    fits = fits_of(rows, simulated)
    title = "Scaling of a training step: DataParallelOverlapped(all_reduce=all_reduce)"
    foot = "Simulated: a core per rank; messages as between 2 engines: α = 45 µs, 1/β = 1.23 GB/s. " * 2
    told = rows, simulated, simulated, guess, fits, title, foot
    return filled(scaling.draw, *told, height=scaling.HEIGHT)


def ring_events(p=4, n=1000):
    return sim.run(p, ring_collective.all_reduce, np.ones(n, np.float32)).events


def busy_events():
    ops = ("forward", "backward", "add gradients", "all_reduce", "barrier", "send", "recv")
    return [Event(r, i, op, 777_000 * i, 777_000 * i + 765_432, 1) for r in range(4) for i, op in enumerate(ops)]


@pytest.fixture(scope="module")
def bowl():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 2)) * (1.5, 0.8)
    y = x @ (1.0, -2.0)
    return landscape.Bowl(lambda w: gradient_descent.loss(w, x, y), np.array((1.0, -2.0)), 3.0), x, y


def paths(bowl, shares, steps=20):
    _, x, y = bowl
    top = gradient_descent.largest_stable_rate(x)
    return {s * top: np.array(list(gradient_descent.descend(x, y, s * top, steps))) for s in shares}


def served_rows(done=24):
    """Four rates, of which the last has `done` requests of 24."""
    times = {"first_s": 2e-3, "first_p95_s": 9e-3, "between_s": 1e-3, "between_p95_s": 1.4e-3}
    rows = [{"rate": 20.0 * i, "throughput": 430.0 * i, "requests": 24, "done": 24} for i in (1, 2, 3, 4)]
    rows[-1]["done"] = done
    return [row | times | {"ranks": 4, "cores": 2 + 2 * (i % 2)} for i, row in enumerate(rows)]


def compared_rows():
    """Twelve strategies, three of which are as good as each other."""
    return [
        Compared(
            f"way {i}", 1e6 * (1 + i % 4) ** 2, [2.3 / (1 + 0.1 * step * (1 + i / 9)) for step in range(50)], reached
        )
        for i, reached in enumerate((0.925, 0.925, 0.925, *(0.8 + 0.01 * i for i in range(9))))
    ]


def filled(draw, *args, height=style.HEIGHT, **kwargs):
    figure = style.new_figure(height=height)
    with style.style_context():
        draw(figure, *args, **kwargs)
    return figure


def one_step(name, p, i):
    flow = of_algorithm(find_algorithm(name), p)
    return filled(collective.draw_step, flow, i, height=collective.step_height(flow))


def tensor_rows(cores):
    row = {"ranks": 4, "cores": cores, "seconds": 2e-2, "p25": 1e-2, "p75": 3e-2, "model_seconds": 1.1e-2}
    row |= {"forward": 786_432, "backward": 786_432, "weights": 2_100_000, "kept": 5_800_000}
    row |= {"model_forward": 786_432, "model_backward": 786_432}
    names = {"whole": "whole on every rank", "pair": "columns, then rows", "sequence": "sequence parallel"}
    return [row | {"way": way, "name": name} for way, name in names.items()]


def texts_of(figure):
    return [t.get_text() for t in figure.findobj(Text) if t.get_text() and t.get_visible()]


def drawn_texts(figure):
    """Every text that is really drawn: tick labels outside the limits exist, too, and are not."""
    texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for ax in figure.axes:
        texts += [*ax.texts, ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label] if ax.axison else []
        for axis in (ax.xaxis, ax.yaxis) if ax.axison else ():
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            texts += [tick.label1 for tick in ticks if low <= tick.get_loc() <= high]
    return [t for t in texts if t.get_text().strip() and t.get_visible()]


def assert_readable(figure):
    """Every text is on the page, and no two of them cover each other."""
    figure.draw_without_rendering()
    boxes = {text: text.get_window_extent() for text in drawn_texts(figure)}
    for text, box in boxes.items():
        inside = -1 < box.x0 and box.x1 < figure.bbox.x1 + 1 and -1 < box.y0 and box.y1 < figure.bbox.y1 + 1
        assert inside, f"{text.get_text()!r} leaves the page: {box}"
    x0, y0, x1, y1 = np.array([box.extents for box in boxes.values()]).reshape(-1, 4).T
    width = np.minimum.outer(x1, x1) - np.maximum.outer(x0, x0)
    height = np.minimum.outer(y1, y1) - np.maximum.outer(y0, y0)
    texts = [text.get_text() for text in boxes]
    covered = [(texts[a], texts[b]) for a, b in np.argwhere(np.triu((width >= 3) & (height >= 4), 1))]
    assert not covered, f"texts that cover each other: {covered}"


PAGES = [("request 0", [0, 1, 2], 19), ("request 1", [0, 1, 5, 6], 32), ("request 2", [0, 7], 9)]


def token_times():
    """As of inference.decode.compare_decode_steps."""
    return {
        how: {s: Measured((t, 1.1 * t, 1.3 * t)) for s in (1, 16, 1024) for t in [1e-4 + each * s]}
        for how, each in (("without a cache", 4e-5), ("yours", 2e-7))
    }


HOURS = {"your plan": dict.fromkeys(race.PARTS, 9e3), "reference": {"compute": 1e5}}
CURVES = [("reference", [1.0, 2.0, 3.0], [4.0, 3.0, 2.0]), ("your plan", [1.0, 8.0], [4.0, 1.9])]
FIGURES = {
    "measure": lambda b: filled(
        measure.draw,
        bench_rows(),
        NAMES[0],
        1.5,
        [
            measure.Reference(name, {n: cost.all_reduce(4, n).seconds(1e-5, beta) for n in SIZES})
            for name, beta in (("no contention", 1e-9), ("ring model", 4e-9))
        ],
        measure.Reference("your prediction", {4: 2e-5, 2**22: 5e-3}),
        "all-reduce on 4 engines",
        "Model from ping-pong: α = 12 µs per message, 1/β = 3.0 GB/s.",
    ),
    "measure, one point": lambda b: filled(measure.draw, bench_rows(NAMES[:1], (4,)), NAMES[0], 1.5),
    "measure, nothing yet": lambda b: filled(measure.draw, [], NAMES[0], 1.5),
    "loss": lambda b: filled(live.draw, train_rows(300), 300, "Digits on 4 engines: 98.1% of the images read"),
    "loss, nothing yet": lambda b: filled(live.draw, [], 300, "Digits on 4 engines"),
    "loss, one step": lambda b: filled(live.draw, train_rows(1), 1),
    "timeline": lambda b: filled(timeline.draw, ring_events(), "Timeline: 48 events of 4 ranks"),
    "timeline, many operations": lambda b: filled(timeline.draw, busy_events(), "Timeline"),
    "timeline, 16 ranks": lambda b: filled(timeline.draw, ring_events(16), "Timeline"),
    "scaling, 2 ranks": lambda b: scaling_figure(2),
    "scaling, 1,024 ranks": lambda b: scaling_figure(1024),
    "scaling, 64 cores": lambda b: scaling_figure(1024, (1, 2, 4, 8, 16, 64), 64),
    "scaling, one kind": lambda b: filled(scaling.draw, scaling_rows(("strong",)), height=scaling.HEIGHT),
    "scaling, speedup": lambda b: filled(
        scaling.draw,
        scaling_rows(("weak",)),
        scaling_rows(("weak",), 0, (1, 2, 64, 1024)),
        (),
        {2: 1.9, 1024: 500},
        kind="weak",
        height=scaling.HEIGHT,
    ),
    "scaling, one point": lambda b: filled(scaling.draw, scaling_rows(("weak",), ranks=(1,)), height=scaling.HEIGHT),
    "scaling, nothing yet": lambda b: filled(scaling.draw, []),
    "serving": lambda b: filled(serving.draw, served_rows(), [(900.0, 1e-3), (1600.0, 2e-3)], 2500.0, "gpt", "virtual"),
    "serving, under way": lambda b: filled(serving.draw, served_rows(done=5), title="gpt on 4 engines, 8 slots"),
    "serving, nothing yet": lambda b: filled(serving.draw, [], title="gpt on 4 engines, 8 slots"),
    "steps of a function": lambda b: lab.show(ring_collective.all_reduce, ranks=3).figure,
    "steps of 4": lambda b: lab.show("double_tree", ranks=4).figure,
    "steps of 8": lambda b: lab.show("halving_doubling", ranks=8).figure,
    "steps of 16": lambda b: lab.show("tree", ranks=16, collective="gather").figure,
    "one step of 16": lambda b: one_step("ring", 16, 3),
    "one step of 8": lambda b: one_step("parameter_server", 8, 1),
    "eight collectives": lambda b: lab.show("collectives").figure,
    "eight collectives, 6 ranks": lambda b: lab.show("collectives", ranks=6).figure,
    "graph, wheel": lambda b: lab.show(gossip.graph("wheel", 8)).figure,
    "graph, exponential": lambda b: lab.show(gossip.graph("exponential", 32)).figure,
    "compare": lambda b: filled(compare.draw, compared_rows(), 50, "mlp on digits", {"way 3": 0.8}, height=4.2),
    "compare, nothing yet": lambda b: filled(compare.draw, [], 50, "mlp on digits", {"way 3": 0.8}, height=4.2),
    "compare, one": lambda b: filled(compare.draw, compared_rows()[:1], 50, "mlp on digits", height=4.2),
    "gossip": lambda b: lab.gossip().figure,
    "gossip, exact": lambda b: lab.gossip(("ring", "complete", "one_peer"), n=8, steps=3).figure,
    "gossip, first frame": lambda b: filled(graph.draw_gossip, {"ring": [1.0]}, {"ring": 0.9}, 20, "Gossip"),
    "ping-pong": lambda b: filled(
        measure.draw_ping_pong,
        [{"size": n, "seconds": 2e-6 + 1e-9 * n, "p25": 2e-6, "p75": 3e-6} for n in SIZES],
        (2e-6, 1e-9),
        {4: 1e-5, 2**22: 1e-2},
        "Ping-pong between two of 4 engines",
    ),
    "ping-pong, nothing yet": lambda b: filled(measure.draw_ping_pong, []),
    "traffic": lambda b: filled(graph.draw_traffic, *[graph.traffic_of(ring_events(), 4)] * 2, "Traffic"),
    "traffic of 8": lambda b: filled(graph.draw_traffic, *[np.full((8, 8), 99_999)] * 2, "Traffic"),
    "tensor": lambda b: filled(tensor.draw, tensor_rows(2), 1e6, "x + mlp(norm(x))", height=tensor.HEIGHT),
    "schedule": lambda b: lab.show("interleaved", ranks=8, micro_batches=16, chunks=2).figure,
    "pipeline": lambda b: lab.pipeline("zero_bubble_h1", ranks=4, prediction=0.5).figure,
    "dualpipe": lambda b: lab.dualpipe(6, ranks=2, prediction=0.5).figure,
    "designs": lambda b: lab.designs(SCaffe(), DataParallel()).figure,
    "slots": lambda b: filled(slots.draw, *lesson_13_serving.compared(), height=slots.HEIGHT),
    "pages": lambda b: filled(pages.draw, PAGES, 48, 8, [40, 41], height=pages.height(48)),
    "pages, nobody": lambda b: filled(pages.draw, [], 16, 8, [], height=pages.height(16)),
    "tokens": lambda b: filled(decode.draw, token_times(), [500, 2]),
    "mesh": lambda b: lab.show(Grid(dp=2, pp=2, tp=2)).figure,
    "network": lambda b: lab.show(FatTree(4, 2), ranks=64).figure,
    "network, ring": lambda b: lab.show(Ring(), ranks=16).figure,
    "network, islands": lambda b: lab.show(Islands(4, nics=2), ranks=9).figure,
    "search": lambda b: lab.search("gpt3").figure,
    "picker": lambda b: lab.grid("gpt3").figure(),
    "race, simulated": lambda b: filled(race.draw_simulated, HOURS, dict.fromkeys(HOURS, 3e5), "A race", "Seed 3."),
    "race, here": lambda b: filled(race.draw_here, CURVES, 2.0, 9.0, "The league of this machine", "Seed 3."),
    "copies": lambda b: lab.explore("copies").picture.figure,
    "rollouts": lambda b: lab.explore("rollouts").picture.figure,
    "published": lambda b: lab.explore("published", prediction={"a": 70}).picture.figure,
    "published, experts": lambda b: lab.explore("published", model="DeepSeek-V3", gpus=128).picture.figure,
    "landscape": lambda b: filled(
        landscape.draw, b[0], paths(b, (0.03, 0.5, 0.99, 1.1)), 20, "20 steps", height=landscape.TALL
    ),
    "landscape, digits before and after the point": lambda b: filled(
        landscape.draw,
        landscape.Bowl(b[0].loss, b[0].best, 0.4),
        paths(b, (0.03, 0.5, 0.99, 1.1)),
        20,
        "20 steps",
        height=landscape.TALL,
    ),
    "landscape, first frame": lambda b: filled(
        landscape.draw, b[0], paths(b, (0.03, 0.5), 0), 20, "20 steps", height=landscape.TALL
    ),
    "landscape, overflowing": lambda b: filled(landscape.draw, b[0], paths(b, (1e3,), 200), 200, "200 steps"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_text_is_on_the_page_and_covers_no_other(name, bowl):
    with np.errstate(all="ignore"):
        assert_readable(FIGURES[name](bowl))


def test_importing_plots_chooses_no_backend_and_drawing_leaves_settings_alone():
    code = (
        "import sys, matplotlib; before = matplotlib.rcParams.copy()\n"
        "from hpdl_lab.plots import landscape, live, measure, scaling, style, timeline\n"
        "live.png(style.new_figure()); assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert matplotlib.rcParams.copy() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_more_ranks_than_cores_is_said_in_the_picture():
    for cores, said in ((2, True), (4, False)):
        for figure in (
            filled(measure.draw, bench_rows(cores=cores), NAMES[0], 1.5),
            filled(scaling.draw, scaling_rows(cores=cores), []),
        ):
            assert any(style.OVERSUBSCRIBED in t for t in texts_of(figure)) is said


def test_oversubscribed_points_are_grey():
    for cores, color in ((2, colors.GRAY), (4, colors.BLUE)):
        figure = filled(scaling.draw, scaling_rows(("strong",), cores=cores))
        speedup = next(t for t in figure.axes[0].texts if t.get_text() == "3.48x")
        assert speedup.get_color() == color


def test_what_was_followed_and_what_was_evaluated_look_different():
    figure = scaling_figure(1024)
    faces = {p.get_xdata()[0]: p.get_markerfacecolor() for p in figure.axes[0].lines if p.get_marker() == "s"}
    assert faces[64] == colors.GREEN and faces[256] == faces[1024] == "white"
    texts = texts_of(figure)
    assert {"your guess", "simulated by messages", "by schedule", "fitted law"} <= set(texts)


@pytest.mark.parametrize("cores", [1, 4])
def test_every_bar_of_the_ways_to_cut_a_layer_has_a_color_that_the_legend_names(cores):
    figure = filled(tensor.draw, tensor_rows(cores), height=tensor.HEIGHT)
    (legend,) = figure.legends
    named = {
        patch.get_facecolor(): text.get_text()
        for patch, text in zip(legend.get_patches(), legend.get_texts(), strict=False)
    }
    bars = [{named[bar.get_facecolor()] for bar in ax.patches} for ax in figure.axes]
    assert bars == [{"forward", "backward"}, {"weights", "kept for backward"}, {"time (median)"}]


def test_traffic_counts_what_the_trace_counts():
    events = ring_events(5, 1001)
    matrix = graph.traffic_of(events, 5)
    assert dict(enumerate(matrix.sum(axis=1))) == bytes_sent(events)
    assert all(matrix[r, (r + 1) % 5] == matrix[r].sum() for r in range(5))


def test_traffic_frames_the_cells_that_differ():
    got, expected = np.zeros((2, 2, 2), int)
    got[0, 1] = 8
    figure = filled(graph.draw_traffic, got, expected)
    assert len(figure.axes[0].patches) == 1 and not figure.axes[1].patches


def test_timeline_shows_the_end_of_a_long_run_and_says_so():
    events = [Event(r, i, "send", 1000 * i, 1000 * i + 900, 1 - r, 8) for r in range(2) for i in range(5000)]
    assert len(timeline.last_events(events)) == 2 * timeline.MOST_EVENTS
    assert any("Drawn: the last 150 µs of 5 ms" in t for t in texts_of(filled(timeline.draw, events)))


def test_a_run_with_one_event_per_rank_draws_every_rank():
    """Each rank's barrier begins when that rank comes: the last to come must not be the only one drawn."""
    events = [Event(r, 0, "barrier", 1000 * r, 5000) for r in range(4)]
    assert timeline.last_events(events) == events
    bars = [c for c in filled(timeline.draw, events).axes[0].collections if len(c.get_paths())]
    assert len(bars) == 4


def test_a_rank_that_ended_early_keeps_its_lane():
    long = [Event(0, i, "send", 1000 * i, 1000 * i + 900, 1, 8) for i in range(500)]
    figure = filled(timeline.draw, [*long, Event(1, 0, "recv", 0, 900, 0, 8)])
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]


def test_injected_delays_have_a_color_of_their_own():
    ops = ("injected delay", "send", "recv", "compute", "barrier", "my own span", "another")
    found = timeline.colors_of([Event(0, i, op, i, i + 1) for i, op in enumerate(ops)])
    assert len(set(found.values())) == len(ops) and found["injected delay"] == colors.VERMILION


def test_time_is_counted_once_where_events_overlap():
    events = [Event(0, 0, "send", 0, 10), Event(0, 1, "send", 5, 12), Event(0, 2, "send", 20, 25)]
    assert timeline.busy_ns(events) == 17


@pytest.mark.parametrize("share, word", [(0.01, "too low"), (0.5, "good"), (0.999, "too high"), (1.1, "diverges")])
def test_verdicts_on_learning_rates(share, word, bowl):
    (path,) = paths(bowl, (share,), 40).values()
    assert landscape.outcome(path, bowl[0].above(path)) == word


def test_overflow_is_divergence(bowl):
    with np.errstate(all="ignore"):
        (path,) = paths(bowl, (1e3,), 400).values()
        assert landscape.outcome(path, bowl[0].above(path)) == "diverges"


def test_rates_are_smoothed_as_work_over_time():
    assert live.smoothed([10.0, 30.0]).tolist() == pytest.approx([10, 2 / (1 / 10 + 1 / 30)])
    assert live.smoothed([0.0, 5.0]).tolist() == [0, 5]
    assert live.smoothed([1.0] * 20 + [2.0] * 20)[-1] == pytest.approx(2)
    assert live.smoothed([]).tolist() == []


def test_labels_are_spread_and_stay_inside():
    assert style.spread_labels([5, 5, 5], 10, 0, 100) == [5, 15, 25]
    assert style.spread_labels([95, 96, 97], 10, 0, 100) == [80, 90, 100]
    assert style.spread_labels([], 10, 0, 100) == []
