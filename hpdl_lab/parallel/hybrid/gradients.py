"""Gradients on a mesh: each added once, over just the ranks that have parts of it, during backward.

    parameter                                          its gradient is added over         communicator
    of one stage, cut by tp, or whole on every tp rank dp                                 mesh["dp"]
    the same, seen by parts of a sequence              dp and tp                          mesh.over("dp", "tp")
    of several stages (tied; GEMS)                     dp and these places along pp       one more, of just these ranks

With cp and ep, "dp" stands for all ranks that see other examples or positions: dp, ep and cp; for experts, which ranks
along ep have shared out, and which have seen the tokens of all of them, for dp and cp.

Never over all: two stages hold different layers, and two tp ranks different halves of a matrix. Gradients lie in the
buckets that travel, from the first micro-batch on: no second copy, and a bucket leaves when the last micro-batch has
come through it, while backward goes on.   Ref: Awan et al. 2020 (HyPar-Flow), arXiv:1911.05146; `reduce_gradients` is
the same without overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from ...comm.base import Comm, best_all_reduce
from ...mesh import DeviceMesh
from ...schedules import Schedule
from ...units import MIB
from ..consensus import require_sums_of
from ..flat import FlatParameter, own_all_gather, own_reduce_scatter
from ..optimizer_state import Piece
from ..pipeline.run_schedule import routes
from ..pipeline.stage import Stage
from ..reducer import (
    AllReduce,
    Bucket,
    GradientBuffer,
    Reducer,
    checked,
    gradient_ready,
    parts_of,
    require_function,
    results_of,
)


class Placed(NamedTuple):
    """A parameter on one rank, and the other places of parts of its gradient.

    name:      in the whole model; parameter: this rank's tensor, whole or cut by tp.
    over_tp:   True if each tp rank holds this parameter whole and has a part of its gradient.
    shared:    the communicator of the stages that hold this very parameter (tied weights), None if one does.
    """

    name: str
    parameter: torch.Tensor
    over_tp: bool = False
    shared: Comm | None = None


def reduce_gradients(mesh: DeviceMesh, parameters: list[Placed]) -> None:
    """Add the parts of every gradient, to get the gradient of the whole batch.

    The loss on a rank is divided by the size of the global batch. So the parts are
    added, and nothing is divided here.

        dp 0: gradient of its examples --+            if over_tp: also over mesh["tp"]
        dp 1: gradient of its examples --+--> sum     if shared: also over `shared`

    Args:    mesh: a DeviceMesh; mesh["dp"] is the communicator of the ranks that hold
             the same part of the model.
             parameters: list of Placed, in the same order on all ranks of a
             communicator. placed.parameter is this rank's tensor, with its .grad.
             placed.over_tp is True if the gradients of the tp ranks have to be added.
             placed.shared is the communicator of the stages that hold the same
             parameter, or None. If .grad is None, it counts as zeros, because another
             rank may have a gradient.
    Returns: None. Every parameter.grad is replaced by the sum, which is the same on all
             ranks that hold the parameter.
    Steps: per parameter one all_reduce over dp, one over tp if over_tp, one over
           `shared`.
    Ref: Narayanan et al. 2021, arXiv:2104.04473, section 2; Korthikanti et al. 2022,
         arXiv:2205.05198, section 4.2.2.
    """
    ### BEGIN SOLUTION
    for placed in parameters:
        p = placed.parameter
        grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
        if placed.over_tp:
            mesh["tp"].all_reduce(grad)
        if placed.shared is not None:
            placed.shared.all_reduce(grad)
        p.grad = mesh["dp"].all_reduce(grad)
    ### END SOLUTION


Axes: TypeAlias = tuple[str, ...]
REPLICAS: Axes = ("dp", "ep", "cp")  # whose ranks see other examples or positions with the same dense parameters
ADDED_OVER: tuple[Axes, ...] = (REPLICAS, (*REPLICAS, "tp"), ("dp", "cp"), ("dp", "cp", "tp"))
LIMIT, FIRST = 25 * MIB, 1 * MIB  # bytes of a bucket, and of the first: as in parallel/reducer.py


class Group:
    """The gradients that are added over one communicator, in buckets and in an order that all of its ranks have.

    zero: of stage 1 or 2 the ranks of the communicator, which hold the same parameters, share out their update.
    pieces: {id of a parameter: Piece}: what the optimizer updates here.
    """

    def __init__(self, comm: Comm, parts: list[list[nn.Parameter]], all_reduce: AllReduce, zero: int = 0) -> None:
        """Make the buckets. parts: lists of parameters in the order of their becoming ready. Collective over `comm`."""
        self.comm, self.params, self.zero = comm, [param for part in parts for param in part], zero
        self.index_of = {id(p): i for i, p in enumerate(self.params)}
        self.pieces = {} if zero and comm.size > 1 else {id(p): Piece(p, 0, p.numel()) for p in self.params}
        self.flats: list[FlatParameter] = []
        self.updated = False  # may pieces be newer than parameters?
        buckets: list[Bucket] = []
        for part in parts if comm.size > 1 else ():
            for indices in parts_of(part, LIMIT, LIMIT if buckets else FIRST):
                params = [part[i] for i in indices]
                of_all = [self.index_of[id(p)] for p in params]
                if zero:
                    self.flats.append(FlatParameter(comm, params, of_all, sharded=False))
                else:
                    buckets.append(Bucket(comm, params, of_all, background=True, flag=False))
        for flat in self.flats:
            for (i, begin, end, _), piece in zip(flat.pieces, flat.sharded_params, strict=True):
                self.pieces[id(flat.params[i])] = Piece(piece, begin, end)
        self.buckets = buckets  # none with zero
        buffers: Sequence[GradientBuffer] = self.flats or buckets
        self.reducer = Reducer(buffers, own_reduce_scatter if zero else all_reduce)

    def begin(self) -> None:
        """Begin a new step: autograd adds to zeros, in place, in the memory that travels."""
        self.reducer.begin()
        for param in self.params:
            param.grad = None
        for flat in self.flats:
            flat.begin()
            flat.expect()
            for param, grad in zip(flat.params, flat.grads, strict=True):
                param.grad = grad
        for bucket in self.buckets:
            bucket.attach()

    def ready(self, param: nn.Parameter) -> None:
        """Send what can be sent, now that the gradient of `param` is complete."""
        if self.comm.size > 1 and self.zero != 1:
            gradient_ready(self.comm, self.reducer, self.index_of[id(param)])

    def end(self) -> None:
        """Wait until all sums are here, or this rank's chunks of them. Raises what Reducer.end raises."""
        if self.flats:
            for index in range(len(self.params)) if self.zero == 1 else ():
                gradient_ready(self.comm, self.reducer, index)
            for flat, total in zip(self.flats, self.reducer.results(), strict=True):
                for piece, grad in zip(flat.sharded_params, flat.slices(total), strict=True):
                    piece.grad = grad
            self.updated = True
            return
        pairs = zip(self.reducer.results(), self.buckets, strict=True)
        totals = [checked(out, self.comm, bucket.flat) for out, bucket in pairs]
        for bucket, total in zip(self.buckets, totals, strict=True):
            bucket.set_grads(total)

    def all_gather_params(self) -> None:
        """Give all ranks the parameters that their pieces have become, if there has been a step. Collective."""
        if self.updated:
            results_of([self.comm.background(own_all_gather, flat.full) for flat in self.flats])
            self.updated = False

    def full_tensors(self, values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return {id of a parameter: tensor like it} from `values`, {id: this rank's piece}; zeros if none is."""
        if not self.flats:
            return {id(p): values.get(id(p), torch.zeros_like(p)) for p in self.params}
        found: dict[int, torch.Tensor] = {}
        for flat in self.flats:
            mine = [values.get(id(flat.params[i])) for i, *_ in flat.pieces]
            found |= zip(map(id, flat.params), flat.full_tensors(mine), strict=True)
        return found


class Gradients:
    """All gradients of one rank. Collective.

    Args:    mesh: a DeviceMesh; plan: the Schedule; names: names[s] of the trainable parameters of stage s of the
             model; stages: {number: Stage} of this rank; params: {name: parameter} of these; partial: names of those
             whose gradient is in parts over tp, too; all_reduce: f(comm, x), which adds over ranks; zero: see Group;
             experts: names of those, which ranks along ep have shared out.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        plan: Schedule,
        names: list[list[str]],
        stages: dict[int, Stage],
        params: dict[str, nn.Parameter],
        partial: Collection[str] = (),
        all_reduce: AllReduce | None = None,
        zero: int = 0,
        experts: Collection[str] = (),
    ) -> None:
        self.stages, self.zero = stages, zero
        self.all_reduce = best_all_reduce if all_reduce is None else require_function("all_reduce(comm, x)", all_reduce)
        if mesh.over(*REPLICAS).size > 1:
            require_sums_of(mesh.over(*REPLICAS), self.all_reduce, [p.dtype for p in params.values()])

        def axes_of(name: str) -> Axes:
            return (("dp", "cp") if name in experts else REPLICAS) + (("tp",) if name in partial else ())

        shared = _holders(plan, names)
        order = sorted(stages, key=routes(plan, mesh["pp"].rank).last.__getitem__)  # whose gradients are complete first
        self.groups: list[Group] = []
        for axes in ADDED_OVER:
            known = set(shared)
            alone: list[list[nn.Parameter]] = []
            for stage in order:
                mine = [n for n in names[stage % plan.stages] if n not in known and axes_of(n) == axes]
                alone.append([params[name] for name in mine])
                known.update(mine)
            self._add(mesh.over(*axes), alone)
        kinds = sorted({(ranks, axes_of(name)) for name, ranks in shared.items()})  # in an order that all ranks have
        for held, axes in kinds:
            ours = [n for n, ranks in shared.items() if ranks == held and axes_of(n) == axes]
            comm = _comm_of_holders(mesh, held, axes)
            if mesh["pp"].rank in held:
                self._add(comm, [[params[name] for name in ours]])
        self.group_of = {key: group for group in self.groups for key in group.index_of}
        each = plan.micro_batches // plan.replicas
        users: dict[int, set[int]] = {}  # id of a parameter -> the stages that use it
        for number, stage in stages.items():
            for param in stage.parameters():
                users.setdefault(id(param), set()).add(number)
        self.users, self.usual = users, {key: each * len(numbers) for key, numbers in users.items()}
        # times that autograd adds to a gradient in one step; in the first one that is not known
        self.expected: dict[int, int] = {}
        self.names = {id(p): name for name, p in params.items()}
        self.hooks = [p.register_post_accumulate_grad_hook(self._added) for p in params.values()]

    def begin(self) -> None:
        """Begin a new step."""
        self.added = dict.fromkeys(self.users, 0)
        self.using = {key: set(numbers) for key, numbers in self.users.items()}
        self.complete: set[int] = set()
        for group in self.groups:
            group.begin()

    def done(self, number: int) -> None:
        """Note the end of the last backward of stage `number`: its gradients are complete, autograd said so or not."""
        for param in self.stages[number].parameters():
            self.using[id(param)].discard(number)
            if not self.using[id(param)] and id(param) not in self.complete:
                self._ready(param)

    def end(self) -> None:
        """Wait for all sums."""
        for group in self.groups:
            group.end()
        # a layer that does its forward again inside may be added to more often than once in a backward
        self.expected = {key: max(self.usual[key], times) for key, times in self.added.items()}

    def pieces(self) -> dict[str, Piece]:
        """Return {name: what the optimizer updates of this parameter here}."""
        pieces = {key: piece for group in self.groups for key, piece in group.pieces.items()}
        return {name: pieces[key] for key, name in self.names.items() if key in pieces}

    def full_tensors(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return {name: tensor like this rank's parameter} from `values`, {name: like its piece}. Collective."""
        ids = {name: key for key, name in self.names.items()}
        mine = {ids[name]: value for name, value in values.items()}
        found = {key: value for group in self.groups for key, value in group.full_tensors(mine).items()}
        return {name: found[key] for key, name in self.names.items()}

    def all_gather_params(self) -> None:
        """Give all ranks the parameters of the latest update. Collective."""
        for group in self.groups:
            group.all_gather_params()

    def _added(self, param: nn.Parameter) -> None:
        """Count that autograd has added to a gradient."""
        key = id(param)
        self.added[key] += 1
        if key in self.complete:
            raise ValueError(
                f"autograd has added to the gradient of {self.names[key]} {self.added[key]} times in this step, and "
                f"{self.expected[key]} times in the one before: it was sent before the last one. Take no step"
            )
        if self.added[key] == self.expected.get(key):
            self._ready(param)

    def _ready(self, param: nn.Parameter) -> None:
        self.complete.add(id(param))
        self.group_of[id(param)].ready(param)

    def _add(self, comm: Comm, parts: list[list[nn.Parameter]]) -> None:
        if any(parts):
            self.groups.append(Group(comm, [part for part in parts if part], self.all_reduce, self.zero))


def _holders(schedule: Schedule, names: list[list[str]]) -> dict[str, tuple[int, ...]]:
    """Return {name: ranks} of the parameters that more than one rank of a pipeline holds, ascending.

    Those are tied weights, such as the token embedding; and of GEMS, whose replicas go in opposite directions, all.
    Args:    names: names[s] of the trainable parameters of stage s of the model.
    """
    found: dict[str, set[int]] = {}
    for stage in range(schedule.stages * schedule.replicas):
        for name in names[stage % schedule.stages]:
            found.setdefault(name, set()).add(schedule.rank_of(stage))
    return {name: tuple(sorted(ranks)) for name, ranks in found.items() if len(ranks) > 1}


def _comm_of_holders(mesh: DeviceMesh, held: tuple[int, ...], axes: Axes) -> Comm:
    """Return the communicator of the ranks at these places along pp, and at all places along `axes`. Collective."""
    if mesh.coordinates["pp"] not in held:
        return mesh.comm.split(f"without {mesh.comm.rank}")
    same = "".join(f" {axis}={i}" for axis, i in mesh.grid.others(mesh.comm.rank, ("pp", *axes)))
    return mesh.comm.split(f"shared by pp={','.join(map(str, held))}{same}", mesh.comm.rank)
