"""Hybrid parallelism: an unchanged model, replicated over dp, cut into stages over pp, its layers shared over tp; its
sequences over cp, its experts over ep.

    mesh = DeviceMesh(comm, dp=2, pp=2, tp=2)                                       three lines of a training script
    hybrid = HybridParallel(model, mesh, example=x, schedule="1f1b", micro_batches=4)
    optimizer = torch.optim.SGD(hybrid.parameters(), lr=0.1)
    for x, y in batches:
        loss = hybrid.step(x, y)                 # instead of forward, loss and backward
        optimizer.step()

                 pp 0                    pp 1
    dp 0    [ embed block ]  --->  [ block head ]       examples 0, 1, ...     each box: tp ranks that share its layers
    dp 1    [ embed block ]  --->  [ block head ]       examples n/2, ...
                 |                       |
             all-reduce              all-reduce         one per partition, during the backward of other micro-batches

    axis   what its ranks share            what each of them has           a gradient is added over
    dp     the batch                       its examples                    dp, ep, cp
    ep     the batch, and experts          its examples, E/ep experts      dp, cp: an expert has seen all tokens of ep
    cp     sequences                       an early and a late chunk       as of dp: zigzag, ring attention
    pp     layers, one after the other     its stages                      a tied layer: its stages, too
    tp     each layer                      its part of each matrix         what it has seen part of: tp, too

On simulated ranks backward waits for others inside autograd if tp, cp or ep > 1: sim.run(..., threads=True). The
state is the whole model's, from which any other mesh can take its parts.
Ref: Awan et al. 2020 (HyPar-Flow), arXiv:1911.05146; Narayanan et al. 2021, arXiv:2104.04473.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ... import schedules
from ...comm.base import Comm
from ...data.dataset import Dataset
from ...data.loading import batch_indices
from ...mesh import DeviceMesh, Grid
from ...models.experts import MixtureOfExperts
from ...models.gpt import GPT
from ...models.llama import Decoder
from ...schedules import Schedule
from .. import checkpoint
from ..consensus import bytes_of, loss_of_all, require_answers, require_same, require_same_model
from ..context import context_parallel, sequence_part
from ..data_parallel import as_sent, replicate
from ..experts import GAMMA, mixtures_of, shard_experts, update_biases
from ..optimizer_state import OptimizerState, Piece
from ..pipeline.run_schedule import OnAction, require_valid, run_schedule
from ..pipeline.split import Layers, Partition
from ..pipeline.split import partition as balanced
from ..pipeline.stage import Stage
from ..reducer import AllReduce, name_of
from ..tensor.cuts import WHOLE, Cut, cuts_of, joined, tensors_of
from ..tensor.model import shard
from ..tensor.vocabulary import vocabulary_cross_entropy
from ..training import Recipe, Trained, evaluate, run_steps, steps_taken
from .gradients import REPLICAS, Gradients

LossOf: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class HybridParallel:
    """A model over the ranks of a mesh, each with its own part. Collective.

    Args:    model: nn.Module of one structure on every rank, left as it is; all start from rank 0's values. With
             tp > 1 one of models/.
             With cp > 1 it reads tokens and answers at each of them, with ep > 1 it has experts (MixtureOfExperts).
             mesh: a DeviceMesh. example: x of one batch, whose shape every batch has.
             schedule: the name of one, or a Schedule of mesh's pp ranks; micro_batches: into which each replica cuts
             its share of the batch; chunks: stages per rank of "interleaved".
             recompute: keep only the inputs of stages (activation checkpointing); sequence: sequence parallel.
             all_reduce: f(comm, x), which adds gradients over ranks; by default the communicator's own.
             costs: of each layer (split.Layers), by which stages are balanced; by default s that rank 0 measures.
             partition: f(costs, stages) -> layers of each stage.
             loss: f(output, y) -> mean loss of some examples; by default cross-entropy per answer.
             zero: 1 or 2: the ranks that hold a parameter share out its update, and with 2 the sum of its gradient, as
             ZeRO1 and ZeRO2 of zero.py do; then the optimizer gets flat pieces of parameters. Dense layers' are
             shared out over dp, ep and cp, experts' over dp and cp.
    Raises:  ValueError on every rank: the batch, heads, positions, experts, layers or schedule cannot be shared out
             like this, the model cannot be cut (which module), the ranks' models differ, or all_reduce does not add up;
             TypeError for what is no mesh, model or tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        example: Tensor,
        schedule: str | Schedule = "1f1b",
        micro_batches: int = 4,
        recompute: bool = False,
        sequence: bool = False,
        all_reduce: AllReduce | None = None,
        chunks: int | None = None,
        costs: Sequence[float] | None = None,
        loss: LossOf | None = None,
        partition: Partition = balanced,
        zero: int = 0,
    ) -> None:
        _require_mesh(mesh)
        _require_stage(zero)
        if not isinstance(model, nn.Module):
            raise TypeError(f"a model is an nn.Module; got something of {type(model).__name__}")
        _require_tensor("example", example)
        for axis, share in (("cp", context_parallel), ("ep", shard_experts)):
            if mesh[axis].size > 1:
                share(mesh[axis], copy.deepcopy(model))  # raises what it has to say before the first message
        self.own_loss = loss is not None
        self.mesh, self.loss = mesh, loss or cross_entropy_per_answer
        costs = None if costs is None else [float(cost) for cost in costs]
        build = schedules.build
        self.plan = (
            schedule if isinstance(schedule, Schedule) else build(schedule, mesh.grid["pp"], micro_batches, chunks)
        )
        require_valid(mesh["pp"], self.plan)
        (some,) = _micro_batches_of(mesh, self.plan, example)[:1]
        self.shape, self.dtype = tuple(example.shape), example.dtype
        rows = zlib.crc32(repr(self.plan.rows).encode())
        plan = f"{self.plan.name} {rows:08x} {recompute} {sequence} {costs} {name_of(self.loss)} {zero}"
        require_same_model(mesh.comm, model, plan)
        whole = copy.deepcopy(model).to(mesh.comm.device)
        replicate(mesh.comm, whole)
        known = {id(tensor): name for name, tensor in tensors_of(whole)}
        aliases = {name: known[id(t)] for name, t in whole.state_dict(keep_vars=True).items()}
        cut = sequence or any(mesh[axis].size > 1 for axis in ("tp", "cp", "ep"))
        measure = costs is None and self.plan.stages > 1
        layers = Layers(whole, some) if measure or not cut else None
        if measure and layers:
            layers.require(self.plan.stages)
            # rank 0's; all measure, so that no rank waits for long, nor for the other ranks of tp
            own = torch.tensor(layers.measured(), dtype=torch.float64, device=mesh.comm.device)
            costs = mesh.comm.broadcast(own).tolist()
        if sequence or mesh["tp"].size > 1:
            whole, self.loss = shard_and_loss(mesh["tp"], whole, sequence, self.loss)
        cuts = cuts_of(whole)
        if mesh["cp"].size > 1:
            context_parallel(mesh["cp"], whole, "zigzag")
        if mesh["ep"].size > 1:
            shard_experts(mesh["ep"], whole)
        if cut or layers is None:
            layers = Layers(whole, some)
        parts = layers.split(self.plan.stages, costs, recompute, partition)
        self.output = parts[-1].gives[0].shape  # of a micro-batch; with tp its classes may be cut
        self.stages = {number: parts[number % self.plan.stages] for number in self.plan.stages_of(mesh["pp"].rank)}
        self.state = _State(aliases, cuts, whole, self.plan, parts, mesh["pp"].rank)
        in_parts = {name for name, cut in self.state.cuts.items() if cut.partial}
        params, experts = self.named_parameters(), self.state.expert_cuts
        self.gradients = Gradients(
            mesh, self.plan, self.state.trainable, self.stages, params, in_parts, all_reduce, zero, experts
        )
        mine = {id(module) for stage in self.stages.values() for module in stage.module.modules()}
        self.mixtures = nn.ModuleList(  # a layer of another stage has no load here
            layer if id(layer) in mine else MixtureOfExperts(1, 1, len(layer.router.bias), 1, shared=0)
            for layer in mixtures_of(whole)
        )
        self.nothing = nn.Parameter(torch.zeros(0))  # as no optimizer of torch takes an empty list

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return {name in the whole model: parameter} of this rank, trainable ones, each once."""
        return {name: p for name, p in self.state.held.items() if isinstance(p, nn.Parameter) and p.requires_grad}

    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters of this rank, or its pieces of them, for its optimizer; an empty one if none.

        Pieces that the optimizer has updated reach the other ranks in the next step, or state_dict.
        """
        return [piece.param for piece in self.gradients.pieces().values()] or [self.nothing]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's state, {name: tensor}, on every rank, like its own state_dict(). Collective."""
        self.gradients.all_gather_params()
        return self.state.full_state_dict(self.mesh)

    def load_state_dict(self, whole: dict[str, Tensor]) -> None:
        """Take this rank's parts of `whole`, the state_dict() of the model, from whatever mesh. No messages.

        Raises:  ValueError that names the tensor which is missing or has another shape.
        """
        self.state.load(whole)

    # -- what OptimizerState asks --------------------------------------------------------------------------------------

    @property
    def comm(self) -> Comm:
        return self.mesh.comm

    def shapes(self) -> list[tuple[int, ...]]:
        return [self.state.shape_of(name) for name in self.state.parameters]

    def pieces(self) -> dict[int, Piece]:
        return {self.state.parameters.index(name): piece for name, piece in self.gradients.pieces().items()}

    def part(self, number: int, whole: Tensor) -> Tensor:
        return self.state.part(self.state.parameters[number], whole)

    def gather(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        names = self.state.parameters
        mine = self.gradients.full_tensors({names[number]: value for number, value in values.items()})
        return dict(enumerate(self.state.gather(self.mesh, mine, names).values()))

    @torch.enable_grad()
    def step(self, x: Tensor, y: Tensor, on_action: OnAction | None = None) -> float:
        """Make .grad of all parameters the gradient of the mean loss of this batch; returns that loss.

        Args:    x: (b, ...), y: (b, ...): the whole batch, the same on every rank; x has the example's shape and dtype.
                 on_action: see run_schedule.
        Returns: float, the same on every rank. Gradients are of this batch alone, whatever was there before.
        Raises:  ValueError on every rank for a batch of another shape, or if ranks had another one;
                 FloatingPointError on every rank if something is NaN or infinite: which rank; MemoryError if
                 a rank has none left, which ends the others.
        Steps: as the schedule over pp, as each layer over tp, one all_reduce per bucket over dp, and one of 32
        bytes over all ranks.
        """
        self._require_batch(x, y)
        xs, ys = (_micro_batches_of(self.mesh, self.plan, tensor) for tensor in (x, y))
        share = self.mesh.over(*REPLICAS).size * len(ys)
        self.gradients.all_gather_params()
        self.gradients.begin()
        losses = run_schedule(
            self.mesh["pp"],
            self.plan,
            self.stages,
            inputs=lambda i: (xs[i],),
            loss=lambda i, output: _one_number(self.loss(output, ys[i])) / share,
            done=self.gradients.done,
            on_action=on_action,
        )
        with self.mesh.comm.trace.span("add gradients"):
            self.gradients.end()
        checksum = zlib.crc32(bytes_of(y), zlib.crc32(bytes_of(x))) & 0xFFFF
        info = {i: loss / self.mesh["tp"].size for i, loss in losses.items()}  # each tp rank has the whole of it
        pieces = {name: piece.param for name, piece in self.gradients.pieces().items()}
        return loss_of_all(self.mesh.comm, info, pieces, checksum)

    def update_biases(self, gamma: float = GAMMA) -> None:
        """Move the router biases of its experts against their loads since the last call, after optimizer.step().

        Collective: parallel.experts.update_biases over dp, cp, and pp, as the two replicas of GEMS share their layers.
        """
        if len(self.mixtures):
            update_biases(self.mesh.over("dp", "pp", "cp"), self.mixtures, gamma)

    def _require_batch(self, x: Tensor, y: Tensor) -> None:
        """Raise ValueError unless x is like the example, and y has as many answers."""
        _require_tensor("x", x)
        _require_tensor("y", y)
        if tuple(x.shape) != self.shape or x.dtype != self.dtype or len(y) != len(x):
            got = f"x of shape {tuple(x.shape)} in {x.dtype} and y of shape {tuple(y.shape)}"
            like = f"x of shape {self.shape} in {self.dtype}, its example"
            raise ValueError(f"a batch with {got}: this model was laid out for {like}")
        if not self.own_loss:
            cp, positions = self.mesh["cp"].size, self.output[1:-1]  # an output has its part of these
            require_answers((len(x), *(n * cp for n in positions), self.output[-1]), y, classes=-1)
        elif self.mesh["cp"].size > 1 and y.shape[:2] != x.shape[:2]:
            raise ValueError(
                f"cp cuts sequences: y of shape {tuple(y.shape)} has no target for each position of x {self.shape}"
            )


def cross_entropy_per_answer(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy: logits (b, classes) or (b, positions, classes), y (b,) or (b, positions) int64."""
    return cross_entropy(logits.flatten(0, -2), y.flatten())


def shard_and_loss(comm: Comm, whole: nn.Module, sequence: bool, loss: LossOf) -> tuple[nn.Module, LossOf]:
    """Return (this tp rank's part of a model, its loss). Logits of tokens stay in parts, with a loss for them."""
    if not isinstance(whole, (GPT, Decoder)) or loss is not cross_entropy_per_answer:
        return shard(comm, whole, sequence), loss
    vocabulary = whole.tokens.num_embeddings
    part = shard(comm, whole, sequence, whole_logits=False)
    return part, lambda logits, y: vocabulary_cross_entropy(comm, logits, y, vocabulary)


def _require_tensor(what: str, x: object) -> None:
    """Raise TypeError unless `x` is a tensor of examples."""
    if not isinstance(x, torch.Tensor) or not x.ndim:
        raise TypeError(
            f"{what} is one tensor of examples, the same on every rank; got something of {type(x).__name__}"
        )


def _one_number(loss: object) -> Tensor:
    """Return `loss`, which must be a scalar."""
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"type {type(loss).__name__}"
        raise ValueError(f"the loss of a micro-batch is its mean, a tensor with one number, and this one is of {got}")
    return loss


def _require_stage(zero: int) -> None:
    """Raise ValueError for a stage of ZeRO that does not go with pipelines."""
    if zero not in (0, 1, 2):
        why = ": stage 3 would gather each unit anew for every micro-batch of a pipeline" if zero == 3 else ""
        raise ValueError(f"zero={zero!r}: 0, 1 or 2 is needed{why}; without pp, ZeRO3 takes a model that tp has cut")


def _require_mesh(mesh: object) -> None:
    """Raise TypeError for what is no mesh."""
    if not isinstance(mesh, DeviceMesh):
        kind = type(mesh).__name__
        raise TypeError(f"the second argument is a mesh, as DeviceMesh(comm, dp=2, pp=2); got something of {kind}")


def _micro_batches_of(mesh: DeviceMesh, plan: Schedule, x: Tensor) -> tuple[Tensor, ...]:
    """Return this rank's micro-batches of the batch x (b, ...): the share of its place along dp and ep, in equal parts.

    With cp each has this rank's positions only, (b, s/cp, ...): a chunk from each end of the sequence.
    Raises:  ValueError if the ranks and their micro-batches do not divide the batch, or cp its positions.
    """
    replicas, m = mesh.over("dp", "ep"), plan.micro_batches
    shares = replicas.size
    if len(x) < shares * m or len(x) % (shares * m):
        axes = f"dp={shares}" if mesh.grid["ep"] == 1 else f"dp x ep = {mesh.grid['dp']} x {mesh.grid['ep']} = {shares}"
        raise ValueError(
            f"a batch of {len(x)} cannot be cut into {axes} shards of {m} micro-batches each: "
            f"it must be a multiple of {shares} x {m} = {shares * m}"
        )
    mine = x.chunk(shares)[replicas.rank]
    if mesh["cp"].size > 1:
        if x.ndim < 2:
            raise ValueError(f"cp cuts sequences of shape (b, s), and this batch has shape {tuple(x.shape)}")
        mine = sequence_part(mesh["cp"], mine, zigzag=True)
    return mine.chunk(m)


class _State:
    """The tensors of one rank by their names in the whole model.

    held:      {name: tensor} of parameters and buffers of this rank's stages; cuts: {name: tensor.cuts.Cut} over tp, of
               all; expert_cuts: {name: Cut} over ep.
    idle:      {name: tensor} of what no stage uses, and every rank has.
    trainable: trainable[s]: the names of the trainable parameters of stage s of the model, each once.
    parameters: the names of all trainable parameters in the order of the whole model.
    aliases:   {name in the whole model's state_dict: the name under which its tensor comes first}.
    """

    def __init__(
        self,
        aliases: dict[str, str],
        cuts: dict[str, Cut],
        shard: nn.Module,
        plan: Schedule,
        parts: list[Stage],
        pp_rank: int,
    ) -> None:
        """Sort the tensors. shard: this rank's part of the model; parts: its stages, of these tensors."""
        tensors = dict(tensors_of(shard))
        known = {id(tensor): name for name, tensor in tensors.items()}
        found = [{known[id(t)]: t for _, t in tensors_of(part.module) if id(t) in known} for part in parts]
        self.aliases, self.cuts = aliases, cuts
        self.expert_cuts = {name: cut for name, cut in cuts_of(shard).items() if cut is not cuts[name]}
        self.parameters = [name for name, p in shard.named_parameters() if p.requires_grad]
        self.trainable = [[name for name, t in own.items() if t.requires_grad] for own in found]
        mine = set()
        self.owner: dict[str, int] = {}  # {name: the first rank along pp that holds it}
        for number in range(plan.stages * plan.replicas):
            for name in found[number % plan.stages]:
                self.owner.setdefault(name, plan.rank_of(number))
                if plan.rank_of(number) == pp_rank:
                    mine.add(name)
        self.held = {name: tensor for name, tensor in tensors.items() if name in mine}
        self.idle = {name: tensor for name, tensor in tensors.items() if name not in self.owner}
        self.forms = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}

    def full_state_dict(self, mesh: DeviceMesh) -> dict[str, Tensor]:
        """Return the state_dict() of the whole model on every rank. Collective."""
        found = self.gather(mesh, self.held | self.idle, self.forms)
        return {alias: found[name] for alias, name in self.aliases.items()}

    def gather(self, mesh: DeviceMesh, held: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """Return {name: whole tensor} on every rank, from `held`, {name: this rank's part, in the form of that tensor}.

        Buffers, such as the running mean of a batch norm, differ between replicas: the first one's are taken.
        Steps: per tensor one all_gather over tp if it is cut, one over ep for experts, one broadcast over pp, for
        buffers one over dp, ep and cp.
        Bytes per rank: as the whole state has.
        """
        whole = {}
        for name in names:
            if name in held:
                part = joined(mesh["ep"], held[name], self.expert_cuts.get(name, WHOLE))
                tensor = joined(mesh["tp"], part, self.cuts[name]).contiguous()
            else:
                tensor = torch.empty(self.shape_of(name), dtype=self.forms[name][1], device=mesh.comm.device)
            if name in self.owner:
                broadcast(mesh["pp"], tensor, self.owner[name])
            if name not in self.parameters:
                broadcast(mesh.over(*REPLICAS), tensor, 0)
            whole[name] = tensor
        return whole

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor that is called `name`."""
        sizes = {cut.dim: cut.size for cut in (self.cuts[name], self.expert_cuts.get(name, WHOLE))}
        return tuple(sizes.get(dim, n) for dim, n in enumerate(self.forms[name][0]))

    def load(self, whole: dict[str, Tensor]) -> None:
        """Overwrite what this rank holds with its parts of `whole`. Raises ValueError that names what does not fit."""
        mine = self.held | self.idle
        unknown = sorted({*whole} - {*self.aliases} - {*self.forms})
        if unknown:
            raise ValueError(f"the state given has {unknown[0]}, which this model has not, and {len(unknown) - 1} more")
        missing = sorted({*mine} - {*whole})
        if missing:
            raise ValueError(f"the state given has no {missing[0]}, which this model needs")
        parts = {name: self.part(name, whole[name]) for name in mine}
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(parts[name])

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of the tensor `whole`, which is called `name`."""
        part, shape = self.expert_cuts.get(name, WHOLE).part(self.cuts[name].part(whole)), self.forms[name][0]
        if tuple(part.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(part.shape)} as a part of the state given, and {shape} here")
        return part


def broadcast(comm: Comm, tensor: Tensor, root: int) -> None:
    """Copy `tensor` (contiguous) of rank `root` into every rank's; bools and the like travel as bytes."""
    if comm.size > 1 and tensor.numel():
        comm.broadcast(as_sent(tensor.view(-1)), root)


def train_on_mesh(
    comm: Comm,
    model: torch.nn.Module,
    grid: Grid,
    data: Dataset,
    recipe: Recipe,
    schedule: str = "1f1b",
    recompute: bool = False,
    chunks: int | None = None,
) -> Trained:
    """Train `model` over the ranks of `grid`, and report {step, loss, samples_per_s} of every step from rank 0.

    The course is as on one rank, but for the end of an epoch: a batch that is shorter than the others is left out,
    because all micro-batches have one shape.

    Args:    model, grid, data, recipe: the same on every rank; recipe.micro_batches: of each replica's share.
             schedule, recompute, chunks: see HybridParallel.
    Returns: training.Trained, with the losses and the parameters of the whole model, the same on every rank.
    Raises:  ValueError on every rank: as HybridParallel, and if there are fewer examples than a batch has.
    """
    n = len(data.train_y)
    require_same(comm, "recipe", f"{recipe} on {grid!r} for {n:,} examples of shape {tuple(data.train_x.shape[1:])}")
    if n < recipe.batch:
        raise ValueError(f"a batch of {recipe.batch} is more than the {n} examples that there are")
    if grid["tp"] > 1 or grid["ep"] > 1:
        recipe.require_elementwise(repr(grid))
    mesh, example = DeviceMesh(comm, grid), data.train_x[: recipe.batch]
    hybrid = HybridParallel(
        model,
        mesh,
        example,
        schedule=schedule,
        micro_batches=recipe.micro_batches,
        recompute=recompute,
        chunks=chunks,
    )
    optimizer = recipe.optimizer_for(hybrid)
    facts = recipe.facts() | checkpoint.facts_of(data, model)
    if recipe.checkpoint_every:
        checkpoint.require_writable(comm, recipe.checkpoint)
    whole_optimizer = OptimizerState(hybrid, optimizer)
    first = steps_taken(comm, hybrid, whole_optimizer, recipe, facts)
    whole = (some for some in batch_indices(n, recipe.batch, recipe.seed) if len(some) == recipe.batch)
    shuffled = islice(whole, first, recipe.steps)

    def step() -> tuple[float, float, int]:
        some = next(shuffled)
        loss = hybrid.step(data.train_x[some], data.train_y[some])
        with comm.trace.span("update"):
            optimizer.step()
        return loss, loss, recipe.batch

    def save(steps: int) -> None:
        checkpoint.save(comm, recipe.checkpoint, hybrid, whole_optimizer, steps, facts)

    losses, samples, seconds = run_steps(comm, recipe, first, step, save)
    model = copy.deepcopy(model)
    model.load_state_dict(hybrid.state_dict())
    loss, accuracy = evaluate(comm, model, data.test_x, data.test_y)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return Trained(losses, seconds, samples, loss, accuracy, flat)
