"""Pipeline parallelism: every rank holds some layers of a model, and micro-batches pass through the ranks.

    rank 0  [ embed  block ] --activations--> rank 1  [ block  head ] --> loss
                             <---gradients---

What a rank does when is the schedule's business (schedules/), how it is carried out is run_schedule's, and how the
model is cut is split's. Here they come together: one call makes a pipeline of a model, and one takes a step.

Parameters that several ranks of a pipeline hold: their gradients are added, so that they stay one parameter.

tied weights    tokens.weight of the first stage, which embeds, and of the last, which asks what comes next
GEMS            every parameter, of the two replicas in opposite directions: ranks r and p - 1 - r hold the same
"""

import zlib
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ..consensus import bytes_of, form_of, loss_of_all, require_answers, require_same_model
from ..data_parallel import broadcast_parameters
from ..reducer import by_dtype
from .partition import partition
from .run_schedule import require_valid, run_schedule
from .split import Layers, trainable


class Pipeline:
    """An unchanged model as a pipeline over the ranks of `comm`. Collective.

        pipeline = Pipeline(comm, model, schedules.build("1f1b", ranks=4, micro_batches=8), example=x[:8])
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        for x, y in batches:                              # the same on every rank
            optimizer.zero_grad()
            loss = pipeline.step(x, y, cross_entropy)     # of the whole batch, the same on every rank
            optimizer.step()

    Args:    model: nn.Module of one structure on every rank; rank 0's values are where all start. This rank keeps only
             its stages of it.
             schedule: a Schedule for comm.size ranks. example: x of one micro-batch; every micro-batch has its shape.
             recompute: see stage.Stage; costs, partition: see split.split; costs by default as rank 0 measures them.
    Raises:  ValueError on every rank, before the first message about the model, for a schedule that is not valid or for
             another number of ranks, more stages than layers, or a model that cannot be split; TypeError for what is
             no model or tensor.
    """

    def __init__(self, comm, model, schedule, example, recompute=False, costs=None, partition=partition):
        self.comm, self.schedule = comm, schedule
        require_valid(comm, schedule)
        require_model(model)
        for tensor in example if isinstance(example, tuple) else (example,):
            require_tensor("example", tensor)
        layers = Layers(model, example)
        layers.require(schedule.stages, costs)
        require_same_model(comm, model, plan_of(schedule, recompute, costs))
        broadcast_parameters(comm, model)
        costs = agreed(comm, layers, schedule.stages) if costs is None else costs
        parts = layers.split(schedule.stages, costs, recompute, partition)
        self.stages = {number: parts[number % schedule.stages] for number in schedule.stages_of(comm.rank)}
        self.takes, self.gives = parts[0].takes, parts[-1].gives
        names = trainable(parts)
        self.params = {n: p for number in self.stages for n, p in names[number % schedule.stages].items()}
        self.shared = shared_by_rank(comm.rank, holders(schedule, names), self.params)

    def named_parameters(self):
        """{name in the whole model: parameter} of this rank's stages, trainable ones, each once."""
        return dict(self.params)

    def parameters(self):
        """The trainable parameters of this rank's stages, for its optimizer."""
        return list(self.params.values())

    @torch.enable_grad()
    def step(self, x, y, loss):
        """Add to .grad of all parameters what this batch contributes to the mean loss; returns that loss.

        Args:    x: (b, ...), or a tuple of such, y: (b, ...): the whole batch, the same on every rank.
                 loss: f(output, y) -> the mean over the examples of a micro-batch.
        Returns: float, the same on every rank.
        Raises:  ValueError on every rank where the micro-batches do not share the batch, or have another shape than the
                 example, or ranks have had another batch; FloatingPointError on every rank where something is NaN:
                 which rank, what. Take no step then.
        """
        for what, tensor in (*(("x", part) for part in (x if isinstance(x, tuple) else (x,))), ("y", y)):
            require_tensor(what, tensor)
        xs, ys = self.micro_batches(x, y)
        if loss is cross_entropy and y.dtype == torch.int64 and len(self.gives) == 1:  # else y may be probabilities
            require_answers((len(y), *self.gives[0].shape[1:]), y, classes=1)
        earlier = set_aside(self.shared)
        losses = run_schedule(
            self.comm,
            self.schedule,
            self.stages,
            inputs=lambda i: [part[i] for part in xs],
            loss=lambda i, output: one_number(loss(output, ys[i])) / len(ys),
        )
        add_shared_gradients(self.comm, self.shared)
        put_back(earlier)
        return loss_of_all(self.comm, losses, self.params, checksum_of([*(x if isinstance(x, tuple) else (x,)), y]))

    def micro_batches(self, x, y):
        """[[part of each micro-batch] of each tensor of x], [part of y of each micro-batch]."""
        x, m = x if isinstance(x, tuple) else (x,), self.schedule.micro_batches
        for tensor in x:
            if len(tensor) != len(y):
                raise ValueError(f"x has {len(tensor)} examples and y has {len(y)}")
        if len(y) % m:
            raise ValueError(f"{len(y)} examples cannot be shared by {m} micro-batches of equal size")
        xs = [tensor.chunk(m) for tensor in x]
        given, wanted = (" and ".join(map(form_of, parts)) for parts in ([part[0] for part in xs], self.takes))
        if given != wanted:
            raise ValueError(f"micro-batches of {given}: this pipeline was made for {wanted}, its example")
        return xs, y.chunk(m)


def require_model(model):
    """Raise TypeError unless `model` is one."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model is an nn.Module; got something of {type(model).__name__}")


def require_tensor(what, x):
    """Raise TypeError unless `x` is a tensor of examples."""
    if not isinstance(x, torch.Tensor) or not x.ndim:
        raise TypeError(
            f"{what} is one tensor of examples, the same on every rank; got something of {type(x).__name__}"
        )


def plan_of(schedule, recompute, costs):
    """What all ranks must mean by this pipeline, in a line."""
    rows = zlib.crc32(repr(schedule.rows).encode())
    order = f"{schedule.name} of {schedule.micro_batches} micro-batches (checksum {rows:08x})"
    return f"{order}, recompute={recompute}, costs={costs}"


def agreed(comm, layers, stages):
    """The costs of all layers as rank 0 measures them. All measure: nobody has to wait for long, nor for tp's ranks."""
    costs = layers.measured() if stages > 1 else [1] * len(layers)
    return comm.broadcast(torch.tensor(costs, dtype=torch.float64, device=comm.device)).tolist()


def one_number(loss):
    """`loss`, which must be a scalar."""
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"type {type(loss).__name__}"
        raise ValueError(f"the loss of a micro-batch is its mean, a tensor with one number, and this one is of {got}")
    return loss


def checksum_of(tensors):
    """16 bits that tell batches apart."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(bytes_of(tensor), found)
    return found & 0xFFFF


class Shared(NamedTuple):
    """Parameters of this rank, of one dtype, that exactly these ranks hold. ranks: ascending, with this one."""

    ranks: tuple
    params: list


def holders(schedule, names):
    """{name: ranks} of the parameters that more than one rank holds, ascending.

    Args:    names: names[s] of the trainable parameters of stage s of the model.
    """
    found = {}
    for stage in range(schedule.stages * schedule.replicas):
        for name in names[stage % schedule.stages]:
            found.setdefault(name, set()).add(schedule.rank_of(stage))
    return {name: tuple(sorted(ranks)) for name, ranks in found.items() if len(ranks) > 1}


def shared_by_rank(rank, holders, params):
    """The Shared of one rank. params: {name: parameter} of its stages; every rank packs in the order of `holders`."""
    groups = {}
    for name, ranks in holders.items():
        if rank in ranks:
            groups.setdefault(ranks, []).append(params[name])
    parts = [(ranks, [ours[i] for i in part]) for ranks, ours in groups.items() for part in by_dtype(ours).values()]
    return [Shared(ranks, ours) for ranks, ours in parts]


def add_shared_gradients(comm, shared):
    """Replace the gradients in `shared` by their sums over the ranks that hold them, bitwise the same on all of these.

    Everybody sends to everybody and adds in the order of ranks: those who share are two as a rule.

    Args:    shared: list of Shared. A parameter without a gradient counts as zeros.
    Steps: 1.   Bytes per rank: (k - 1) * N * itemsize for N elements that k ranks hold.
    """
    under_way = []
    for ranks, params in shared:
        flat = torch.cat([zeros(p) if p.grad is None else p.grad.reshape(-1) for p in params])  # (N,)
        parts = {rank: flat if rank == comm.rank else torch.empty_like(flat) for rank in ranks}
        others = [rank for rank in ranks if rank != comm.rank]
        works = [comm.irecv(parts[rank], rank) for rank in others] + [comm.isend(flat, rank) for rank in others]
        under_way.append((params, parts, works))
    for params, parts, works in under_way:
        for work in works:
            work.wait()
        total = sum(parts[rank] for rank in sorted(parts))
        for param, grad in zip(params, total.split([p.numel() for p in params]), strict=True):
            param.grad = grad.view(param.shape)


def set_aside(shared):
    """Take away the gradients that earlier steps have left, which are shared already: [(parameter, gradient)]."""
    earlier = [(p, p.grad) for _, params in shared for p in params if p.grad is not None]
    for param, _ in earlier:
        param.grad = None
    return earlier


def put_back(earlier):
    """Add what was set aside."""
    for param, grad in earlier:
        param.grad = grad + param.grad


def zeros(param):
    return torch.zeros(param.numel(), dtype=param.dtype, device=param.device)
