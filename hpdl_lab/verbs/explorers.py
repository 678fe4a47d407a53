"""`lab.explore`: models with sliders, for notebooks. All of it is a model or virtual time: answers are instant.

An entry of EXPLORERS is named controls, and a function of their values that returns a Picture.
"""

import functools
import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import numpy as np

from .. import schedules
from ..collectives import cost, table
from ..collectives.memory import ALGORITHMS, bytes_moved
from ..comm.network import Islands
from ..comm.network.presets import interconnect
from ..data import diabetes
from ..kernels import staging
from ..optim.gradient_descent import descend_in_batches, loss
from ..optim.large_batch import TrainingJob, seconds_to_target
from ..parallel import gossip
from ..parallel.grid.machine import EFFICIENCY, MACHINES, PEAKS, grid_of, message_cost
from ..parallel.grid.memory import Memory, collectives_per_step, memory_of
from ..parallel.grid.search import grids
from ..parallel.grid.spec import TRAININGS, Spec, gpt, transformer_block
from ..parallel.reducer import assign_buckets
from ..parallel.scaling import overlap
from ..parallel.scripts import price
from ..plots import explore as drawing
from ..plots.graph import GUESSED, mixing
from ..plots.landscape import Bowl
from ..plots.large_batch import draw_target
from ..plots.staging import draw_model
from ..resilience import neighbors
from ..trace import number_text, seconds_text
from ..units import amount_text, bytes_text, counted
from . import explore_inference, explore_models
from .adjustable import Control, Value, doublings, logarithmic
from .explore import Answer, Explored, require_known, show_sliders
from .measure import asked_times, last_ping_pong
from .result import Picture, draw_picture
from .staging import curve_of

Explorer: TypeAlias = tuple[dict[str, Control], Answer]


def _percent(share: float) -> str:
    """Return 0.35 as "35%"."""
    return f"{share:.0%}"


def _in_words(value: float) -> str:
    """Return 1.75e11 as "175 billion"."""
    scale, word = next(pair for pair in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")) if value >= pair[0])
    return f"{number_text(value / scale)} {word}"


# -- 00_why: days of training -----------------------------------------------------------------------------------------

COUNTS = doublings(1, 2**17)
MEMORY = 80e9  # bytes of an accelerator
STATE = sum(TRAININGS["mixed adam"][:3])  # bytes per parameter


def _days(parameters: float, tokens: float, accelerators: int, hardware: str, share_of_peak: float) -> Picture:
    """Draw the days of 6 N D operations: a multiplication and an addition are two. Ref: Kaplan et al. 2020, 2.1."""
    flops, speed = 6 * parameters * tokens, PEAKS[hardware] * share_of_peak
    least = math.ceil(STATE * parameters / MEMORY)
    counts = np.union1d(COUNTS, [min(least, COUNTS[-1]), accelerators])
    took = flops / speed / accelerators / drawing.DAY
    text = f"6 N D = {flops:.3g} operations: {number_text(took)} days on {accelerators:,} {hardware}; one "
    text += f"takes {number_text(flops / speed / drawing.YEAR)} years. The state, {STATE} bytes per parameter, is "
    text += f"{amount_text(STATE * parameters)}, and fills {counted(least, 'accelerator')} of {amount_text(MEMORY)}."
    title = (
        f"{_in_words(parameters)} parameters, {_in_words(tokens)} tokens, {hardware} at {share_of_peak:.0%} of its peak"
    )
    args = counts, flops / speed / counts, accelerators, least, title
    return draw_picture(drawing.draw_days, *args, text=text, height=drawing.HEIGHT)


# -- 00_why and 01: gradient descent ----------------------------------------------------------------------------------

BATCHES = (*doublings(1, 256), 442)
STEPS, EPOCHS = 60, 5


@functools.cache
def _patients() -> tuple[np.ndarray, np.ndarray, Bowl]:
    """Return (x, y, the loss around its minimum) of the diabetes data."""
    x, y = diabetes.load()
    best = np.linalg.lstsq(x, y, rcond=None)[0]
    return x, y, Bowl(lambda w: loss(w, x, y), best, 1.6 * float(np.abs(best).max()))


def _descent(rate: float, batch: int, seed: int, epochs: int = 0) -> Picture:
    """Draw a walk of so many epochs, in which a small batch makes many steps, or of STEPS steps of any batch."""
    x, y, bowl = _patients()
    each = math.ceil(len(y) / batch)  # steps of an epoch
    steps = epochs * each or STEPS
    with np.errstate(all="ignore"):  # diverging is part of the lesson
        path = np.array(list(descend_in_batches(x, y, rate, batch, steps, seed)))
        above = np.nan_to_num(((path @ x.T - y) ** 2).mean(axis=1) / 2 - bowl.least, nan=np.inf)
    rest = np.median(above[-max(1, len(above) // 4) :])
    name = "the whole batch" if batch == len(y) else f"mini-batches of {batch}"
    text = f"{counted(steps, 'step')} on {name}, {counted(each, 'step')} an epoch: "
    ends = f"in the last quarter the loss is {number_text(rest)} above the least"
    text += ends if rest < above[0] else "it diverges"
    at = np.arange(steps + 1) / (each if epochs else 1)
    args = bowl, path, at, above, "epochs" if epochs else "steps", f"rate {number_text(rate)}, {name}"
    return draw_picture(drawing.draw_descent, *args, text=text, height=drawing.HEIGHT)


SEEDS = tuple(range(10))
DESCENT = {
    "rate": Control(logarithmic(0.005, 2), 0.3, number_text),
    "batch": Control(BATCHES, 442, lambda n: "all 442" if n == 442 else str(n)),
    "seed": Control(SEEDS, 0),
}


# -- 02: gossip -------------------------------------------------------------------------------------------------------

GOSSIP_STEPS = 100
COMPARED = ("ring", "wheel", "star", "exponential", "random")


@functools.lru_cache(maxsize=512)
def decay(name: str, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ((n, n) weights, (GOSSIP_STEPS + 1,) how far the ranks are apart, over how far they were)."""
    weights = gossip.metropolis(gossip.graph(name, n, seed))
    x = np.random.default_rng(0).normal(size=(n, 32))
    apart = [gossip.disagreement(x)]
    for _ in range(GOSSIP_STEPS):
        x = weights @ x
        apart.append(gossip.disagreement(x))
    return weights, np.array(apart) / apart[0]


def _graph(graph: str, ranks: int, seed: int) -> Picture:
    """Draw how fast gossip on a graph mixes, among others."""
    weights, _ = decay(graph, ranks, seed)
    curves = {name: decay(name, ranks, seed)[1] for name in COMPARED}
    text = f"{graph} of {ranks} ranks: {mixing(gossip.lambda2(weights))}; "
    text += f"after {GOSSIP_STEPS} steps {number_text(curves[graph][-1])} of the differences are left."
    return draw_picture(drawing.draw_gossip, graph, weights, curves, text=text, height=drawing.HEIGHT)


# -- 03: a message ----------------------------------------------------------------------------------------------------

ALPHA = Control(logarithmic(1e-7, 1e-3), 1e-5, seconds_text)
BANDWIDTH = Control(logarithmic(0.1, 1000), 1.0, lambda GBps: f"{number_text(GBps)} GB/s")


def _message(size: int, alpha: float, bandwidth: float) -> Picture:
    """Draw alpha + beta n over the points that lab.ping_pong measured last."""
    beta, measured = 1e-9 / bandwidth, last_ping_pong()
    seconds, half = alpha + beta * size, alpha / beta
    text = f"{bytes_text(size)}: {seconds_text(alpha)} + {seconds_text(beta * size)} = {seconds_text(seconds)}, "
    text += f"{amount_text(size / seconds, 'B/s')}. Half of the time is α at n½ = α/β = {amount_text(half)}."
    if measured is None:
        text += " Nothing is measured yet: lab.ping_pong() measures it."
    else:
        off = [abs(math.log((alpha + beta * n) / t)) for n, t in zip(measured.nbytes, measured.seconds, strict=True)]
        text += f" Your points are off by {math.expm1(sum(off) / len(off)):.0%} on average."
    points = [] if measured is None else list(zip(measured.nbytes, measured.seconds, strict=True))
    return draw_picture(drawing.draw_message, points, size, alpha, beta, text=text, height=drawing.HEIGHT)


# -- 04: all-reduces --------------------------------------------------------------------------------------------------

SIX = ("ring", "tree", "recursive_doubling", "halving_doubling", "double_tree", "hierarchical")
RANKS = tuple(sorted({*doublings(2, 512), *doublings(3, 384)}))
SIZES = doublings(4, 2**30)


@functools.cache
def _counted_of(name: str, p: int) -> list[tuple[int, float]]:
    """Return [(messages in a row, vectors in a row)], for several numbers of segments if there are any."""
    price = table.find_algorithm(name).cost
    options = doublings(1, 256) if "segments" in inspect.signature(price).parameters else ()
    costs = [price(p, 1, segments=c) for c in options] or [price(p, 1)]
    return [(cost.steps, cost.nbytes) for cost in costs]


def all_reduce_seconds(name: str, p: int, sizes: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """Return s for each size, with the best number of segments for it."""
    return np.min([steps * alpha + vectors * beta * sizes for steps, vectors in _counted_of(name, p)], axis=0)


def _algorithms(ranks: int, size: int, alpha: float, bandwidth: float) -> Picture:
    """Draw the times of six all-reduces, and which is fastest for which size and number of ranks."""
    beta, sizes = 1e-9 / bandwidth, np.array(SIZES, dtype=float)
    every = np.array(
        [[all_reduce_seconds(name, p, sizes, alpha, beta) for name in SIX] for p in RANKS]
    )  # (p, six, size)
    winners, here = every.argmin(axis=1), every[RANKS.index(ranks)]
    times = dict(zip(SIX, here[:, SIZES.index(size)].tolist(), strict=True))
    first, second = sorted(times, key=lambda name: times[name])[:2]
    text = f"{bytes_text(size)} among {ranks} ranks: {_worded(first)} takes {seconds_text(times[first])}, "
    text += f"{_worded(second)} {seconds_text(times[second])}"
    text += "." if "ring" in (first, second) else f", ring {seconds_text(times['ring'])}."
    names = [_worded(name) for name in SIX]
    args = names, RANKS, sizes, here, winners, ranks, size
    return draw_picture(drawing.draw_algorithms, *args, text=text, height=3.9)


def _worded(name: str) -> str:
    """Return the name of an algorithm in words."""
    return {"halving_doubling": "halving-doubling"}.get(name, name.replace("_", " "))


def _segments(ranks: int, size: int, segments: int, alpha: float, bandwidth: float) -> Picture:
    """Draw the chain broadcast of exercise 4.4: every segment takes alpha + beta n / c for each of its p - 1 hops."""
    beta = 1e-9 / bandwidth
    counts = np.array(doublings(1, 4096))
    times = np.array([cost.chain_broadcast(ranks, size, int(c)).seconds(alpha, beta) for c in counts])
    best = cost.best_segments(ranks - 2, size, alpha, beta)
    took, least = (cost.chain_broadcast(ranks, size, c).seconds(alpha, beta) for c in (segments, best))
    text = f"{counted(segments, 'segment')} of {amount_text(size / segments)}: {seconds_text(took)}; "
    text += (
        f"the best number is {best:,}: {seconds_text(least)}. One message of all of it from a rank to the next takes "
    )
    text += f"{seconds_text(alpha + beta * size)}."
    args = ranks, segments, took, counts, times, best, least
    return draw_picture(drawing.draw_segments, *args, text=text, height=drawing.HEIGHT)


# -- 05: bytes in memory ----------------------------------------------------------------------------------------------

ON_A_NODE = doublings(2, 128)


def _memory_bytes(ranks: int, size: int, memory: float, link: float) -> Picture:
    """Draw the bytes of exercise 5.1 over the bandwidth of the memory, which ranks share; a link is each rank's own."""
    moved = {name: bytes_moved(name, ranks, 1) for name in ALGORITHMS}
    curves = {name: [p * size * sum(bytes_moved(name, p, 1)) / memory / 1e9 for p in ON_A_NODE] for name in ALGORITHMS}
    linked = [cost.all_reduce(p, size).nbytes / link / 1e9 for p in ON_A_NODE]
    at = ON_A_NODE.index(ranks)
    took = {name: seconds_text(curve[at]) for name, curve in curves.items()}
    text = f"{counted(ranks, 'rank')}, {bytes_text(size)} each, at least: " + "; ".join(map(": ".join, took.items()))
    text += f"; ring over links of {number_text(link)} GB/s: {seconds_text(linked[at])}."
    return draw_picture(
        drawing.draw_memory_bytes, moved, ON_A_NODE, curves, linked, ranks, text=text, height=drawing.HEIGHT
    )


# -- 05: blocks of a vector that goes through the hosts ---------------------------------------------------------------

STAGED = 2**24  # bytes
BLOCKS = doublings(2**16, STAGED)


def _blocks(block: int, alpha: float, bandwidth: float, copies: float) -> Picture:
    """Draw three stages with the same alpha: from the device, over a wire of so many GB/s, to the device."""
    costs = staging.StagingCosts(alpha, 1e-9 / bandwidth, alpha, 1e-9 / copies)
    curve = functools.partial(curve_of, costs, STAGED)
    best, took = staging.best_block(costs, STAGED), staging.seconds(costs, STAGED, block)
    least, whole = curve(np.array([best, STAGED]))
    text = f"{counted(-(-STAGED // block), 'block')} of {bytes_text(block)}: {seconds_text(took)}; the best have "
    text += f"{amount_text(best)}: {seconds_text(least)}. All in one block takes {seconds_text(whole)}, the wire alone "
    text += f"{seconds_text(costs.wire(STAGED))}."
    times = staging.stages(costs, STAGED, block)
    args = times, BLOCKS, curve, best, block, took, whole
    return draw_picture(draw_model, *args, text=text, height=drawing.HEIGHT)


# -- 06: buckets ------------------------------------------------------------------------------------------------------

GRADIENTS = 100_000_000  # bytes of a model's gradients
OVERLAPPING = 16, interconnect("ethernet_25")  # ranks and what joins them
LIMITS = tuple(int(n) for n in logarithmic(1e5, 1e8))


def bucketed(bucket: int, layers: int, ratio: float) -> tuple[overlap.StepProfile, Callable[[int], float]]:
    """Return (a step of equal layers whose buckets leave during backward, s of an all-reduce of so many bytes).

    ratio: s of backward over s of the all-reduce of all gradients in one message.
    """
    p, link = OVERLAPPING

    def time_of(nbytes: int) -> float:
        return cost.all_reduce(p, nbytes).seconds(link.alpha, link.beta)

    backward, sizes = ratio * time_of(GRADIENTS), [GRADIENTS // layers] * layers
    done, messages = 0, []
    for part in assign_buckets(sizes, bucket, bucket):
        done += len(part)
        at = backward / 2 + backward * done / layers
        messages.append(overlap.Message(at, sum(sizes[i] for i in part), background=True))
    end = 1.5 * backward
    return overlap.StepProfile(1, backward / 2, end, end, end, tuple(messages)), time_of


def step_with_buckets(bucket: int, layers: int, ratio: float) -> overlap.StepTime:
    """Return the time of a step with buckets of so many bytes."""
    return overlap.step_time(*bucketed(bucket, layers, ratio))


def _buckets(bucket: int, layers: int, ratio: float) -> Picture:
    """Draw a step with buckets, and the exposed communication for any bucket size."""
    profile, time_of = bucketed(bucket, layers, ratio)
    step, curve = (
        step_with_buckets(bucket, layers, ratio),
        [step_with_buckets(n, layers, ratio).exposed for n in LIMITS],
    )
    begins, ends, when = [], [], 0.0
    for bucket_sent in profile.messages:
        begins.append(max(when, bucket_sent.at))
        when = begins[-1] + time_of(bucket_sent.nbytes)
        ends.append(when)
    text = f"{counted(len(profile.messages), 'bucket')}: {seconds_text(step.communication)} of communication, "
    text += f"{seconds_text(step.exposed)} exposed ({step.exposed / step.communication:.0%}); a step takes "
    text += f"{seconds_text(step.seconds)}. Best: {amount_text(LIMITS[int(np.argmin(curve))])}."
    args = (
        profile,
        list(zip(begins, ends, strict=True)),
        layers,
        step.seconds,
        np.array(LIMITS),
        curve,
        bucket,
        step.exposed,
    )
    return draw_picture(drawing.draw_buckets, *args, text=text, height=drawing.HEIGHT)


# -- 07: the time to a target -----------------------------------------------------------------------------------------

LEAST_STEPS, EXAMPLE_S, FIXED_S = 10_000, 3e-3, 1e-3
TRAINED_WITH = doublings(32, 2**17)
TRAINED_ON = doublings(1, 4096)


def _target(batch: int, ranks: int, noise_scale: float, link: float) -> Picture:
    """Draw the steps of a batch times the s of a step, whose all-reduce over links of `link` GB/s nothing hides."""
    alpha = OVERLAPPING[1].alpha
    sums = {p: cost.all_reduce(p, GRADIENTS).seconds(alpha, 1 / (link * 1e9)) for p in TRAINED_ON}
    job = TrainingJob(LEAST_STEPS, noise_scale, EXAMPLE_S, FIXED_S, sums)
    took = seconds_to_target(batch, ranks, job)
    best = min(TRAINED_WITH, key=lambda b: seconds_to_target(b, ranks, job))
    steps = LEAST_STEPS * (1 + noise_scale / batch)
    statistical, hardware = 1 / (1 + batch / noise_scale), batch * EXAMPLE_S / ranks / (took / steps)
    text = (
        f"batch {batch:,} on {counted(ranks, 'rank')}: {steps:,.0f} steps (statistical efficiency {statistical:.0%}) "
    )
    text += f"of {seconds_text(took / steps)} (hardware efficiency {hardware:.0%}), {number_text(took / 3600)} hours; "
    text += f"fastest on so many: a batch of {best:,}, {number_text(seconds_to_target(best, ranks, job) / 3600)} hours."
    shown = sorted({1, 64, 1024, ranks})
    title = (
        f"{LEAST_STEPS:,} steps at least, {seconds_text(EXAMPLE_S)} an example, {amount_text(GRADIENTS)} of gradients"
    )
    args = TRAINED_WITH, job, shown, (), (batch, ranks), None, title
    return draw_picture(draw_target, *args, text=text, height=drawing.HEIGHT)


# -- 08: memory -------------------------------------------------------------------------------------------------------

SHAPES = {  # layers, width, heads, vocabulary; but for 7B and 175B: Narayanan et al. 2021, arXiv:2104.04473, table 1
    "1.7B": (24, 2304, 24, 51200),
    "7B": (32, 4096, 32, 128256),  # a GPT with the layers, width and vocabulary of Llama 3 8B
    "18B": (40, 6144, 48, 51200),
    "39B": (48, 8192, 64, 51200),
    "76B": (60, 10240, 80, 51200),
    "GPT-3 175B": (96, 12288, 96, 51200),
    "530B": (105, 20480, 128, 51200),
    "1T": (128, 25600, 160, 51200),
}
MIXED = "mixed: 2 + 2 + 12"
RECIPES = {  # bytes per parameter: parameter + gradient + optimizer; a key of TRAININGS
    MIXED: "mixed adam",
    "FSDP2: 4 + 4 + 8": "fsdp2 adam",
    "Megatron: 2 + 4 + 12": "megatron adam",
    "32 bits: 4 + 4 + 8": "adam",
}
RECIPE = "bytes of a parameter + its gradient + its optimizer state, before ZeRO divides them"
RECOMPUTED: dict[str, bool | str] = {"nothing": False, "attention": "attention", "blocks": "blocks"}
GPU_MEMORY = (16, 24, 32, 40, 48, 80, 96, 141, 192)  # GB


@functools.lru_cache(maxsize=32)
def _model_spec(model: str, recipe: str) -> Spec:
    """Return the Spec, with dropout and with attention that keeps its weights, as in Korthikanti et al. 2022."""
    layers, width, heads, vocabulary = SHAPES[model]
    return gpt(model, layers, width, heads, vocabulary, TOKENS, RECIPES[recipe], eager=True)


@functools.lru_cache(maxsize=4096)
def _fullest(model: str, recipe: str, stage: int, dp: int, recompute: str, tp: int, pp: int, k: int) -> Memory:
    """Return the Memory of the fullest rank, k micro-batches of a sequence. Raises ValueError if tp splits heads."""
    spec = _model_spec(model, recipe)
    if spec.heads % tp:
        raise ValueError(f"{spec.heads} heads of {model} cannot be shared by tp={tp} ranks: tp must divide them")
    every = memory_of(spec, grid_of(dp, pp, tp), "1f1b", recompute=RECOMPUTED[recompute], micro_batches=k, stage=stage)
    return max(every, key=lambda held: held.total)


def sent_in_step(model: str, recipe: str, stage: int, dp: int, tp: int, pp: int, k: int) -> float:
    """Return bytes that a rank sends over dp in a step of k micro-batches."""
    spec = _model_spec(model, recipe)
    parameters = _fullest(model, recipe, 0, 1, "nothing", tp, pp, k).parameters / spec.bytes_each.parameters
    gathers, scatters = collectives_per_step(stage, k)
    gathered = spec.bytes_each.activations if stage else spec.sent_each  # parameters; in an all-reduce gradients
    return (dp - 1) / dp * parameters * (gathers * gathered + scatters * spec.sent_each)


def _memory(
    model: str,
    recipe: str,
    stage: int,
    ranks: int,
    micro_batches: int,
    recompute: str,
    tp: int,
    pp: int,
    memory: int,
) -> Picture:
    """Draw the ledger of a rank and what it sends, at each stage of ZeRO, and at this one for any number of ranks."""
    dp = ranks // (tp * pp)
    if dp * tp * pp != ranks:
        raise ValueError(f"tp={tp} x pp={pp} = {tp * pp} does not divide {counted(ranks, 'rank')}")
    how = recompute, tp, pp, micro_batches
    stages = [_fullest(model, recipe, n, dp, *how) for n in range(4)]
    sent = [sent_in_step(model, recipe, n, dp, tp, pp, micro_batches) for n in range(4)]
    counts = [tp * pp * n for n in doublings(1, 4096)]
    curves = [[_fullest(model, recipe, n, k // (tp * pp), *how).total for k in counts] for n in range(4)]
    held = stages[stage]
    parts = ", ".join(f"{name} {amount_text(nbytes)}" for name, nbytes in held._asdict().items() if nbytes)
    least = next((k for k, nbytes in zip(counts, curves[stage], strict=True) if nbytes <= memory * 1e9), None)
    fit = "it fits" if held.total <= memory * 1e9 else "it does NOT fit"
    enough = f"it fits from {counted(least, 'rank')} on" if least else "no number of ranks makes it fit"
    text = f"{parts}: {amount_text(held.total)} a rank, {fit} into {memory} GB; like this {enough}. "
    gathers, scatters = collectives_per_step(stage, micro_batches)
    batch = counted(micro_batches, "micro-batch", "micro-batches")
    what = f"{counted(scatters, 'reduce-scatter')}, {counted(gathers, 'all-gather')}" if stage else "an all-reduce"
    over_dp = f"{amount_text(sent[stage])} over dp: {what}" if dp > 1 else "nothing over dp"
    text += f"A step of {batch} sends {over_dp}."
    title = f"{model}, dp {dp} x tp {tp} x pp {pp}, {batch} of a sequence of {TOKENS:,} tokens"
    args = stages, stage, counts, curves, ranks, memory, sent, title
    return draw_picture(drawing.draw_ledger, *args, text=text, height=3.9)


# -- 09: tensor parallel ----------------------------------------------------------------------------------------------

TP = doublings(1, 64)
HEAD = 128  # numbers of a head: GPT-3, Brown et al. 2020, table 2.1
TOKENS = 2048
INSIDE = ("nvlink_4", "nvlink_3", "pcie_5", "pcie_4", "infiniband_ndr")
BETWEEN = "infiniband_ndr"
NODE_RANKS = 8


def layer_on(tp: int, d: int, link: str) -> tuple[float, float, float]:
    """Return (s of computing, s of sending, bytes sent) of forward and backward of one layer on each of `tp` H100."""
    layer, each = transformer_block("", d, d // HEAD, TOKENS), TRAININGS["mixed adam"].activations
    network = Islands(
        NODE_RANKS, interconnect(link), interconnect(BETWEEN), nics=NODE_RANKS, flops_per_s=EFFICIENCY * PEAKS["H100"]
    )
    alpha, beta = message_cost(network, grid_of(tp=tp), "tp")
    sums = [cost.all_reduce(tp, n * each) for n in (*layer.forward_all_reduces, *layer.backward_all_reduces)]
    return (
        3 * layer.flops_on(tp) / network.flops_per_s,
        sum(c.seconds(alpha, beta) for c in sums),
        sum(c.nbytes_sent for c in sums),
    )


def _tensor(tp: int, hidden_size: int, link: str) -> Picture:
    """Draw the time of one layer that is cut among ranks. Raises ValueError if tp does not divide its heads."""
    heads = hidden_size // HEAD
    if heads % tp:
        raise ValueError(f"{heads} heads of {HEAD} cannot be shared by tp={tp} ranks: tp must divide them")
    counts = [n for n in TP if heads % n == 0]
    times = np.array([layer_on(n, hidden_size, link)[:2] for n in counts])
    compute, sending, nbytes = layer_on(tp, hidden_size, link)
    speedup = times[0].sum() / (compute + sending)
    over = f"{link} in a node" if tp <= NODE_RANKS else f"{BETWEEN} between nodes of {NODE_RANKS}"
    text = f"tp {tp}: {seconds_text(compute)} of computing and {seconds_text(sending)} of sending "
    text += f"{amount_text(nbytes)} over {over}; {speedup:.2f} times as fast as one GPU, {speedup / tp:.0%} each."
    args = counts, times, tp, NODE_RANKS, (link, BETWEEN)
    return draw_picture(
        drawing.draw_tensor, *args, f"one layer, d = {hidden_size:,}, {TOKENS:,} tokens, H100", text=text
    )


# -- 10: pipelines ----------------------------------------------------------------------------------------------------

ORDERS = ("gpipe", "1f1b", "interleaved", "zero_bubble_h1", "zero_bubble_v", "dualpipe", "gems_master")
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@functools.lru_cache(maxsize=4096)
def bubble_of(schedule: str, p: int, m: int, backward: float) -> float | None:
    """Return the share of the ranks' time in which they wait; None if the schedule cannot have these numbers."""
    chunks = schedules.CATALOG[schedule].chunks or 2
    stage: tuple[float, ...] = (1 / chunks, backward / chunks, backward / 2 / chunks, backward / 2 / chunks)
    try:
        times = schedules.evaluation.pipeline_time(schedule, p, m, [stage] * (p * chunks), 0)
        return 1 - m * (1 + backward) / times.seconds
    except ValueError:
        return None


def _pipeline(stages: int, micro_batches: int, backward: float, schedule: str) -> Picture:
    """Draw a schedule: forward takes 1, backward `backward`, and each of its two gradients half of that."""
    plan = schedules.build(schedule, stages, micro_batches)
    times = schedules.evaluate(plan, 1, backward, backward / 2, backward / 2)
    curves = {
        name: [(m, 100 * b) for m in MICRO_BATCHES if (b := bubble_of(name, stages, m, backward)) is not None]
        for name in ORDERS
    }
    held = counted(max(times.peak), "micro-batch", "micro-batches") + (", half a stage each" if plan.chunks > 1 else "")
    text = f"{plan.name}: {number_text(float(times.makespan))} units of time, bubble {times.bubble:.1%}; "
    text += f"a rank keeps the activations of at most {held}."
    args = plan, times, curves, micro_batches
    return draw_picture(drawing.draw_pipeline, *args, text=text, height=drawing.PIPELINE_HEIGHT)


# -- 11: what a model leaves open -------------------------------------------------------------------------------------

PUBLISHED, PUBLISHED_SECONDS, PUBLISHED_SHARES = (8, 16, 8), 32, tuple(k / 40 for k in range(12, 29))
GPUS, FASTEST = 1024, 3


@functools.cache
def _fastest(machine: str) -> list[tuple[int, int, int]]:
    """Return the published grid, and the fastest that fit."""
    rows = []
    for grid in grids(GPUS):
        with suppress(ValueError):
            rows.append((price(*grid, machine=machine), grid))
    fitting = sorted((row.seconds, grid) for row, grid in rows if row.fits)
    return [PUBLISHED, *[grid for _, grid in fitting if grid != PUBLISHED][:FASTEST]]


@functools.lru_cache(maxsize=1024)
def _step_seconds(grid: tuple[int, int, int], machine: str, share: float) -> float:
    """Return s of a step of GPT-3 if layers reach this share of the peak."""
    return price(*grid, machine=machine, of_peak=share).seconds


def _step_of_gpt3(hardware: str, share_of_peak: float) -> Picture:
    """Draw the step of GPT-3 on several grids against the share of the peak that layers reach."""
    shares = sorted({*PUBLISHED_SHARES, share_of_peak})
    curves = {grid: [_step_seconds(grid, hardware, share) for share in shares] for grid in _fastest(hardware)}
    now = {grid: _step_seconds(grid, hardware, share_of_peak) for grid in curves}
    best = min(now, key=lambda grid: now[grid])
    text = f"{share_of_peak:.1%} of the peak: the published grid takes {number_text(now[PUBLISHED])} s, "
    text += f"{now[PUBLISHED] / PUBLISHED_SECONDS - 1:+.0%} of the {PUBLISHED_SECONDS} s published for A100; "
    text += f"the fastest that fits, {_named_grid(best)}, {number_text(now[best])} s."
    named = {_named_grid(grid): curve for grid, curve in curves.items()}
    title = f"GPT-3 on {GPUS:,} GPUs, {MACHINES[hardware].name}"
    args = np.array(shares), named, share_of_peak, PUBLISHED_SECONDS, title
    return draw_picture(drawing.draw_share, *args, text=text, height=drawing.HEIGHT)


def _named_grid(grid: tuple[int, int, int]) -> str:
    """Return a grid in words."""
    return "dp {}, pp {}, tp {}".format(*grid)


# -- 15: copies of the state in the memory of other hosts ------------------------------------------------------------

LLAMA3, HOSTS, IN_A_CHECKPOINT = 405e9, 2048, 12  # parameters; hosts of 8 GPUs; bytes: weights, moments, in float32
COPIES = tuple(range(5))


def _copies(copies: int, mtbf: float, write: float, together: float) -> Picture:
    """Draw goodput against the memory of a host, for a job such as Llama 3 405B on 16,384 GPUs."""
    job = neighbors.ReplicatedJob(mtbf, write, LLAMA3 * IN_A_CHECKPOINT / HOSTS, together=together)
    shares = [job.goodput(n) for n in COPIES]
    text = f"{counted(copies, 'copy', 'copies')}: {job.memory(copies) / 1e9:.1f} GB of memory per host, "
    text += f"goodput {shares[copies]:.1%}; without a copy {shares[0]:.1%}. "
    text += f"The file is needed after {number_text(100 * job.all_lost(copies))}% of the failures."
    memory = [job.memory(n) / 1e9 for n in COPIES]
    title = f"{_in_words(LLAMA3)} parameters on {HOSTS:,} hosts, a failure every {_hours(mtbf)}"
    return draw_picture(drawing.draw_copies, memory, shares, copies, title, text=text, height=drawing.HEIGHT)


def _hours(seconds: float) -> str:
    """Return seconds as text in hours."""
    return f"{number_text(seconds / 3600)} h"


# -- the table --------------------------------------------------------------------------------------------------------

EXPLORERS: dict[str, Explorer] = {
    "days": (
        {
            "parameters": Control(logarithmic(1e8, 1e13), 175e9, _in_words),
            "tokens": Control(logarithmic(1e9, 1e14), 300e9, _in_words),
            "accelerators": Control(COUNTS, 1024, "{:,}".format),
            "hardware": Control(tuple(PEAKS), "A100"),
            "share_of_peak": Control(
                tuple(k / 100 for k in range(5, 75, 5)), 0.35, _percent, label="share of peak (MFU)"
            ),
        },
        _days,
    ),
    "batch": (
        {**DESCENT, "batch": DESCENT["batch"]._replace(start=32)},
        functools.partial(_descent, epochs=EPOCHS),
    ),
    "rate": (DESCENT, _descent),
    "graph": (
        {"graph": Control(COMPARED, "ring"), "ranks": Control(tuple(range(3, 33)), 16), "seed": Control(SEEDS, 0)},
        _graph,
    ),
    "message": (
        {"size": Control(doublings(8, 2**26), 2**16, bytes_text), "alpha": ALPHA, "bandwidth": BANDWIDTH},
        _message,
    ),
    "algorithms": (
        {
            "ranks": Control(RANKS, 16),
            "size": Control(SIZES, 2**20, bytes_text),
            "alpha": ALPHA._replace(start=3e-6),
            "bandwidth": BANDWIDTH._replace(start=50.0),
        },
        _algorithms,
    ),
    "bytes": (
        {
            "ranks": Control(ON_A_NODE, 2),
            "size": Control(doublings(2**20, 2**30), 2**24, bytes_text),
            "memory": BANDWIDTH._replace(values=logarithmic(10, 5000), start=100.0),
            "link": BANDWIDTH._replace(start=20.0),
        },
        _memory_bytes,
    ),
    "segments": (
        {
            "ranks": Control((3, 4, 6, 8, 12, 16), 8),
            "size": Control(doublings(2**10, 2**28), 2**22, bytes_text),
            "segments": Control(doublings(1, 1024), 4),
            "alpha": ALPHA,
            "bandwidth": BANDWIDTH,
        },
        _segments,
    ),
    "buckets": (
        {
            "bucket": Control(LIMITS, 5_000_000, amount_text),
            "layers": Control((4, 8, 12, 24, 48, 96), 48),
            "ratio": Control(logarithmic(0.1, 10), 1.0, number_text),
        },
        _buckets,
    ),
    "target": (
        {
            "batch": Control(TRAINED_WITH, 1024, "{:,}".format),
            "ranks": Control(TRAINED_ON, 64, "{:,}".format),
            "noise_scale": Control(logarithmic(10, 1e6, (1, 3)), 1000.0, "{:,.0f}".format),
            "link": BANDWIDTH._replace(start=3.0),
        },
        _target,
    ),
    "memory": (
        {
            "model": Control(tuple(SHAPES), "7B"),
            "recipe": Control(tuple(RECIPES), MIXED, meaning=RECIPE),
            "stage": Control((0, 1, 2, 3), 1),
            "ranks": Control(doublings(1, 16384), 64, "{:,}".format),
            "micro_batches": Control(doublings(1, 64), 16),
            "recompute": Control(tuple(RECOMPUTED), "nothing"),
            "tp": Control((1, 2, 4, 8), 1),
            "pp": Control((1, 2, 4, 8, 16), 1),
            "memory": Control(GPU_MEMORY, 80, "{} GB".format),
        },
        _memory,
    ),
    "tensor": (
        {
            "tp": Control(TP, 8),
            "hidden_size": Control((1024, 2048, 4096, 6144, 8192, 12288, 16384), 12288, "{:,}".format),
            "link": Control(INSIDE, "nvlink_4"),
        },
        _tensor,
    ),
    "blocks": (
        {
            "block": Control(BLOCKS, 2**22, bytes_text),
            "alpha": ALPHA,
            "bandwidth": Control(BANDWIDTH.values, 10.0, BANDWIDTH.text),
            "copies": Control(BANDWIDTH.values, 10.0, BANDWIDTH.text),
        },
        _blocks,
    ),
    "pipeline": (
        {
            "stages": Control((2, 3, 4, 6, 8), 4),
            "micro_batches": Control(MICRO_BATCHES, 8),
            "backward": Control((1.0, 1.5, 2.0, 2.5, 3.0), 2.0, lambda ratio: f"{number_text(ratio)} forwards"),
            "schedule": Control(ORDERS, "1f1b"),
        },
        _pipeline,
    ),
    "share": (
        {
            "hardware": Control(("dgx_a100", "dgx_h100"), "dgx_a100"),
            "share_of_peak": Control(
                PUBLISHED_SHARES, EFFICIENCY, lambda share: f"{share:.1%}", label="share of peak (HFU)"
            ),
        },
        _step_of_gpt3,
    ),
    "copies": (
        {
            "copies": Control(COPIES, 1),
            "mtbf": Control(tuple(3600.0 * h for h in (1, 2, 3, 4, 6, 8, 12, 24)), 10_800.0, _hours),
            "write": Control((5, 10, 20, 30, 60, 120, 300), 30, seconds_text),
            "together": Control((0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), 0.05, _percent),
        },
        _copies,
    ),
    **explore_models.EXPLORERS,
    **explore_inference.EXPLORERS,
}


Points: TypeAlias = list[tuple[float, float]]
SEVEN: dict[str, Value] = {"model": "7B", "recipe": MIXED, "ranks": 64, "tp": 1, "pp": 1}
GPT3: dict[str, Value] = {"parameters": 175e9, "tokens": 300e9, "hardware": "A100", "share_of_peak": 0.5}
MARKS: dict[str, tuple[int, dict[str, Value], Callable[..., Points]]] = {
    # explorer: (axes, the values of sliders for which the guess was made, its points)
    "days": (0, GPT3, lambda days, values: [(1, days * drawing.DAY)]),
    "graph": (1, {"ranks": 16}, lambda apart, values: [(GUESSED, value) for value in apart.values()]),
    "message": (0, {}, lambda times, values: list(asked_times(times).items())),
    "buckets": (1, {}, lambda share, values: [(values["bucket"], share * step_with_buckets(**values).communication)]),
    "memory": (0, SEVEN, lambda guess, values: [(int(name[-1]), 1e9 * GB) for name, GB in guess.items()]),
    "pipeline": (2, {"stages": 4}, lambda guess, values: [(8, 100 * guess["bubble"])]),
    "share": (0, {"hardware": "dgx_a100"}, lambda guess, values: [(100 * EFFICIENCY, guess["seconds"])]),
    "published": (1, {}, lambda guess, values: [(explore_models.GUESSED, 1e9 * GB) for GB in guess.values()]),
    "kv_cache": (0, explore_inference.GUESSED, lambda GB, values: [(values["batch"], 1e9 * GB)]),
}


def explore(name: str, prediction: float | dict[str, float] | None = None, **start: Value) -> Explored:
    """Play with a model: sliders above a picture, and its numbers in one line; in a plain terminal the line is printed.

        lab.explore("rate")                           gradient descent: learning rate and batch
        lab.explore("days", parameters=70e9)          ... which starts at this value
        lab.explore("rate").set(rate=0.5)             the same in a terminal

    Args:    name: of EXPLORERS; start: {name of a slider: value}.
             prediction: your guess, marked in every picture that it was made for: days of GPT-3 on one A100 ("days"),
             as for lab.gossip ("graph"), lab.ping_pong ("message"), lab.designs ("buckets"), lab.pipeline ("pipeline"),
             lab.search ("share"); {"stage 0": GB, "stage 3": GB} of a 7B model on 64 ranks ("memory"),
             {model: GB} of the cache of 131,072 tokens ("published"), GB of the cache of 32 × 8,192 ("kv_cache").
    Returns: Explored, with .values, .text, .set(...), .save(path).
    Raises:  LookupError for an unknown name, ValueError for a value or a slider that is none.
    """
    if name not in EXPLORERS:
        raise LookupError(f"nothing to explore is called {name!r}: {', '.join(EXPLORERS)}")
    controls, answer = EXPLORERS[name]
    for key in start:
        require_known(name, controls, key)
    begun = {key: controls[key].at(key, value) for key, value in start.items()}
    if prediction is not None:
        if name not in MARKS:
            raise ValueError(f"{name} marks no guess: {', '.join(MARKS)} do")
        answer = functools.partial(_marked, answer, name, prediction)
    explored = Explored(name, controls | begun, answer)
    show_sliders(explored)
    return explored


def _marked(answer: Answer, name: str, guess: object, **values: Value) -> Picture:
    """Draw the answer, with the guess in it if that was about these values. Raises ValueError for what is no guess."""
    axes, made_for, points_of = MARKS[name]
    try:
        points = points_of(guess, values)
    except (TypeError, KeyError, AttributeError):
        raise ValueError(f"{guess!r} is no prediction for {name}") from None
    picture = answer(**values)
    if made_for.items() <= values.items():
        drawing.mark(picture.figure.axes[axes], points)
    return picture
