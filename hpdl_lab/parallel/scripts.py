"""The training scripts that notebooks 06, 09, 11 and 12 run on their ranks: all are functions of a communicator.

Notebooks hold the scripts of 06 and 11 as they are here, in cells of their own.

horovod_script, ddp_script     06    a GPT as people write it elsewhere, for Horovod and for PyTorch's DDP
train_gpt, convolve_strips     09    a GPT whose layers are shared, an image whose rows are
script, hybrid_script          11    a GPT on one rank, and the same with three changed lines on a mesh
route_tokens, train_experts    12    tokens that travel to experts, a DeepSeek-V3 whose experts are shared
attend_chunks                  12    attention of a sequence that ranks share
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, cross_entropy, pad

from ..comm.base import Comm
from ..data.dataset import Dataset
from ..data.loading import batch_indices, shard_indices
from ..mesh import DeviceMesh
from ..models import build_for
from ..models.attention import Causal
from ..models.experts import GAMMA, MixtureOfExperts
from . import checkpoint
from .consensus import require_sums_of
from .context import Part, partial_attention
from .data_parallel import broadcast_parameters
from .ddp import Communication, Hook, ddp_hook, guarded
from .experts import LocalExperts, expert_parallel, mixtures_of, update_biases
from .grid.machine import EFFICIENCY, MACHINES, grid_of
from .grid.model import Prediction, predict_step
from .grid.search import micro_batches as count_of_micro_batches
from .grid.simulation import simulate_step
from .grid.spec import SPECS
from .horovod import DistributedOptimizer
from .hybrid.model import HybridParallel
from .optimizer_state import OptimizerState
from .reducer import AllReduce
from .tensor.cuts import add_partial_gradients
from .tensor.model import tensor_parallel
from .tensor.spatial import edges_of
from .tensor.ways import Plugged

LR = 3e-3
HaloExchange: TypeAlias = Callable[[Comm, Tensor, Sequence[tuple[int, int]]], Tensor]
ExpertLayer: TypeAlias = Callable[[Comm, Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]], Tensor]
RingOf: TypeAlias = Callable[..., dict[int, Part]]  # as context.attention_around_ring


def horovod_script(comm: Comm, data: Dataset, steps: int = 10, timeline: bool = False) -> list[float]:
    """Train a tiny GPT by DistributedOptimizer; return this rank's mean loss of each step.

    The lines 1, 2 and 3 turn a script for one rank into a script for many. Also, each
    rank reads its own share of the data.

    Args:    data: a data.dataset.Dataset of tokens.
             timeline: True to record Horovod's activities for each gradient.
    """
    # 1, which lab.run has done: comm = hpdl_lab.comm.world()
    model = build_for(data, "gpt", seed=comm.rank)
    broadcast_parameters(comm, model)  # 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    optimizer = DistributedOptimizer(optimizer, comm, model.named_parameters(), timeline=timeline)  # 3
    return [step(model, optimizer, x, y) for x, y in shares(comm, data, steps)]


def ddp_script(
    comm: Comm, data: Dataset, steps: int = 10, all_reduce: AllReduce | None = None, hook: Hook = ddp_hook
) -> list[float]:
    """Train a tiny GPT by PyTorch's DistributedDataParallel; `hook` sends its gradients.

    Args:    data, steps: as in horovod_script.
             all_reduce: f(comm, x), for the hook; default the communicator's own.
             hook: a function like ddp_hook.
    Raises:  ValueError on simulated ranks, because DDP needs a process for each rank;
             ValueError if all_reduce does not add.
    """
    from torch.nn.parallel import DistributedDataParallel  # takes torch.distributed along

    from hpdl_lab.comm.torch.group import process_group

    with process_group(comm):
        model = DistributedDataParallel(build_for(data, "gpt", seed=comm.rank))
        state = Communication(comm) if all_reduce is None else Communication(comm, all_reduce)
        require_sums_of(comm, state.all_reduce, [torch.float32])
        model.register_comm_hook(state, guarded(hook))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        return [step(model, optimizer, x, y) for x, y in shares(comm, data, steps)]


def shares(comm: Comm, data: Dataset, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's (x, y) of each batch of 32."""
    for indices in islice(batch_indices(len(data.train_y), 32), steps):
        mine = shard_indices(indices, comm.rank, comm.size)
        yield data.train_x[mine], data.train_y[mine]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """Take one step on the mean loss of this rank's share; returns that loss."""
    optimizer.zero_grad()
    loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


class TensorTrained(NamedTuple):
    """A rank after training.

    losses:  of the whole batch, one per step.
    held, whole: numbers in the parameters of this rank, and of the whole model.
    forward, backward: elements of every all_reduce of the last step, in order.
    """

    losses: list[float]
    held: int
    whole: int
    forward: list[int]
    backward: list[int]


def train_gpt(comm: Comm, data: Dataset, steps: int = 3, heads: int = 4, sequence: bool = False) -> TensorTrained:
    """Train a tiny GPT in float64, whose layers are all shared by all ranks; returns TensorTrained.

    Args:    data: a data.dataset.Dataset of tokens, the same on every rank: all ranks see the whole batch.
             heads: of each layer, which the ranks must divide; sequence: sequence parallel.
    """
    calls: list[int] = []

    def noted(comm: Comm, x: Tensor) -> Tensor:
        calls.append(x.numel())
        return comm.all_reduce(x)

    whole = build_for(data, "gpt", heads=heads, dtype="float64")
    plugged = cast(Comm, Plugged(comm, all_reduce=noted))
    model = tensor_parallel(plugged, whole, sequence=sequence)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses, forward, backward = [], [], []
    for indices in islice(batch_indices(len(data.train_y), 4), steps):
        x, y = data.train_x[indices], data.train_y[indices]
        calls.clear()
        with comm.trace.span("forward"):
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        forward = calls.copy()
        calls.clear()
        optimizer.zero_grad()
        with comm.trace.span("backward"):
            loss.backward()
        backward = calls.copy()
        with comm.trace.span("update"):
            add_partial_gradients(comm, model)
            optimizer.step()
        losses.append(loss.item())
    held, all_of_them = (sum(p.numel() for p in m.parameters()) for m in (model, whole))
    return TensorTrained(losses, held, all_of_them, forward, backward)


class Convolved(NamedTuple):
    """off: the largest difference from one rank with the whole images; rows: of this rank; nbytes: that it sent."""

    off: float
    rows: int
    nbytes: int


def convolve_strips(comm: Comm, halo_exchange: HaloExchange, images: Tensor, kernel: Tensor) -> Convolved:
    """Convolve images, one strip on each rank, with an attendee's halo_exchange; returns Convolved.

    Args:    images: (b, c, h, w), kernel: (c_out, c, k, k) with an odd k, both the same on every rank.
    """
    edges, halo = edges_of(images.shape[2], comm.size), kernel.shape[2] // 2
    mine = slice(edges[comm.rank], edges[comm.rank + 1])
    begun = len(comm.trace.log)
    strip = halo_exchange(comm, images[:, :, mine].contiguous(), [(halo, halo)] * comm.size)
    nbytes = sum(e.nbytes for e in comm.trace.events[begun:] if e.op == "send")
    y = conv2d(strip, kernel, padding=(0, halo))
    right = conv2d(pad(images, (halo,) * 4), kernel)[:, :, mine]
    return Convolved(float((y - right).abs().max()), y.shape[2], nbytes)


class Routed(NamedTuple):
    """off: the largest difference from one rank; nbytes: that this rank sent; chosen: (n, k), its tokens' experts."""

    off: float
    nbytes: int
    chosen: Tensor


@torch.no_grad()
def route_tokens(comm: Comm, expert_layer: ExpertLayer, layer: MixtureOfExperts, x: Tensor) -> Routed:
    """Send this rank's share of the tokens x (n, d) to the experts of `layer`, one per rank; returns Routed.

    Args:    expert_layer: an attendee's; layer: without shared expert, x: both the same on every rank.
    Raises:  ValueError if there are not as many experts as ranks.
    """
    if len(layer.router.bias) != comm.size:
        raise ValueError(f"{len(layer.router.bias)} experts on {comm.size} ranks: one for each rank is needed")
    mine = LocalExperts(comm, layer.experts)
    tokens, right = (t.tensor_split(comm.size)[comm.rank] for t in (x, layer(x)))
    chosen, weights = layer.router(tokens)
    begun = len(comm.trace.log)
    y = expert_layer(comm, tokens, chosen, weights, lambda there: mine(there, torch.tensor([len(there)])))
    nbytes = sum(e.nbytes for e in comm.trace.events[begun:] if e.op == "send")
    return Routed(float((y - right).abs().max()), nbytes, chosen)


class ExpertsTrained(NamedTuple):
    """A rank after training.

    losses: of the whole batch, one per step; held, whole: numbers in the parameters of this rank, of the whole model.
    loads:  [(E,) copies of each expert, of all ranks] in the first layer that has experts, one per step.
    """

    losses: list[float]
    held: int
    whole: int
    loads: list[Tensor]


def train_experts(comm: Comm, data: Dataset, steps: int = 3, gamma: float = GAMMA) -> ExpertsTrained:
    """Train a tiny DeepSeek-V3 in float64, whose experts are shared by all ranks, as each batch is.

    Args:    data: a data.dataset.Dataset of tokens, the same on every rank; gamma: the bias update speed.
    """
    whole, replicas = build_for(data, "deepseek", dtype="float64"), comm.split(comm.rank)  # each expert is there once
    model = expert_parallel(comm, whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses, loads = [], []
    for indices in islice(batch_indices(len(data.train_y), 16), steps):
        mine = shard_indices(indices, comm.rank, comm.size)
        optimizer.zero_grad()
        y = data.train_y[mine]
        loss = cross_entropy(model(data.train_x[mine]).flatten(0, 1), y.flatten(), reduction="sum")
        loss = loss / data.train_y[indices].numel()
        loss.backward()
        add_partial_gradients(comm, model)
        optimizer.step()
        loads.append(next(mixtures_of(model)).counts.clone())
        update_biases(replicas, model, gamma)
        losses.append(comm.all_reduce(loss.detach()).item())
    held, all_of_them = (sum(p.numel() for p in m.parameters()) for m in (model, whole))
    return ExpertsTrained(losses, held, all_of_them, loads)


class Attended(NamedTuple):
    """The result of one rank. off: largest difference from full attention; nbytes: that it has sent.

    work: what it computed, in blocks of as many scores as two chunks have; a causal block is half.
    """

    off: float
    nbytes: int
    work: float


def attend_chunks(comm: Comm, ring: RingOf, contiguous: bool = False, n: int = 32) -> Attended:
    """Compute causal attention in a sequence of 2p chunks by `ring`, an attendee's; a block takes a virtual second.

    Args:    ring: as parallel.context.attention_around_ring; n: tokens of a chunk.
             contiguous: give each rank two chunks that follow each other, not the ring's choice.
    """
    shape, generator = (1, 4, 2 * comm.size * n, 16), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    whole, work, begun = Causal()(q, k, v), 0.0, len(comm.trace.log)

    def read(c: int) -> tuple[Tensor, ...]:
        return tuple(x[:, :, c * n : (c + 1) * n] for x in (q, k, v))

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
        nonlocal work
        blocks = q.shape[2] * k.shape[2] / n**2 * (0.5 if causal else 1)
        work += blocks
        comm.compute(blocks)
        return partial_attention(q, k, v, causal)

    how = {"holds": lambda rank: (2 * rank, 2 * rank + 1)} if contiguous else {}
    found = ring(comm, read, attend, **how)
    off = max(float((out - whole[:, :, c * n : (c + 1) * n]).abs().max()) for c, (out, _) in found.items())
    return Attended(off, sum(e.nbytes for e in comm.trace.events[begun:] if e.op == "send"), work)


class Trained(NamedTuple):
    """A rank after training. losses: of the whole batch, one per step; held: numbers in this rank's parameters.

    seconds: median of a step, without the first; 0 for a single step.
    """

    losses: list[float]
    held: int
    seconds: float


def script(comm: Comm, data: Dataset, steps: int = 3) -> Trained:
    """Train a tiny GPT on one rank, as everybody does; returns Trained."""
    model = build_for(data, "gpt", dtype="float64")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for x, y in steps_of(data, 0, steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, sum(p.numel() for p in model.parameters()), 0.0)


def hybrid_script(
    comm: Comm, data: Dataset, grid: dict[str, int], steps: int = 3, load: str | None = None, save: str | None = None
) -> Trained:
    """Train the same GPT on a mesh: lines 1 and 2 are new, and line 3 replaces forward, loss and backward.

    Args:    data: a data.dataset.Dataset of tokens, the same on every rank; grid: {"dp": 2, "pp": 2} for four ranks.
             load: path of a checkpoint from which training goes on, written on any grid, or None.
             save: path of the checkpoint to write after the last step, or None.
    Returns: Trained.
    """
    mesh = DeviceMesh(comm, **grid)  # 1
    model = build_for(data, "gpt", dtype="float64")
    model = HybridParallel(model, mesh, data.train_x[:16], micro_batches=4)  # 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    begun = checkpoint.restore(comm, load, model, OptimizerState(model, optimizer)) if load else 0
    losses, times = [], [comm.trace.clock()]
    for x, y in steps_of(data, begun, steps):
        loss = model.step(x, y)  # 3
        optimizer.step()
        losses.append(loss)
        times.append(comm.trace.clock())
    taken = [b - a for a, b in zip(times[1:], times[2:], strict=False)]
    if save:
        checkpoint.save(comm, save, model, OptimizerState(model, optimizer), begun + steps)
    return Trained(losses, sum(p.numel() for p in model.parameters()), median(taken) / 1e9 if taken else 0.0)


def steps_of(data: Dataset, begun: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (x, y) of so many batches, after the batches of the steps that have been taken."""
    for indices in islice(batch_indices(len(data.train_y), 16), begun, begun + steps):
        yield data.train_x[indices], data.train_y[indices]


def price(
    dp: int,
    pp: int,
    tp: int,
    model: str = "gpt3",
    machine: str = "dgx_a100",
    batch: int = 1536,
    recompute: bool = True,
    of_peak: float = EFFICIENCY,
) -> Prediction:
    """Predict what a step of a published model costs on a grid of GPUs: a grid.model.Prediction, .seconds and .nbytes.

    Micro-batches of one sequence, 1F1B. of_peak: the one number that is assumed, the share of a GPU's peak that layers
    reach if they neither wait nor send; the speeds of MACHINES are for 0.5.

    Raises:  ValueError if the grid cannot be, or `of_peak` is not in (0, 1]; LookupError for a name that is none.
    """
    _require_known(model, machine)
    if not 0 < of_peak <= 1:
        raise ValueError(f"of_peak={of_peak}: a share of the peak is needed, above 0 and at most 1")
    m = count_of_micro_batches(batch, dp, 1)
    grid, of = grid_of(dp, pp, tp), MACHINES[machine]
    if of_peak != EFFICIENCY:
        network = of.network
        faster = network.flops_per_s * of_peak / EFFICIENCY
        of = replace(of, network=replace(network, flops_per_s=faster))  # pyrefly: ignore[bad-specialization]
    return predict_step(SPECS[model], grid, "1f1b", m, recompute, machine=of, batch=batch)


def simulated_step(
    dp: int, pp: int, tp: int, micro_batches: int, model: str = "gpt3", machine: str = "dgx_a100"
) -> tuple[float, float]:
    """Return (s with every message, s by the model) of one step with micro-batches of one example each, recomputed."""
    _require_known(model, machine)
    spec, grid, of, batch = SPECS[model], grid_of(dp, pp, tp), MACHINES[machine], dp * micro_batches
    predicted = predict_step(spec, grid, "1f1b", micro_batches, recompute=True, machine=of, batch=batch)
    return simulate_step(spec, grid, "1f1b", micro_batches, recompute=True, machine=of, batch=batch), predicted.seconds


def _require_known(model: str, machine: str) -> None:
    """Raise LookupError unless these are names of a published model and of a machine."""
    for what, name, known in (("model", model, SPECS), ("machine", machine, MACHINES)):
        if name not in known:
            raise LookupError(f"no {what} is called {name!r}: {', '.join(known)}")
