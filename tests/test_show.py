"""lab.show: whatever is data is drawn, and the picture holds what the data says."""

import functools
import inspect
import json

import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text

from hpdl_lab import lab, models, schedules
from hpdl_lab.collectives import ring
from hpdl_lab.collectives.dataflow import of_algorithm
from hpdl_lab.collectives.table import ALGORITHMS, find_algorithm
from hpdl_lab.comm import sim
from hpdl_lab.comm.inject import Injection
from hpdl_lab.comm.network import FatTree, Islands, Ring, Switch
from hpdl_lab.mesh import Grid
from hpdl_lab.parallel import gossip
from hpdl_lab.plots import collective, colors, live, style
from hpdl_lab.schedules import build
from hpdl_lab.schedules.gpipe import gpipe
from hpdl_lab.schedules.one_f_one_b import interleaved
from hpdl_lab.verbs.dataflow import BASE, dataflow_of, decoded, encoded
from tests.wording import raises


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No engines run, and no run was before."""
    monkeypatch.setattr("hpdl_lab.verbs.show.running", lambda: None)
    monkeypatch.setattr("hpdl_lab.verbs.show.last_run", lambda: None)


@pytest.fixture
def results():
    return sim.run(3, ring.all_reduce, np.ones(10))


def texts_of(figure):
    return [t.get_text() for t in figure.findobj(Text) if t.get_text() and t.get_visible()]


@pytest.mark.parametrize(
    ("x", "options", "error", "says"),
    [
        ("rong", {}, LookupError, ("'rong'",)),
        (12, {}, TypeError, ("something of int",)),
        (None, {}, ValueError, ("no run to draw yet",)),
        ([], {}, ValueError, ("recorded no events",)),
        ("ring", {"ranks": 17}, ValueError, ("2", "16", "17")),
        ("ring", {"ranks": "4"}, ValueError, ("'4'",)),
        ("tree", {"segments": 3}, ValueError, ("tree has no option segments",)),
        ("ring", {"collective": "all"}, LookupError, ("'all'",)),
        (lambda comm, x: x, {"ranks": 3}, ValueError, ("3 ranks",)),
        ("collectives", {"ranks": 7}, ValueError, ("2", "6", "7")),
        ("collectives", {"rank": 4}, TypeError, ("lab.show",)),
        ("gpipe", {"ranks": 64, "micro_batches": 64}, ValueError, ("8,192 actions",)),
        ("1f1b", {"ranks": 10**6, "micro_batches": 8 * 10**6}, ValueError, ("16,000,000,000,000 actions",)),
        ("1f1b", {"forward": [1, 2]}, ValueError, ("2 numbers", "1f1b", "4 stages")),
        (lambda rank, ranks, m: ["forward 1"], {}, ValueError, ("'forward 1'",)),
        (lambda rank, ranks, m: None, {}, TypeError, ("None", "Action")),
        (Grid(dp=10**7), {}, ValueError, ("10,000,000 ranks", "4,096")),
        (gossip.graph("ring", 33), {}, ValueError, ("2", "32", "33")),
        (Switch(), {"ranks": 0}, ValueError, ("1", "0")),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(x, options, error, says):
    with raises(error, *says) as caught:
        lab.show(x, **options)
    assert "\n" not in str(caught.value)


# -- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_and_its_events_are_a_timeline_that_is_also_saved(results, tmp_path):
    path = tmp_path / "trace.json"
    picture = lab.show(results, save=path)
    assert repr(lab.show(results.events)) == "24 events of 3 ranks" and str(path) in repr(picture)
    assert repr(lab.show(f"{path.parent}/*{path.suffix}")) == "24 events of 3 ranks"
    with raises(LookupError, "no file"):
        lab.show("nothing_*.json")
    assert sum(row["ph"] == "X" for row in json.loads(path.read_text())["traceEvents"]) == 24
    (guess,) = (line for line in lab.show(results, prediction=0.5).figure.axes[0].lines if line.get_linestyle() == "--")
    assert guess.get_xdata()[0] / 0.5 in (1, 1e3, 1e6) and guess.axes.get_xlim()[1] > guess.get_xdata()[0]
    picture.save(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_traffic_counts_bytes_and_messages(results):
    # p = 3, 10 elements of 8 bytes: chunks of 4, 3, 3; everything is sent but one chunk, twice
    picture = lab.show(results, "traffic")
    assert repr(picture) == "320 bytes in 12 messages" and picture.data.sum() == 320
    with pytest.raises(ValueError, match="timeline, traffic, horovod"):
        lab.show(results, "traffic jam")
    with pytest.raises(ValueError, match="no activity of Horovod's"):
        lab.show(results, "horovod")


def test_every_rank_has_a_lane_and_one_more_for_its_background():
    def body(comm):
        comm.compute(seconds=1e-3)
        if comm.rank == 0:
            comm.background(lambda beside: beside.compute(seconds=1e-3)).wait()

    ax = lab.show(sim.run(3, body)).figure.axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["rank 0", "background", "rank 1", "rank 2"]


def test_actions_of_a_pipeline_and_injected_delays_have_a_color_of_their_own():
    def body(comm):
        for kind in ("forward 0 stage 1", "forward 1 stage 1"):
            with comm.trace.span(kind):
                comm.compute(seconds=1e-3)
        comm.barrier()

    texts = texts_of(lab.show(sim.run(2, body, inject=Injection(delays={1: 1e-3}))).figure)
    assert "forward 2 ms" in texts and any(t.startswith("injected delay") for t in texts)
    assert not any("stage" in text for text in texts)


# -- collectives ------------------------------------------------------------------------------------------------------


def finished(flow):
    """Whether every cell that the collective asks for holds what it asks for."""
    asked = flow.wanted.any(axis=2)
    return np.array_equal(flow.held[-1][asked], flow.wanted[asked])


def messages(flow):
    """(source, dest, first element, bytes) of all messages, in any order."""
    moves = [m for step in flow.steps for m in step]
    return sorted((m.source, m.dest, m.first, m.nbytes * 96 * flow.p // flow.nbytes) for m in moves)


def options_of(function):
    return {"segments": 2} if "segments" in inspect.signature(function).parameters else {}


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_the_picture_of_a_schedule_is_the_picture_of_what_the_function_does(algorithm):
    for p in (2, 3, 5, 8):
        drawn = of_algorithm(algorithm, p, **options_of(algorithm.steps))
        function = functools.partial(algorithm.function, **options_of(algorithm.function))
        watched = dataflow_of(function, p, algorithm.collective)
        assert finished(drawn) and finished(watched), f"{algorithm} on {p} ranks"
        assert messages(drawn) == messages(watched), f"{algorithm} on {p} ranks"


def test_a_ring_on_four_ranks_move_by_move():
    flow = lab.show("ring", ranks=4).data
    assert len(flow.steps) == 6 and flow.noun == "chunk" and flow.vectors_sent().tolist() == [1.5] * 4
    assert [(m.source, m.dest, flow.chunks(m)[0], m.add) for m in flow.steps[0]] == [
        (r, (r + 1) % 4, (r - 1) % 4, True) for r in range(4)
    ]
    counts = flow.held[3].sum(axis=2)  # after the reduce-scatter rank r owns the sum of chunk r
    assert all((counts[r, c] == 4) == (r == c) for r in range(4) for c in range(4))
    assert not any(m.add for step in flow.steps[3:] for m in step)


def test_the_attendees_own_function_is_drawn_from_its_messages():
    def my_all_reduce(comm, x):
        return ring.all_reduce(comm, x)

    assert repr(lab.show(my_all_reduce, ranks=4)) == "my_all_reduce on 4 ranks: 6 steps, a rank sends 1.5 vectors"


def test_a_sum_that_counts_a_rank_twice_shows_it_and_an_average_is_no_sum():
    def twice(comm, x):
        ring.all_reduce(comm, x)
        x += x

    def average(comm, x):
        ring.all_reduce(comm, x)
        x /= comm.size

    doubled, averaged = (dataflow_of(fn, 3, "all_reduce") for fn in (twice, average))
    assert (doubled.held[-1] == 2).all() and not finished(doubled)
    text, face, color = collective.cell(doubled.held[-1][0, 0], doubled.wanted[0, 0], True)
    assert text == "6" and face != colors.GREEN and color == colors.VERMILION
    assert collective.cell(averaged.held[-1][0, 0], averaged.wanted[0, 0], True)[0] == "?"


def test_messages_from_buffers_of_their_own_are_drawn_with_their_bytes():
    def half_through_a_copy(comm, x):
        if comm.rank == 0:
            comm.send(x[: len(x) // 2].clone(), 1)
        else:
            comm.recv(x[: len(x) // 2], 0)

    flow = dataflow_of(half_through_a_copy, 2, "all_reduce")
    (move,) = flow.steps[0]
    assert move.first == -1 and move.into == 0 and move.nbytes == 96
    assert collective.messages(flow, 1) == ["0 → 1   96 B"]


def test_digits_say_who_contributes():
    held = np.array([[1, 0, 2], [0, 0, 0], [1, 1, 1]])
    assert encoded(held).tolist() == [1 + 2 * BASE**2, 0, 1 + BASE + BASE**2]
    assert np.array_equal(decoded(encoded(held), 3), held)
    assert (decoded([0.5, -1.0, float(BASE) ** 3, np.nan], 3) == -1).all()


def test_steps_play_in_a_notebook_and_those_without_a_place_are_counted(monkeypatch):
    played = []
    monkeypatch.setattr(live, "in_notebook", lambda: True)
    monkeypatch.setattr(live, "publish", lambda *args: None)
    monkeypatch.setattr(
        "hpdl_lab.verbs.show.step_through", lambda draw, frames, alt, height: played.append((frames, alt))
    )
    texts = texts_of(lab.show("ring", ranks=16).figure)
    assert "step 0" in texts and "…  step 28" in texts and any("25 steps are not drawn" in t for t in texts)
    ((frames, alt),) = played
    assert [i for _, i in frames] == list(range(31)) and alt == "ring, steps done"
    flow = of_algorithm(find_algorithm("halving_doubling"), 8)
    figure = style.new_figure(height=collective.step_height(flow))
    collective.draw_step(figure, flow, 2)
    assert "0 → 2   chunks 2-3\n1 → 3   chunks 2-3" in "".join(texts_of(figure))


@pytest.mark.parametrize("p", [2, 4, 6])
def test_the_eight_collectives(p):
    texts = texts_of(lab.show("collectives", ranks=p).figure)
    assert all(name in texts for name in collective.COLLECTIVES)
    assert texts.count("Σ0") == 1 + 1 + p  # reduce, reduce_scatter, all_reduce
    assert texts.count("A0") == 2 * 8 - 3 + (p - 1) * 2  # the root's first chunk, where it is and where it is copied


# -- schedules --------------------------------------------------------------------------------------------------------


def area(collection):
    """Time x rows that a collection of rectangles covers."""
    corners = [path.vertices for path in collection.get_paths()]
    return sum(np.prod(c.max(axis=0) - c.min(axis=0)) for c in corners)


@pytest.mark.parametrize(
    ("x", "options", "makespan", "live"),
    [
        ("1f1b", {}, 33, (4, 3, 2, 1)),
        (gpipe, {}, 33, (8, 8, 8, 8)),
        (interleaved, {}, 28.5, (11, 9, 7, 5)),
        ("zero_bubble_h1", {}, 27, (4, 4, 4, 4)),
        (build("1f1b", 8, 16), {}, 69, (8, 7, 6, 5, 4, 3, 2, 1)),
        ("1f1b", {"forward": 2, "backward": 4}, 66, (4, 3, 2, 1)),
        (lambda rank, ranks, m: map(str, gpipe(rank, ranks, m)), {}, 33, (8, 8, 8, 8)),  # as torch writes them
        ("gems_mast", {"ranks": 3, "micro_batches": 2}, 16, (1, 1, 1)),
        ("dualpipe", {"micro_batches": 10, "pair": 2}, 26, (5, 5, 5, 5)),
    ],
)
def test_bars_are_the_actions_and_hatching_is_the_bubble(x, options, makespan, live):
    picture = lab.show(x, **options)
    figure, times = picture.figure, picture.data
    assert (times.makespan, tuple(times.peak)) == (makespan, live)
    bars, waits = (c for c in figure.axes[0].collections if isinstance(c, PolyCollection))
    assert len(bars.get_paths()) == sum(map(len, times.rows))
    assert area(waits) / (0.88 * len(live) * float(makespan)) == pytest.approx(times.bubble)
    assert [round(bar.get_width()) for bar in figure.axes[1].patches] == list(live)
    assert f"{times.bubble:.1%}: the bubble" in " ".join(texts_of(figure)) and f"{times.bubble:.1%}" in repr(picture)


def test_a_schedule_plays_every_moment_once(monkeypatch):
    shown = []
    monkeypatch.setattr(live, "in_notebook", lambda: True)
    monkeypatch.setattr(live, "show_figure", lambda *_, **__: None)
    monkeypatch.setattr("hpdl_lab.verbs.show.step_through", lambda draw, frames, *_, **__: shown.extend(frames))
    times = lab.show("gpipe", ranks=2, micro_batches=2, play=True).data
    moments = [now for *_, now in shown]
    assert moments == sorted(set(moments)) and moments[-1] == times.makespan == 9
    lab.show("1f1b", micro_batches=32, play=True)
    assert len(shown) - len(moments) == 16 and shown[-1][-1] == 105


def test_at_a_time_only_what_has_begun_is_drawn_and_what_is_live_counted():
    from hpdl_lab.plots import schedule as drawing

    plan = build("gpipe", 4, 8)
    figure = style.new_figure(height=drawing.height(plan))
    drawing.draw(figure, plan, schedules.evaluate(plan), now=4)
    bars, waits = (c for c in figure.axes[0].collections if isinstance(c, PolyCollection))
    assert len(bars.get_paths()) == 4 + 3 + 2 + 1 and area(waits) == pytest.approx(0.88 * (0 + 1 + 2 + 3))
    assert [t.get_text() for t in figure.axes[1].texts[:8:2]] == ["5", "4", "3", "2"]  # at 4 the next ones begin
    assert "at 4 of 33 units of time" in " ".join(texts_of(figure))


# -- ranks and what joins them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"dp": 2, "pp": 2, "tp": 2}, ["4 dp groups of 2: add gradients", "4 tp groups of 2: share each layer"]),
        ({"pp": 1}, ["No engines run"]),
        ({"dp": 8, "pp": 16, "tp": 8}, ["7 more tables like these", "64 pp groups of 16", "the first 8 groups"]),
        ({"cp": 2, "ep": 3}, ["cp 1", "ep 2", "3 cp groups of 2"]),
    ],
)
def test_a_mesh_is_drawn_with_its_groups(sizes, says):
    shown = lab.show(Grid(**sizes))
    assert repr(shown) == str(Grid(**sizes)) and all(text in " | ".join(texts_of(shown.figure)) for text in says)


def test_engines_stand_at_their_coordinates(cluster, monkeypatch):
    monkeypatch.setattr("hpdl_lab.verbs.show.running", lambda: cluster)
    texts = " ".join(texts_of(lab.show(Grid(dp=2, tp=2)).figure))
    assert texts.count("core") >= 4 and "where its engine runs" in texts
    assert "4 engines run, and the mesh has 8 places" in " ".join(texts_of(lab.show(Grid(dp=8)).figure))


@pytest.mark.parametrize(
    "name, n, gap",
    [("ring", 4, "0.666667"), ("ring", 16, "0.050747"), ("wheel", 8, "0.313255"), ("star", 32, "0.031250")],
)
def test_the_picture_of_a_graph_says_its_spectral_gap(name, n, gap):
    picture = lab.show(gossip.graph(name, n))
    texts = texts_of(picture.figure)
    assert gap in repr(picture) and any(gap in t for t in texts) and {str(i) for i in range(n)} <= set(texts)
    (lines,) = picture.figure.axes[0].collections
    assert len(lines.get_segments()) == (picture.data > 0).sum() // 2 - (np.diag(picture.data) > 0).sum() // 2
    assert "all agree after one step" in repr(lab.show(gossip.graph("complete", 5)))


@pytest.mark.parametrize(
    ("network", "shared", "text"),
    [
        (Switch(), 0, "rank - switch\n12.5 GB/s"),
        (Ring(), 8, "rank - rank\n12.5 GB/s\nshared by up to 4 messages"),
        (FatTree(4, 2), 4, "leaf - spine\n12.5 GB/s\nshared by up to 2 messages"),
        (Islands(4), 2, "NIC - switch\n50 GB/s\nshared by up to 4 messages"),
    ],
    ids=str,
)
def test_every_cable_of_a_network_is_there_and_shared_ones_stand_out(network, shared, text):
    figure = lab.show(network, ranks=8).figure
    (ax,) = figure.axes
    names = [(link.source, link.dest) for link in network.links(8)]
    cables = {frozenset(name.replace("router", "rank") for name in ends) for ends in names}
    assert len(ax.lines) == sum(len(ends) == 2 for ends in cables)
    assert len(ax.collections[0].get_offsets()) == 8
    assert sum(to_hex(line.get_color()) == colors.VERMILION.lower() for line in ax.lines) == shared
    assert text in texts_of(figure) and any("orange" in t for t in texts_of(figure)) == (shared > 0)


def test_of_a_large_network_the_first_ranks_are_drawn_and_the_picture_says_so():
    figure = lab.show(FatTree(16, 4), ranks=1024).figure
    assert len(figure.axes[0].collections[0].get_offsets()) == 64
    assert any(
        t.startswith("the first 64 of 1,024 ranks; the farthest message takes 2.22 µs") for t in texts_of(figure)
    )
    assert "50 GB/s" in repr(lab.show("infiniband_ndr", ranks=4))


# -- models ------------------------------------------------------------------------------------------------------------


def test_a_model_is_shown_with_the_shapes_that_went_through_it():
    """All its parameters are in the rows, the tied ones once; the block has 12 d² + 13 d."""
    gpt = models.build("gpt", layers=1)
    shown = lab.show(gpt, torch.zeros(4, 16, dtype=torch.int64))
    steps = shown.data
    assert sum(step.parameters for step in steps if not step.tied) == sum(p.numel() for p in gpt.parameters())
    d = 64
    assert sum(step.parameters for step in steps if step.module.startswith("blocks.0")) == 12 * d**2 + 13 * d
    names = [step.name for step in steps]
    assert names.count("add") == 3 and steps[names.index("attention")].shape_out == (4, 2, 16, 32)
    assert (steps[-1].shape_out, steps[-1].tied) == ((4, 16, 80), True)
    texts = texts_of(shown.figure)
    assert {"4 × 16 × 256", "blocks.0.mlp.0", "256 × 64", "16,640", "as above"} <= set(texts)
    assert not any(hooks for m in gpt.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks))


def test_models_of_today_are_shown_with_a_row_for_routers_experts_and_rotary_positions():
    for name, parts in (("llama", ["turn by position"] * 2), ("deepseek", ["turn by position"] * 4)):
        model = models.build(name)
        steps = lab.show(model, torch.zeros(4, 16, dtype=torch.int64)).data
        assert sum(step.parameters for step in steps) == sum(p.numel() for p in model.parameters())
        names = [step.name for step in steps]
        assert [name for name in names if name.startswith("turn")] == parts and names.count("attention") == 2
        assert names.count("experts") == names.count("router") == (name == "deepseek")
        assert steps[names.index("attention")].shape_out == (4, 4, 16, 16)


def test_a_model_is_refused_a_batch_that_it_does_not_read():
    with raises(ValueError, "Linear", "(8, 3)"):
        lab.show(torch.nn.Linear(2, 1), torch.rand(8, 3))
    with raises(TypeError, "list"):
        lab.show(torch.nn.Linear(2, 1), [1, 2])


def test_three_ways_to_share_a_model_are_one_picture():
    shown = lab.show("parallelism")
    for way in ("data parallel", "tensor parallel", "pipeline parallel"):
        assert way in shown.text and way in texts_of(shown.figure)
