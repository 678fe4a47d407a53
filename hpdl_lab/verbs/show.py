"""`lab.show`: draw whatever is data: a run, a collective's steps, a schedule, a mesh, a graph, a network."""

from __future__ import annotations

import ast
import glob
import inspect
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from .. import schedules, trace, zoo
from ..checks.result import Note
from ..collectives import table
from ..collectives.dataflow import Dataflow, of_algorithm
from ..collectives.table import Algorithm
from ..comm.base import Results, Row
from ..comm.errors import name_ranks
from ..comm.network import PRESETS, Network, Switch, describe
from ..engines.messages import Function
from ..inference import decode
from ..inference.engine import Engine
from ..kernels import ladder, on_gpu, reduction
from ..mesh import Grid
from ..models.shapes import shapes
from ..parallel import gossip, horovod, rounding
from ..parallel.experts import Balance, Routing
from ..parallel.gossip import Graph
from ..parallel.recompute import Costs
from ..plain_source import plain_source
from ..plots import applications as uses
from ..plots import collective as panels
from ..plots import decode as tokens
from ..plots import experts as routes
from ..plots import formats, live
from ..plots import graph as graphs
from ..plots import kernel as banks
from ..plots import memory as memories
from ..plots import mesh as meshes
from ..plots import model as models
from ..plots import network as cables
from ..plots import pages as tiles
from ..plots import schedule as bars
from ..plots import timeline as lanes
from ..plots.style import Draw
from ..schedules import Evaluation, Schedule
from ..units import amount_text, counted, require_int, require_number
from .cluster import last_run, running
from .dataflow import dataflow_of
from .explore import step_through
from .pipeline import asked_schedule
from .plain import misfit
from .result import Picture, picture, text_table

if TYPE_CHECKING:
    from ..kernels.threads import Launch
    from ..schedules.evaluation import Cost

NAMES = list(dict.fromkeys(algorithm.name for algorithm in table.ALGORITHMS))
MOST_STEPS, MOST_FRAMES, FRAME_MS = 32, 16, 350  # of an animation: of a collective half a minute; of a schedule
MOST_ACTIONS = 4000  # that one picture can hold
MOST_PLACES = 4096  # of a mesh
LADDER_BLOCKS, LADDER_ELEMENTS = 4, 4096  # of the launch whose costs are shown
COLUMNS = ("atomics", "sectors", "barriers", "shared", "conflicts", "races")  # of threads.counts
KNOWN = "a run, the name of an algorithm or a schedule, a Schedule, a Grid, a Graph, a Network, or your function"

Drawer: TypeAlias = Callable[..., Picture | Note]
Kernel: TypeAlias = Callable[..., None]  # f(x, out)
Run: TypeAlias = Results | Iterable[trace.Event] | None  # None: the last one


def show(x: object = None, *more: object, **options: object) -> Picture | Note:
    """Draw `x`, whatever it is; by default what ranks did in the last run.

        lab.show(results)                             a run, or a list of events: who did what, when
        lab.show(results, "traffic")                  ... who sent how much to whom; "horovod": Horovod's timeline
        lab.show("trace_*.json")                      traces of torch.profiler, or of save=: who did what, when
        lab.show("ring", ranks=4)                     the steps of a collective of collectives/table.py
        lab.show("tree", ranks=8, collective="broadcast")
        lab.show(my_all_reduce, ranks=4)              ... of yours, from its messages on simulated ranks
        lab.show("collectives")                       what the eight collectives are for
        lab.show("1f1b", ranks=4, micro_batches=8)    a pipeline schedule, or your f(rank, ranks, micro_batches)
        lab.show(plan, forward=[3, 1], backward=2)    ... with the time of each stage; play=True: action by action
        lab.show(Grid(dp=2, tp=2))                    a mesh: the place of each rank, and who belongs to one group
        lab.show(gossip.graph("wheel", 8))            a graph, and how fast gossip on it mixes
        lab.show(FatTree(4), ranks=16)                a network
        lab.show(model, x)                            what a batch becomes in a model, operation by operation
        lab.show(recompute.compare(model, x, ...))    bytes that are held in a step, with and without recomputation
        lab.show(experts.routing(layer, x, ranks=4))  which token goes to which expert on which rank
        lab.show(experts.balance(layer, x))           the load of experts before and after updates of the bias
        lab.show(decode.compare_decode_steps({"yours": decode_step}))    what one more token takes
        lab.show(engine)                              the pages of an inference engine: who holds which
        lab.show("applications")                      what five applications were trained on, and how long
        lab.show("formats")                           float32, bfloat16, float16, float8: bits, and ranges of numbers
        lab.show("formats", {"weights": [w, ...]})    ... what rounding these tensors to 8 bits loses, with scales
        lab.show("parallelism")                       three ways to share a model and its batch among ranks
        lab.show("ladder")                            kernels that add a vector on a GPU: what each costs, and yours
        lab.show(gpu_sum)                             a kernel f(x, out): which banks of shared memory a warp asks
        lab.show("zoo")                               the broken programs of lesson 03; lab.show(zoo.find("wrong_root"))

    Args:    more, options: what is shown of it, as above: the view of a run, else the number of ranks.
             save: of a run: the path of a trace to write as well, which ui.perfetto.dev opens.
             prediction: of a run: the seconds that you expect it to take.
    Returns: Picture, whose text says in words what is drawn; a Note of programs.
    Raises:  ValueError, TypeError or LookupError in one sentence.
    """
    draw = _kind_of(x)
    if wrong := misfit(draw, (x, *more), options):
        raise TypeError(f"lab.show of {KINDS[draw]}: {wrong}")
    return draw(x, *more, **options)


def _kind_of(x: object) -> Drawer:
    """Return the function below that draws `x`."""
    if isinstance(x, str):
        if x.endswith((".json", ".json.gz")):
            return _show_trace
        if x in NAMES:
            return _show_steps
        found = LISTS.get(x) or (_show_schedule if x in schedules.CATALOG else _show_network if x in PRESETS else None)
        if found is None:
            known = ", ".join((*NAMES, *schedules.CATALOG, *PRESETS, *LISTS))
            raise LookupError(f"nothing is called {x!r}: there are {known}")
        return found
    for kind, draw in BY_TYPE.items():
        if isinstance(x, kind):
            return draw
    if callable(x) and not hasattr(x, "events"):
        takes = list(inspect.signature(x).parameters) if not inspect.isbuiltin(x) else []
        if takes == ["x", "out"]:
            return _show_kernel
        return _show_schedule if len(takes) > 2 or takes[:1] == ["rank"] else _show_steps
    return _show_run


# -- a run ------------------------------------------------------------------------------------------------------------


def _show_run(x: Run, view: str = "timeline", save: str | None = None, prediction: float | None = None) -> Picture:
    """Show what ranks did: who waited for whom, who sent how much to whom, or Horovod's timeline."""
    views: dict[str, Callable[[list[trace.Event], str | None], Picture]] = {
        "timeline": _show_timeline,
        "traffic": _show_traffic,
        "horovod": _show_horovod,
    }
    if view not in views:
        raise ValueError(f"view={view!r}: a run is shown as {', '.join(views)}")
    if prediction is not None:
        return _show_timeline(_events_of(x), save, require_number("the seconds that you expect", prediction, above=0))
    return views[view](_events_of(x), save)


def _events_of(results: Run) -> list[trace.Event]:
    """Return the events of Results, of a list, or of the last run on the engines."""
    if results is None and (results := last_run()) is None:
        raise ValueError("no run to draw yet: lab.run(...) first, or give lab.show what sim.run returned")
    found = getattr(results, "events", results)
    if not isinstance(found, Iterable):
        raise TypeError(f"lab.show got something of {type(results).__name__}: it draws {KNOWN}")
    events = list(found)
    if not events or not isinstance(events[0], trace.Event):
        raise ValueError("the run recorded no events: it had no message, or it was timed, which records none")
    return events


def _show_trace(x: str, save: str | None = None) -> Picture:
    """Show the timeline of the files that the pattern `x` matches, one for each rank."""
    files = sorted(glob.glob(x))
    if not files:
        raise LookupError(f"no file is called {x}, as seen from {os.getcwd()}")
    return _show_timeline(_events_of(trace.load_chrome(*files)), save)


def _show_timeline(events: list[trace.Event], save: str | None, guess: float | None = None) -> Picture:
    """Show a lane per rank, below it one for what runs in its background; of a long run the end. guess: s of it."""
    text = f"{len(events):,} events of {counted(len({e.rank for e in events}), 'rank')}"
    title = f"Timeline: {text}"
    if save is not None:
        trace.save_chrome(events, save)
        text += f", also in {save}: open it in ui.perfetto.dev"
    return picture(lanes.draw, events, title, "", guess, text=text)


def _show_traffic(events: list[trace.Event], save: str | None) -> Picture:
    """Show how many bytes each rank sent to each."""
    matrix = graphs.traffic_of(events, 1 + max(max(e.rank, e.peer) for e in events))
    text = f"{int(matrix.sum()):,} bytes in {sum(e.op == 'send' for e in events):,} messages"
    return picture(graphs.draw_traffic, matrix, None, f"Traffic: {text}", text=text, data=matrix, width=5.2)


def _show_horovod(events: list[trace.Event], save: str | None) -> Picture:
    """Show when each gradient was negotiated, packed, reduced and unpacked on rank 0, as Horovod's timeline does."""
    rows = horovod.to_horovod(events)
    if not rows:
        raise ValueError("no activity of Horovod's was recorded: DistributedOptimizer(..., timeline=True) does")
    text, foot = f"Horovod's timeline of {len(lanes.gradients_of(rows))} gradients on rank 0", ""
    if save is not None:
        horovod.save_timeline(events, save)
        foot = f"Also in {save}: open it in ui.perfetto.dev"
    height = lanes.horovod_height(rows)
    return picture(lanes.draw_horovod, rows, text, foot, text=text, data=rows, height=height)


# -- collectives ------------------------------------------------------------------------------------------------------


def _show_steps(
    x: str | Algorithm | Function, ranks: int = 8, collective: str = "all_reduce", **options: int
) -> Picture:
    """Show who sends which chunk to whom, step by step, and whose data each chunk holds."""
    require_int("ranks", ranks, 2, panels.MOST_RANKS)
    if callable(x) and not isinstance(x, Algorithm):
        flow = dataflow_of(x, ranks, collective)
    else:
        flow = of_algorithm(x if isinstance(x, Algorithm) else table.find_algorithm(x, collective), ranks, **options)
    if not flow.steps:
        raise ValueError(f"{flow.name} sent no message on {ranks} ranks: there is no step to draw")
    if live.in_notebook():
        step_through(*played(flow))
    return picture(panels.draw, flow, text=panels.title_of(flow), data=flow, height=panels.Sheet(flow).height)


def played(flow: Dataflow) -> tuple[Draw, list[tuple[Dataflow, int]], str, float]:
    """Return the arguments of animation.html and of step_through that play a Dataflow."""
    frames = [(flow, i) for i in panels.spared(len(flow.steps) + 1, MOST_STEPS)]
    return panels.draw_step, frames, f"{flow.name}, steps done", panels.step_height(flow)


def _show_collectives(x: str, ranks: int = 4) -> Picture:
    """Show what each of eight collectives does to the data of the ranks."""
    require_int("ranks", ranks, 2, 6)
    text = f"Eight collectives on {ranks} ranks, before and after"
    return picture(panels.draw_eight, ranks, text=text, height=panels.height_of_eight(ranks))


# -- schedules --------------------------------------------------------------------------------------------------------


def _show_schedule(
    x: str | Schedule | Function,
    ranks: int = 4,
    micro_batches: int = 8,
    chunks: int | None = None,
    play: bool = False,
    forward: Cost = 1,
    backward: Cost = 2,
    input: Cost = 1,
    weight: Cost = 1,
    transfer: float = 0,
    pair: float | None = None,
) -> Picture:
    """Show a pipeline schedule over time, the bubble hatched. Times are as in schedules.evaluate, data its result."""
    if isinstance(ranks, int) and isinstance(micro_batches, int):
        _require_few(2 * ranks * micro_batches)  # before they are made
    plan = asked_schedule(x, ranks, micro_batches, chunks)
    _require_few(sum(map(len, plan.rows)))
    times = schedules.evaluate(plan, forward, backward, input, weight, transfer, pair)
    live_text = f"live activations at most {', '.join(map(str, times.peak))}"
    if plan.chunks > 1:
        live_text += f", of stages 1/{plan.chunks} as long"
    units = f"{trace.number_text(float(times.makespan))} units of time, bubble {times.bubble:.1%}"
    text = f"{plan.name} on {bars.of_schedule(plan)}: {units}, {live_text}"
    if play and live.in_notebook():
        frames = [(plan, times, "", now) for now in _moments(times)]
        step_through(bars.draw, frames, f"{plan.name}, played", bars.height(plan), frame_ms=FRAME_MS)
    return picture(bars.draw, plan, times, text=text, data=times, height=bars.height(plan))


def _moments(times: Evaluation) -> list[float]:
    """Return the times at which an action ends, MOST_FRAMES of them at most."""
    ends = sorted({timed.end for row in times.rows for timed in row})
    if len(ends) <= MOST_FRAMES:
        return ends
    return list(dict.fromkeys(ends[round((i + 1) * len(ends) / MOST_FRAMES) - 1] for i in range(MOST_FRAMES)))


def _require_few(actions: int) -> None:
    """Raise ValueError for more actions than fit a picture."""
    if actions > MOST_ACTIONS:
        raise ValueError(f"{actions:,} actions do not fit a picture: take fewer ranks or micro-batches")


# -- ranks and what joins them ----------------------------------------------------------------------------------------


def _show_mesh(grid: Grid) -> Picture:
    """Show every rank at its coordinates, the place of its engine, and the groups along every axis."""
    if grid.size > MOST_PLACES:
        raise ValueError(f"{grid!r} has {grid.size:,} ranks: at most {MOST_PLACES:,} can be drawn")
    places, foot = _places_of(grid.size)
    sizes = ", ".join(f"{axis}={n}" for axis, n in zip(grid.axes, grid.sizes, strict=True))
    title = f"{sizes}: {counted(grid.size, 'rank')}"
    return picture(meshes.draw, grid, places, title, foot, text=str(grid), data=grid, height=meshes.height(grid))


def _places_of(ranks: int) -> tuple[list[str], str]:
    """Return ([place of each rank's engine], a line about it); ([], why) if there are not enough engines."""
    engines = running()
    if engines is None:
        return [], f"No engines run: lab.start({ranks}) puts one at each place." if ranks <= 16 else ""
    if engines.n < ranks:
        return [], f"{engines.n} engines run, and the mesh has {ranks:,} places."
    infos = engines.infos[:ranks]
    hosts = {info["host"] for info in infos}
    if len(hosts) > 1:
        return [info["host"] for info in infos], "Below each rank: the host of its engine."
    if engines.device == "cuda":
        return [info["gpu"] for info in infos], "Below each rank: the GPU of its engine."
    cores = [name_ranks(info["cores"]).replace("rank", "core") for info in infos]
    return cores, f"Below each rank: where its engine runs, on {hosts.pop()}."


def _show_graph(graph: Graph) -> Picture:
    """Show a graph, and how fast gossip on it mixes."""
    require_int("the number of ranks of a graph", graph.n, 2, graphs.MOST_RANKS)
    weights = gossip.metropolis(graph)
    text = f"{graph.name} of {graph.n} ranks, {graphs.mixing(gossip.lambda2(weights))}"
    return picture(graphs.draw, graph.name, weights, text=text, data=weights)


def _show_network(x: str | Network, ranks: int = 16) -> Picture:
    """Show which links join the ranks, and which of them are shared; the text has all figures."""
    require_int("ranks", ranks, 1)
    network = Switch.of(x) if isinstance(x, str) else x
    height = cables.height(network, ranks)
    return picture(cables.draw, network, ranks, text=describe(network, ranks), data=network, height=height)


# -- models -----------------------------------------------------------------------------------------------------------


def _show_costs(costs: Costs, prediction: dict[str, float] | None = None) -> Picture:
    """Show bytes held over the arithmetic of a step, for each choice of what is recomputed."""
    first, *others = costs.items()
    text = f"{first[0]}: {amount_text(first[1].most)} at most"
    for name, watch in others:
        text += f"; {name}: {amount_text(watch.most)}, {watch.flops / first[1].flops:.3f} times the FLOPs"
    guess = None if prediction is None else tuple(prediction.values())[:2]
    courses = {name: watch.course for name, watch in costs.items()}
    return picture(memories.draw_held, courses, "What a step holds", guess, text=text, data=costs)


def _show_times(times: decode.Times, prediction: dict[str, float] | None = None) -> Picture:
    """Show what the newest token takes; prediction: {how: times as long as the first one} of the last one."""
    text = "; ".join(
        f"{how}: token {[*curve][-1]:,} takes {times.factor(how):.1f} times as long as token 1"
        for how, curve in times.items()
    )
    guess = None if prediction is None else [prediction[how] for how in times]
    return picture(tokens.draw, times, guess, text=text, data=times)


def _show_engine(engine: Engine) -> Picture:
    """Show the pages of the requests that run, and free ones with tokens that can be used again."""
    pages = engine.pages
    if pages.count > tiles.MOST_PAGES:
        raise ValueError(f"{pages.count:,} pages: at most {tiles.MOST_PAGES:,} can be drawn")
    requests = [(f"request {i}", [*r.pages], r.num_computed_tokens) for i, r in enumerate(engine.running)]
    kept = [page for page in pages.free if pages.digests[page]]
    text = f"{len(pages.free)} free + {pages.used} used = {pages.count} pages of {pages.size} tokens"
    height = tiles.height(pages.count)
    return picture(tiles.draw, requests, pages.count, pages.size, kept, text=text, data=pages, height=height)


def _show_model(x: nn.Module, batch: Tensor) -> Picture:
    """Show every operation of a model on a batch, with its shapes; `data`: list of models.shapes.OperationShapes."""
    if not isinstance(batch, Tensor):
        raise TypeError(f"a model is shown with a batch, a tensor, not {type(batch).__name__}: lab.show(model, x)")
    try:
        steps = shapes(x, batch)
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"{type(x).__name__} does not read a batch of shape {tuple(batch.shape)}: {error}") from None
    parameters = sum(p.numel() for p in x.parameters())
    text = (
        f"{counted(len(steps), 'operation')}, {counted(parameters, 'parameter')}; a batch of {models.by(batch.shape)}"
    )
    return picture(models.draw_shapes, steps, text, text=text, data=steps, height=models.shapes_height(steps))


def _show_routing(x: Routing) -> Picture:
    """Show every copy of a token at its expert; `data` is a dict for each of them."""
    rows = x.rows()
    if not rows:
        raise ValueError("no token to draw: experts.routing(layer, x) of at least one")
    title, _, subtitle = str(x).partition("; ")
    return picture(routes.draw, rows, x.experts, title, subtitle, text=str(x), data=rows, height=routes.HEIGHT)


def _show_balance(x: Balance) -> Picture:
    """Show the load of experts before and after updates of the bias."""
    return picture(routes.draw_balance, x.loads.tolist(), x.imbalances, str(x), text=str(x), data=x.imbalances)


def _show_parallelism(x: str) -> Picture:
    """Show three ways to share a model and its batch among ranks."""
    text = f"a model and its batch on one rank, and on four: {', '.join(name for name, _, _ in models.WAYS[1:])}"
    return picture(models.draw_parallelism, text=text)


def _show_formats(x: str, tensors: Mapping[str, Iterable[Tensor]] | None = None) -> Picture:
    """Show the formats of numbers that models are trained in, or what 8 bits do to `tensors`; `data` are the rows."""
    if tensors is not None:
        lists = {name: [x] if isinstance(x, Tensor) else list(x) for name, x in tensors.items()}
        if strange := [name for name, several in lists.items() if not all(isinstance(x, Tensor) for x in several)]:
            raise TypeError(f'"{strange[0]}" needs tensors, a gradient only after backward: not None or another type')
        return _show_rounding(
            {name: [x.detach().float().flatten() for x in several] for name, several in lists.items()}
        )
    rows = formats.formats()
    text = ", ".join(f"{row.name} from {row.smallest:.0e} to {row.largest:.1e}" for row in rows)
    return picture(formats.draw, rows, text=text, data=rows, height=formats.HEIGHT)


def _show_rounding(tensors: Mapping[str, Sequence[Tensor]]) -> Picture:
    """Show how far rounded tensors are from what they were, and how many of their numbers become zero."""
    found = rounding.compare_formats(tensors)
    flat = {name: torch.cat([*parts]) for name, parts in tensors.items()}
    lines = text_table(
        ("", "format", "scale", "error", "zeros"),
        [[row.tensors, row.dtype, row.scale, f"{row.error:.1%}", f"{row.zeros:.1%}"] for row in found],
    )
    return picture(formats.draw_rounding, flat, found, text="\n".join(lines), data=found, height=formats.HEIGHT)


def _show_applications(x: str) -> Picture:
    """Show what applications were trained on, and how long."""
    text = "what was trained on which data: " + ", ".join(f"{a.name}, {a.data}" for a in uses.APPLICATIONS)
    return picture(uses.draw, text=text)


# -- programs ---------------------------------------------------------------------------------------------------------


def _show_programs(x: str | zoo.Program) -> Note:
    """Show broken programs without their diagnosis: `lab.run(program, deadline=2)` would find it."""
    named = {x.name: x} if isinstance(x, zoo.Program) else {k: zoo.find(name) for k, name in zoo.LABELS.items()}
    texts = [
        f"{name}: {program.title}, on {program.ranks} ranks\n\n{textwrap.indent(_undocumented(program.broken), '    ')}"
        for name, program in named.items()
    ]
    return Note(f"{counted(len(texts), 'program')} with a fault", lines="\n\n".join(texts))


def _undocumented(function: Callable[..., object]) -> str:
    """Return the source of a function without its name and its docstring, which might give the fault away."""
    text = plain_source(function)
    node, lines = ast.parse(text).body[0], text.split("\n")
    assert isinstance(node, ast.FunctionDef)
    if ast.get_docstring(node) is not None:
        docstring = node.body[0]
        lines[docstring.lineno - 1 : docstring.end_lineno] = []
    return "\n".join(lines).replace(f"def {function.__name__}(", "def program(", 1)


# -- kernels ----------------------------------------------------------------------------------------------------------


def _show_kernel(x: Kernel, prediction: float | None = None) -> Picture:
    """Show what warp 0 asks of the banks of shared memory; `data` are the threads.counts of the whole launch."""
    from ..kernels import threads

    launch = _launched(x)
    warp = [found for found in threads.by_warps(launch.log, shared=True) if found[0].block == found[0].warp == 0]
    if not warp:
        raise ValueError(f"{x.__name__} uses no shared memory: there is no bank to draw")
    rows = [(f"{found[0].kind} {found[0].array.name}", threads.words_per_bank(found)) for found in warp]
    costs, turns = threads.counts(launch), max(max(words) for _, words in rows)
    asked = f"{x.__name__}: {counted(len(rows), 'access', 'accesses')} of a warp to shared memory"
    text = f"{asked}, in {counted(turns, 'turn')} at worst"
    if prediction is not None:
        text += f" (predicted: {require_number('the turns that you expect', prediction, above=0):g})"
    return picture(banks.draw, rows, text, text=text, data=costs, height=banks.height(rows))


def _show_ladder(x: str, kernel: Kernel | None = None) -> Note:
    """Show the rungs of ladder.py and `kernel`: counts of a small launch; with a GPU also the times of a large one."""
    from ..kernels import threads

    kernels = {rung.__name__: rung for rung in ladder.RUNGS} | ({"yours": kernel} if kernel is not None else {})
    head = ["", *COLUMNS, *(() if (reason := on_gpu.why_not()) else ("us", "GB/s"))]
    counts = {name: threads.counts(_launched(fn)) for name, fn in kernels.items()}
    lines = [[name, *(f"{row[column]:,}" for column in COLUMNS)] for name, row in counts.items()]
    text = f"{LADDER_BLOCKS} blocks of {ladder.THREADS} threads add {LADDER_ELEMENTS:,} elements"
    if reason:
        return Note(text, f"Counted thread by thread, not timed: {reason}.", "\n".join(text_table(head, lines)))
    timed = list(on_gpu.rows(tuple(kernels.values())))
    lines = [[*line, *_times_of(row)] for line, row in zip(lines, timed, strict=True)]
    compiled = reduction.Ladder().rows((on_gpu.SIZE,), ("float32",))
    lines += [[f"CUDA: {row['name']}", *["" for _ in COLUMNS], *_times_of(row)] for row in compiled]
    return Note(text, f"Times of {on_gpu.SIZE >> 20} MiB on this GPU.", "\n".join(text_table(head, lines)))


def _times_of(row: Row) -> tuple[str, str]:
    """Return the columns us and GB/s of a row."""
    return ("wrong sum", "") if row["wrong"] else (f"{row['time_us']:,.0f}", f"{row['GBps']:,.0f}")


def _launched(kernel: Kernel) -> Launch:
    """Return the Launch of a kernel f(x, out) whose accesses are counted."""
    from ..kernels.threads import Launch

    x, out = (np.arange(LADDER_ELEMENTS) % 13).astype(np.float32), np.zeros(1, np.float32)
    return Launch(kernel, LADDER_BLOCKS, ladder.THREADS, x, out)


BY_TYPE: dict[type, Drawer] = {
    Algorithm: _show_steps,
    Schedule: _show_schedule,
    Grid: _show_mesh,
    Graph: _show_graph,
    Network: _show_network,
    zoo.Program: _show_programs,
    nn.Module: _show_model,
    Costs: _show_costs,
    decode.Times: _show_times,
    Engine: _show_engine,
    Routing: _show_routing,
    Balance: _show_balance,
}
LISTS: dict[str, Drawer] = {
    "collectives": _show_collectives,
    "applications": _show_applications,
    "formats": _show_formats,
    "parallelism": _show_parallelism,
    "zoo": _show_programs,
    "ladder": _show_ladder,
}
KINDS: dict[Drawer, str] = {
    _show_run: "a run",
    _show_trace: "a trace",
    _show_steps: "a collective",
    _show_collectives: "the collectives",
    _show_schedule: "a schedule",
    _show_mesh: "a mesh",
    _show_graph: "a graph",
    _show_network: "a network",
    _show_programs: "programs",
    _show_kernel: "a kernel",
    _show_ladder: "the ladder of kernels",
    _show_model: "a model",
    _show_costs: "the costs of recomputation",
    _show_times: "times of tokens",
    _show_engine: "an inference engine",
    _show_routing: "the routing of tokens to experts",
    _show_balance: "the balance of experts",
    _show_applications: "applications",
    _show_formats: "formats of numbers",
    _show_parallelism: "ways to share a model",
}
