"""The Spec of any model, read off the model itself; the Machine of this one, timed; a few steps of training on a grid.

The model is cut into its layers, and each is run once on an example: what does autograd keep, how large is its output?
Then the same for one tensor-parallel shard of it, on a communicator that sends nothing and writes down what it should:
what a shard does not have is what tp divides.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn, TypeAlias, cast, overload

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ...collectives import cost
from ...collectives.sweep import ping_pong
from ...comm.base import Comm, Results, Row, Work
from ...comm.buffers import ArrayT, copy_into, dtype_name, new_like
from ...comm.network import Switch
from ...measure import measure
from ...mesh import AXES, DeviceMesh, Grid
from ...models.attention import Attend, attentions_of
from ...models.experts import MixtureOfExperts
from ...schedules import TimedAction
from ...trace import Event, Trace, now_ns
from ...units import GIB
from ..hybrid.model import HybridParallel, cross_entropy_per_answer, shard_and_loss
from ..pipeline.run_schedule import timed_actions
from ..pipeline.split import Layers
from .machine import Machine, replicas
from .memory import Memory, SavedBytes
from .spec import Layer, Spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...comm.buffers import Array

REPEATS = 5

LossOf: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class _LayerFigures(NamedTuple):
    """The figures of one layer with a whole example batch.

    saved_input: what it keeps as the layer before does, which is not part of `saved`. Others: as of Layer.
    """

    name: str
    parameters: int
    flops: int
    saved: int
    saved_input: int
    output: int
    forward_all_reduces: tuple[int, ...]
    forward_all_gathers: tuple[int, ...]
    backward_all_reduces: tuple[int, ...]
    expert_parameters: int
    dispatched: int
    kv: int
    attention_flops: int
    expert_flops: int


class _CountingAttend(Attend):
    """An attend that counts the numbers of k and v, and the flops of both products, that have gone through it."""

    def __init__(self, attend: Attend) -> None:
        self.attend, self.kv, self.flops = attend, 0, 0

    def positions(self, s: int, device: torch.device) -> Tensor:
        return self.attend.positions(s, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        self.kv += k.numel() + v.numel()
        self.flops += 2 * q.shape[:-1].numel() * k.shape[-2] * (k.shape[-1] + v.shape[-1])
        return self.attend(q, k, v, scale)


class _CountingComm(Comm):
    """Rank 0 of `size` ranks that all have equal tensors; nothing is sent. its lists: sizes of what would be."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size, Trace(0, enabled=False))
        self.all_reduces: list[int] = []
        self.all_gathers: list[int] = []

    @overload
    def all_reduce(self, x: ArrayT, async_op: Literal[False] = False) -> ArrayT: ...

    @overload
    def all_reduce(self, x: ArrayT, async_op: Literal[True]) -> Work: ...

    def all_reduce(self, x: ArrayT, async_op: bool = False) -> ArrayT | Work:
        self.all_reduces.append(math.prod(x.shape))
        return x

    def all_gather(self, x: ArrayT) -> ArrayT:
        self.all_gathers.append(math.prod(x.shape))
        stack = new_like(x, (self.size, *x.shape))
        for rank in range(self.size):
            copy_into(stack[rank], x)
        return stack

    def reduce_scatter(self, x: ArrayT) -> ArrayT:
        self.all_reduces.append(math.prod(x.shape))
        out = new_like(x, x.shape[1:])
        copy_into(out, x[0])
        return out

    def pop_sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (all_reduces, all_gathers) since the last call."""
        found = tuple(self.all_reduces), tuple(self.all_gathers)
        self.all_reduces, self.all_gathers = [], []
        return found

    def barrier(self) -> None:
        pass

    def split(self, color: object, key: object = 0) -> Comm:
        return self

    def allocate(self, shape: int | Sequence[int], dtype: str | torch.dtype = "float32") -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype_name(dtype)))

    def isend(self, x: Array, dst: int) -> NoReturn:
        raise TypeError("this communicator has no other rank to send to")

    def irecv(self, x: Array, src: int) -> NoReturn:
        self.isend(x, src)


def spec_of(model: torch.nn.Module, example: Tensor, name: str | None = None, training: str | None = None) -> Spec:
    """Return the Spec of `model`, an nn.Module. What tp divides is known for what models/ builds.

    Args:    example: x of some examples, such as two of them; training: a key of TRAININGS, by default SGD with
             momentum in the model's own dtype.
    Returns: Spec, whose layers are those between which split.split cuts.
    Raises:  ValueError for a model that cannot be split.
    """
    parameters = list(model.parameters())
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to share out")
    double = parameters[0].dtype == torch.float64
    training = training or ("float64 momentum" if double else "momentum")
    heads, positions = _heads_of(model)
    n = len(example)
    whole = _layer_figures(model, example, _CountingComm(1), cross_entropy_per_answer)
    tp = next((p for p in range(2, heads + 1) if heads % p == 0), 2) if heads != 1 else 1
    part = _shard_figures(model, example, tp, False) or whole
    narrow = _shard_figures(model, example, tp, True) or part
    layers = [_layer_of(w, p, s, tp, n) for w, p, s in zip(whole, part, narrow, strict=True)]
    tied = sum(layer.parameters for layer in layers) - sum(p.numel() for p in parameters)
    kind = type(model).__name__
    kv_heads = min((attention.cache_shape[0] for attention in attentions_of(model)), default=0)
    routers = [module.router for module in model.modules() if isinstance(module, MixtureOfExperts)]
    return Spec(
        name or kind,
        tuple(layers),
        heads,
        positions,
        tied,
        training,
        kv_heads=kv_heads if kv_heads < heads else 0,
        experts=len(routers[0].bias) if routers else 0,
        top_k=routers[0].top_k if routers else 0,
    )


def _layer_of(whole: _LayerFigures, part: _LayerFigures, narrow: _LayerFigures, tp: int, n: int) -> Layer:
    """Return a Layer from the figures of n examples: of the whole, a shard of `tp`, one with sequence parallel."""

    def divided(before: int, after: int) -> int:
        return (before - after) * tp // max(tp - 1, 1)

    return Layer(
        whole.name,
        parameters=whole.parameters,
        cut=divided(whole.parameters, part.parameters),
        flops=whole.flops / n,
        saved=whole.saved // n,
        saved_cut=divided(whole.saved // n, part.saved // n),
        saved_positions=divided(part.saved // n, narrow.saved // n),
        output=whole.output // n,
        output_cut=divided(whole.output // n, part.output // n),
        output_positions=divided(part.output // n, narrow.output // n),
        saved_input=whole.saved_input // n,
        forward_all_reduces=tuple(size // n for size in part.forward_all_reduces),
        backward_all_reduces=tuple(size // n for size in part.backward_all_reduces),
        forward_all_gathers=tuple(size // n for size in part.forward_all_gathers),
        expert_parameters=whole.expert_parameters,
        dispatched=whole.dispatched // n,
        kv=whole.kv // n,
        attention_flops=whole.attention_flops / n,
        expert_flops=whole.expert_flops / n,
    )


def _heads_of(model: torch.nn.Module) -> tuple[int, int]:
    """Return (heads of its attention or 0, positions that it reads or 1) of a model of models/."""
    heads = next((vars(m)["heads"] for m in model.modules() if "heads" in vars(m)), 0)
    positions = getattr(model, "positions", None)
    weight = getattr(positions, "weight", positions)  # a table of a GPT, a parameter of a ViT
    if isinstance(weight, Tensor):
        return heads, weight.shape[-2]
    return heads, vars(model).get("block", 1)


def _shard_figures(model: torch.nn.Module, example: Tensor, tp: int, sequence: bool) -> list[_LayerFigures] | None:
    """Return the figures of rank 0's shard for `tp` ranks; None if the model cannot be cut so."""
    comm = _CountingComm(tp)
    try:
        shard, loss = shard_and_loss(comm, copy.deepcopy(model), sequence, cross_entropy_per_answer)
        return _layer_figures(shard, example, comm, loss)
    except ValueError:
        return None


def _layer_figures(model: torch.nn.Module, example: Tensor, comm: _CountingComm, loss: LossOf) -> list[_LayerFigures]:
    """Return the figures of each layer of `model`, which communicates over `comm`, in order."""
    layers = Layers(model, example)
    stages = layers.stages([1] * len(layers))
    found: list[_LayerFigures] = []
    known = {t.untyped_storage().data_ptr() for t in (example, *model.parameters(), *model.buffers())}
    x: tuple[Tensor, ...] = (example,)
    before: dict[int, tuple[int, Tensor]] = {}

    def on_zeros(output: Tensor) -> Tensor:
        return loss(output, torch.zeros(output.shape[:-1], dtype=torch.int64))

    comm.pop_sizes()
    for i, stage in enumerate(stages):
        kept: dict[int, tuple[int, Tensor]] = {}

        def keep(tensor: Tensor, kept: dict[int, tuple[int, Tensor]] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            if tensor.is_floating_point() and storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size(), tensor
            return tensor

        answers = on_zeros if i == len(stages) - 1 else None
        attentions = attentions_of(stage.module)
        for attention in attentions:
            attention.attend = _CountingAttend(attention.attend)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept), _flop_counter() as counter:
            x = stage.forward(0, x, answers)
        output = sum(torch.Size(spec.shape).numel() for spec in stage.gives)
        parameters = sum(p.numel() for p in stage.module.parameters())
        saved, saved_input = (
            sum(count for key, (count, _) in kept.items() if (key in before) == common) for common in (False, True)
        )
        flops, before = counter.get_total_flops(), kept
        seen = [cast(_CountingAttend, attention.attend) for attention in attentions]
        for attention, watched in zip(attentions, seen, strict=True):
            attention.attend = watched.attend
        mixtures = [module for module in stage.module.modules() if isinstance(module, MixtureOfExperts)]
        more = {
            "expert_parameters": sum(p.numel() for mixture in mixtures for p in mixture.experts.parameters()),
            "dispatched": sum(mixture.chosen.numel() * mixture.router.weight.shape[1] for mixture in mixtures),
            "kv": sum(watched.kv for watched in seen),
            "attention_flops": sum(watched.flops for watched in seen),
            "expert_flops": sum(6 * mixture.chosen.numel() * mixture.experts.gate[0].numel() for mixture in mixtures),
        }
        found.append(
            _LayerFigures(
                layers.names[i],
                parameters,
                flops,
                saved,
                saved_input,
                output,
                *comm.pop_sizes(),
                backward_all_reduces=(),
                **more,
            )
        )
    for i, stage in reversed(list(enumerate(stages))):
        gradients = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in stage.gives if spec.requires_grad]
        stage.backward(0, () if i == len(stages) - 1 else gradients)
        found[i] = found[i]._replace(backward_all_reduces=comm.pop_sizes()[0])
    model.zero_grad()
    return found


def _flop_counter() -> FlopCounterMode:
    """Return torch's counter with the attention that torch has for CPUs, which it lacks."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: object, out_shape: object = None, **__: object) -> int:
        return sdpa_flop_count(query, key, value)

    mine = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}
    return FlopCounterMode(display=False, custom_mapping=mine)


def measured(
    comm: Comm, model: torch.nn.Module, x: Tensor, y: Tensor, loss: LossOf | None = None, flops: float | None = None
) -> Machine:
    """Return the Machine that the ranks of `comm` are: what a rank computes alone and among all, what a message costs.

    Args:    model, x, y: trained on for a few steps of forward and backward, while every rank does the same.
             flops: of one example, Spec.flops, if that is known.
    Returns: Machine, the same on every rank. Its speed is of this model's layers, not of one large product.
    """
    loss = loss or cross_entropy_per_answer
    work = (flops or spec_of(model, x[:1]).flops) * len(x)

    def step() -> None:
        loss(model(x), y).backward()

    alone, together = (
        measure(f, warmup=0, repeats=REPEATS, barrier=comm.barrier, clock=now_ns).median
        for f in (step if comm.rank == 0 else lambda: None, step)
    )
    model.zero_grad()
    medians = comm.all_gather(torch.tensor([alone, together], dtype=torch.float64))  # (p, 2)
    least, slow = float(medians[0, 0]), float(medians[:, 1].max())
    alpha, beta, _ = ping_pong(comm, REPEATS)
    at_once = max(1, round(comm.size * least / slow))
    return Machine(
        "this machine",
        Switch(alpha=alpha, beta=beta, flops_per_s=work / least),
        memory=4 * GIB,
        at_once=0 if at_once >= comm.size else at_once,
        source=f"measured on {comm.size} ranks with a {type(model).__name__}",
    )


LR, MOMENTUM = 0.01, 0.9
LITTLE = 32  # bytes: of the all-reduce that adds the loss up, which is no layer's


class LastStep(NamedTuple):
    """The report of a rank afterwards: what it held, and when its last step began, in ns of its clock.

    group_sizes: {bytes of a bucket of gradients: among how many ranks it is added}.
    """

    held: Memory  # activations: the most that autograd kept at once, without inputs; gradients: with zero, its pieces
    begin_ns: int
    group_sizes: dict[int, int]


def momentum(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM)


def grid_steps(
    comm: Comm,
    model: torch.nn.Module,
    grid: Grid,
    x: Tensor,
    y: Tensor,
    options: Row,
    steps: int,
    optimizer_of: Callable[..., torch.optim.Optimizer] = momentum,
) -> LastStep:
    """Train `model` on `grid` for `steps` steps, and one step before and one after them.

    Args:    model, x, y: of the whole batch, the same on every rank. options: of HybridParallel, such as schedule.
             optimizer_of: f(parameters) -> a torch optimizer.
    Returns: LastStep. Rank 0 reports {step, seconds} of each of the `steps`.
    Raises:  as HybridParallel.
    """
    mesh = DeviceMesh(comm, grid)
    hybrid = HybridParallel(model, mesh, x, **options)
    params = hybrid.parameters()
    optimizer = optimizer_of(params)
    with SavedBytes([*params, x, y]) as kept:
        hybrid.step(x, y)
        optimizer.step()
    for step in range(steps):
        comm.barrier()
        begin = comm.trace.clock()
        hybrid.step(x, y)
        optimizer.step()
        comm.barrier()
        if comm.rank == 0:
            comm.report(step=step, seconds=(comm.trace.clock() - begin) / 1e9)
    comm.barrier()
    begin = comm.trace.clock()
    hybrid.step(x, y)
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    gradients = [p.grad for p in params if p.grad is not None]
    whole = list(hybrid.named_parameters().values())
    nbytes = (sum(t.nbytes for t in tensors) for tensors in (whole, gradients, state))
    held = Memory(*nbytes, activations=kept.most)
    group_sizes = {
        bucket.flat.nbytes: group.comm.size
        for group in hybrid.gradients.groups
        for bucket in group.buckets  # none with zero
    }
    return LastStep(held, begin, group_sizes)


def last_step(results: Results) -> list[Event]:
    """Return the events of the last step of all ranks, from the Results of grid_steps."""
    return [e for e in results.events if e.t0_ns >= results[e.rank].begin_ns]


def bytes_over_axes(results: Results, grid: Grid) -> dict[str, float]:
    """Return {axis: bytes} that the busiest rank sent in the last step of grid_steps.

    In the background there are gradients: "dp", of tied weights and of replicas along pp as well. Other single
    messages go along the axis in which both ranks differ; other all-reduces are of layers, over tp. If an
    all-reduce is not made of messages, it counts as a ring's.
    """
    coordinates = [grid.coordinates(rank) for rank in range(grid.size)]
    sent = {axis: [0.0] * grid.size for axis in AXES}
    for e in last_step(results):
        if e.op not in ("send", "all_reduce") or e.nbytes <= LITTLE:
            continue
        if e.op == "all_reduce":
            ranks = results[e.rank].group_sizes.get(e.nbytes, replicas(grid)) if e.lane else grid["tp"]
            sent["dp" if e.lane else "tp"][e.rank] += cost.all_reduce(ranks, e.nbytes).nbytes_sent
            continue
        apart = [axis for axis in sent if coordinates[e.rank][axis] != coordinates[e.peer][axis]]
        if e.lane or len(apart) == 1:
            sent["dp" if e.lane else apart[0]][e.rank] += e.nbytes
    return {axis: max(ranks) for axis, ranks in sent.items()}


def rows_over_pp(events: Iterable[Event], grid: Grid) -> list[list[TimedAction]]:
    """Return what the ranks of the first pipeline did: a list of schedules.Timed for each place along pp."""
    ranks = grid.groups("pp")[0]
    mine = [e._replace(rank=ranks.index(e.rank)) for e in events if e.rank in ranks]
    return timed_actions(mine, len(ranks))
