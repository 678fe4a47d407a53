"""ZeRO: data parallelism whose ranks share out what they all would hold: optimizer states, gradients, parameters.

    bytes per parameter, mixed precision with Adam, N ranks           traffic per step of a model of Psi bytes
    data parallel   2 (parameter) + 2 (gradient) + 12 (states) = 16   2 Psi
    ZeRO1           2             + 2            + 12/N               2 Psi   reduce-scatter, all-gather of parameters
    ZeRO2           2             + (2           + 12)/N              2 Psi   the same, during backward
    ZeRO3           (2            + 2            + 12)/N              3 Psi   all-gather twice, reduce-scatter

The parameters of a unit, a block of a transformer, lie in one vector, padded to equal chunks: rank r owns chunk r.

    block 0    [ w1 ........ | b1 | w2 .... | b2 | pad ]     N = 3
               [  rank 0     |   rank 1    |  rank 2   ]     w1 is shared by ranks 0 and 1, whose optimizers have a
                                                             piece of it each; an optimizer works element by element

ZeRO3, forward and backward of three units; two of them are whole at a time, and the last one stays whole in between:

    background    gather 1 | gather 2 |          | gather 1  | gather 0 | reduce 2 | reduce 1 | reduce 0
    own thread    unit 0   | unit 1   | unit 2   | unit 2    | unit 1              | unit 0
                  forward -------------------->  | backward ----------------------->

Ref: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054; Zhao et al. 2023 (PyTorch FSDP), arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from ..comm.base import Comm, Work
from .consensus import GradientCheck, require_same_model
from .data_parallel import Strategy, replicate
from .flat import FlatParameter, own_all_gather, own_reduce_scatter
from .optimizer_state import OptimizerOf, StrategyOptimizer
from .precision import Precision
from .reducer import Bucket, Reducer, gradient_ready, require_function, results_of
from .tensor.cuts import cuts_of
from .zero_state import ShardedState

# -- the units of a model ---------------------------------------------------------------------------------------------


def _units_of(model: nn.Module) -> list[nn.Module]:
    """Say which modules are units: the items of the outermost nn.Sequential and nn.ModuleList that own parameters.

    In a GPT or ViT those are the blocks, in a multi-layer perceptron the layers. What is in no unit, such as embedding
    and last norm, belongs to the unit of the model itself.
    """
    if isinstance(model, nn.Sequential | nn.ModuleList):
        return [item for item in model if any(True for _ in item.parameters())]
    return [unit for child in model.children() for unit in _units_of(child)]


OnFlat: TypeAlias = Callable[[Comm, Tensor], Tensor]  # a reduce-scatter or an all-gather
Units: TypeAlias = Callable[[nn.Module], Iterable[nn.Module]]


class Unit:
    """A module whose parameters are gathered and resharded together. waiting: for gradients of this many of them."""

    def __init__(self, name: str, module: nn.Module, flats: list[FlatParameter]) -> None:
        self.name, self.module, self.flats = name, module, flats
        self.works: list[Work] = []  # all-gathers under way
        self.unsharded = not any(flat.sharded for flat in flats)
        self.trainable = sum(p.requires_grad for flat in flats for p in flat.params)
        self.has_frozen = any(not p.requires_grad for flat in flats for p in flat.params)
        self.begin()

    def begin(self) -> None:
        """Begin a backward pass: nothing of it has come yet."""
        self.waiting, self.calls = self.trainable, 0  # calls of forward whose inputs have no gradient yet

    def reshard(self) -> None:
        """Give the memory of the parameters back."""
        if self.works:  # their memory is being written
            results_of(self.works)
            self.works, self.unsharded = [], True
        if self.unsharded:
            for flat in self.flats:
                flat.reshard()
            self.unsharded = False


# -- the strategies ----------------------------------------------------------------------------------------------------


class ZeRO1(Strategy):
    """Optimizer states in shards: every rank updates its chunk of the parameters, and all gather what became of them.

    reduce_scatter, all_gather: f(comm, x) of a flat x, whose chunk r on rank r is the result, or the input, as those
    of collectives/ring.py; by default the communicator's own.
    precision: see Strategy. units: f(model) -> modules, whose parameters travel together; by default `_units_of`.

        strategy = ZeRO1()
        strategy.start(comm, model)
        optimizer = strategy.optimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-3))
        for x, y in batches:
            strategy.scaled(loss(model(x), y)).backward()
            strategy.add_gradients(comm, model)
            strategy.clip_gradients(1.0)            # if it is asked for
            optimizer.step()

    The optimizer gets pieces of parameters, flat, so it has to be one that works element by element: SGD, Adam and the
    like; one that looks at a whole layer, as LAMB does, would see a part of it.
    Steps: one reduce_scatter and one all_gather per unit.   Bytes per rank: as both of all parameters.
    """

    sharded = False  # are parameters?

    def __init__(
        self,
        reduce_scatter: OnFlat = own_reduce_scatter,
        all_gather: OnFlat = own_all_gather,
        precision: str | Precision | None = None,
        units: Units = _units_of,
    ) -> None:
        super().__init__(precision=precision)
        self.reduce_scatter = require_function("reduce_scatter(comm, x)", reduce_scatter)
        self.all_gather = require_function("all_gather(comm, x)", all_gather)
        self.units = require_function("units(model)", units)

    def assign(self, params: Sequence[nn.Parameter]) -> list[list[int]]:
        index_of = {id(p): i for i, p in enumerate(params)}
        return [[index_of[id(p)] for p in flat.params] for flat in self.trainable]

    def start(self, comm: Comm, model: nn.Module) -> None:
        self.require_own(comm)
        self.stop()
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError(f"{type(model).__name__} owns no parameter that needs a gradient: nothing to shard")
        partial = [name for name, cut in cuts_of(model).items() if cut.partial]
        if partial:
            raise ValueError(
                f"the gradients of {partial[0]} and {len(partial) - 1} more are in parts over tp, as sequence parallel "
                "leaves them: HybridParallel(..., sequence=True, zero=2) adds them"
            )
        groups = self.groups(model)  # before ranks meet, as it may raise
        self.owner, self.comm, self.model = (id(self), comm.rank), comm, model
        require_same_model(comm, model, repr(self))
        replicate(comm, model)
        pairs = [(name, p) for name, p in model.named_parameters() if p.requires_grad]  # tied ones once
        self.names, self.params = [name for name, _ in pairs], [p for _, p in pairs]
        self.gradient_check = GradientCheck(self.names)
        self.index_of = {id(p): i for i, p in enumerate(self.params)}
        dtypes = {id(p): p.dtype for p in model.parameters()}
        wide = {} if self.precision is None else {id(p): p.detach() for p in model.parameters()}
        if self.precision is not None:
            for handle in self.precision.lower(model):
                self.hook(handle)
        self.parts = [Unit(name, module, self.flats_of(comm, own, dtypes)) for name, module, own in groups]
        self.flats = [flat for unit in self.parts for flat in unit.flats]
        self.trainable = [flat for flat in self.flats if flat.params[0].requires_grad]
        self.placeholders = {id(p): flat.nothing for flat in self.trainable for p in flat.params}
        if self.precision is not None:
            for flat in self.flats:
                flat.sharded_params = self.masters_of(flat, self.precision, wide)
        self.pieces = [piece for flat in self.trainable for piece in flat.sharded_params]
        counted = list(model.parameters()) if self.precision is None else self.params  # as DataParallel's optimizer
        self.state = ShardedState(comm, model, counted, self.flats, dtypes, self.precision is not None)
        self.has_optimizer = False
        self.reducer = Reducer(self.trainable[::-1], self.scatter)  # pyrefly: ignore[bad-assignment]
        self.drop_gradients()
        self.register_hooks()
        self.register_state_dict_hooks(model)

    def scatter(self, comm: Comm, x: Tensor) -> Tensor:
        """Return chunk r of the sum of flat `x` in memory of its own, so that `x` can be freed."""
        total = self.reduce_scatter(comm, x)
        return total.clone() if total.untyped_storage().nbytes() > total.nbytes else total

    def register_hooks(self) -> None:
        """Register what a stage does during forward and backward."""

    def groups(self, model: nn.Module) -> list[tuple[str, nn.Module, list[nn.Parameter]]]:
        """Return [(name, module, its parameters)] of the units; what is in none, or in several, is in the model's."""
        names = {id(module): name for name, module in model.named_modules()}
        units = [model, *(unit for unit in self.units(model) if unit is not model)]
        for unit in units[1:]:
            if id(unit) not in names:
                raise ValueError(f"a unit, a {type(unit).__name__}, is not a module of the model")
            if not any(True for _ in unit.parameters()):
                kind = type(unit).__name__
                raise ValueError(f"unit {names[id(unit)]}, a {kind}, owns no parameters: nothing to gather for it")
        number_of = {id(unit): number for number, unit in enumerate(units)}
        users: dict[int, set[int]] = {}

        def walk(module: nn.Module, number: int) -> None:
            number = number_of.get(id(module), number)
            for param in module.parameters(recurse=False):
                users.setdefault(id(param), set()).add(number)
            for child in module.children():
                walk(child, number)

        walk(model, 0)
        found: list[list[nn.Parameter]] = [[] for _ in units]
        for param in model.parameters():
            found[min(users[id(param)]) if len(users[id(param)]) == 1 else 0].append(param)
        return [(names[id(u)] or "the model", u, own) for u, own in zip(units, found, strict=True) if own or u is model]

    def flats_of(self, comm: Comm, params: list[nn.Parameter], dtypes: dict[int, torch.dtype]) -> list[FlatParameter]:
        """Return the vectors of one unit: parameters of one dtype that all need gradients, or all need none.

        Frozen parameters are in vectors, too, if they are sharded, or if what they were in float32 is.
        dtypes: {id of a parameter: its dtype before it was rounded}.
        """
        kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[nn.Parameter]] = {}
        for param in params:
            if param.requires_grad or self.sharded or self.precision is not None:
                kind = dtypes[id(param)], param.dtype, param.requires_grad
                kinds.setdefault(kind, []).append(param)
        return [
            FlatParameter(comm, own, [self.index_of.get(id(p), -1) for p in own], self.sharded)
            for own in kinds.values()
        ]

    def masters_of(self, flat: FlatParameter, precision: Precision, wide: dict[int, Tensor]) -> list[nn.Parameter]:
        """Return copies of this rank's parts of the parameters in `flat`, as they were before rounding.

        wide: {id of a parameter: what it was before it was rounded}.
        """
        parts = [wide[id(flat.params[i])].reshape(-1)[begin:end] for i, begin, end, _ in flat.pieces]
        if flat.params[0].requires_grad:
            return precision.masters(parts)
        return [nn.Parameter(part.clone(), requires_grad=False) for part in parts]

    def optimizer(self, model: nn.Module, make: OptimizerOf) -> StrategyOptimizer:
        """Return the optimizer of this rank's pieces, which make(list of parameters) makes; after `start`."""
        self.require_begun()
        self.has_optimizer = True
        return StrategyOptimizer(self, make(self.pieces or [nn.Parameter(torch.zeros(0))]), self.state)

    def require_sums(self, comm: Comm) -> None:
        """Check nothing: `all_reduce` adds nothing here."""

    def require_started(self, model: nn.Module) -> Reducer[Bucket]:
        reducer = super().require_started(model)
        if not self.has_optimizer:
            raise ValueError(
                f"{type(self).__name__} shards gradients, and an optimizer of the model's parameters has no shards: "
                "after strategy.start, make the optimizer by strategy.optimizer(model, make)"
            )
        return reducer

    def require_attached(self, *units: Unit) -> None:
        """Raise ValueError if somebody else has replaced the tensor of a parameter of these units, or of any."""
        for unit in units or self.parts:
            for flat in unit.flats:
                for param, view in zip(flat.params, flat.views, strict=True):
                    if param.data_ptr() != (view if unit.unsharded else flat.nothing).data_ptr():
                        name = next(name for name, p in self.model.named_parameters() if p is param)
                        raise ValueError(
                            f"the tensor of {name} was replaced, and {type(self).__name__} has its shards: call "
                            "model.to(...) and the like before strategy.start, and load by model.load_state_dict"
                        )

    # -- a step ---------------------------------------------------------------------------------------------------

    def add_gradients(self, comm: Comm, model: nn.Module) -> None:
        """Leave the sum over ranks of all gradients in shards, for the optimizer. Collective; see Strategy."""
        reducer = self.require_started(model)
        self.require_attached()
        reducer.begin()
        totals = []
        for flat in self.trainable[::-1]:  # the reducer's buckets
            for k in reversed(range(len(flat.indices))):
                flat.put(k)
            totals.append(self.reduce_scatter(comm, flat.packed()))
        self.finalize_backward(comm, totals)

    def finalize_backward(self, comm: Comm, totals: Sequence[Tensor]) -> None:
        """Make the sums, [(n,)] in the order of the reducer, the gradients of the pieces. Collective."""
        flats = self.trainable[::-1]
        bad = [pair for flat in flats for pair in flat.bad]
        missing = sorted(index for flat in flats for index in flat.missing)
        for flat in flats:
            flat.begin()
        scaled = self.precision is not None and self.precision.scaler is not None
        unused = self.gradient_check.check_shards(comm, [] if scaled else bad, missing)
        by_flat = {id(flat): total for flat, total in zip(flats, totals, strict=True)}
        grads: list[Tensor | None] = []
        for flat in self.trainable:
            parts = flat.slices(by_flat[id(flat)])
            grads += [None if flat.indices[i] in unused else g for (i, *_), g in zip(flat.pieces, parts, strict=True)]
        self.grads = grads  # of the pieces, as they have traveled
        if self.precision is None:
            for piece, grad in zip(self.pieces, grads, strict=True):
                piece.grad = grad
        for param in self.params:
            self.hide_gradient(param)

    def hide_gradient(self, param: nn.Parameter) -> None:
        """Show NaN as the gradient that is in shards: torch's clipping fails by it, and would do nothing for None."""
        param.grad = self.placeholders[id(param)].expand(param.shape)

    def grads_to_masters(self) -> None:
        """Give the masters, if there are any, the gradients that have come, in float32. Collective; once in a step."""
        if self.precision is not None and self.grads:
            grads, self.grads = self.grads, []
            self.precision.grads_to_masters(self.comm, self.pieces, grads)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float, tp: Comm | None = None) -> float:
        """Scale all gradients down if their norm, of all shards together, is larger than `max_norm`. Collective.

        Args:    tp: the communicator along which the model itself is cut, such as mesh["tp"], if it is.
        Returns: the norm before; the same on every rank.
        Steps: one all_reduce of 8 bytes, and one over tp.   Ref: torch.nn.utils.clip_grad_norm_.
        """
        self.require_begun()
        self.grads_to_masters()
        cuts = cuts_of(self.model)
        square = torch.zeros(1, dtype=torch.float64, device=self.comm.device)
        indices = [flat.indices[i] for flat in self.trainable for i, *_ in flat.pieces]
        for piece, index in zip(self.pieces, indices, strict=True):
            of_one = tp is not None and tp.rank > 0 and cuts[self.names[index]].dim is None  # each tp rank has it whole
            if piece.grad is not None and not of_one:
                square += piece.grad.double().square().sum()
        for comm in (self.comm,) if tp is None else (self.comm, tp):
            comm.all_reduce(square)
        norm = float(square.sqrt())
        factor = max_norm / (norm + 1e-6)  # as torch has it
        for piece in self.pieces if factor < 1 else ():
            if piece.grad is not None:
                piece.grad.mul_(factor)
        return norm

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update this rank's pieces, and give them to all ranks. Collective."""
        self.require_begun()
        self.grads_to_masters()
        if self.precision is None or not self.precision.skipped:
            optimizer.step()
            if self.precision is not None:
                parts = [part for flat in self.trainable for part in flat.slices(flat.shard)]
                self.precision.masters_to_params(self.pieces, parts)
            self.all_gather_params()
        self.drop_gradients()

    def all_gather_params(self) -> None:
        """Give every rank the parameters that the pieces have become."""
        results_of([self.comm.background(self.all_gather, flat.full) for flat in self.trainable])

    def drop_gradients(self) -> None:
        """Forget the gradients of pieces and parameters."""
        self.grads = []
        for param in (*self.pieces, *self.params):
            param.grad = None

    def finish(self, comm: Comm, model: nn.Module) -> None:
        super().finish(comm, model)
        if self.precision is None:
            self.summon_full_params()
        else:
            self.saves.close()
            self.widen()

    def summon_full_params(self) -> None:
        """Make all parameters whole. Collective."""

    def tensors(self, model: nn.Module) -> dict[str, list[Tensor]]:
        packed = [flat.grad for flat in self.trainable if flat.grad is not None]
        placeholders = {nothing.data_ptr() for nothing in self.placeholders.values()}
        grads = [p.grad for p in self.params if p.grad is not None and p.grad.data_ptr() not in placeholders]
        grads += [grad for grad in self.grads if grad is not None]
        own = [p.grad for p in self.pieces if p.grad is not None] if self.precision is None else []
        parameters = [*model.parameters(), *(f.shard for f in self.flats), *(f.full for f in self.flats)]
        return {"parameters": parameters, "gradients": [*packed, *grads, *own]}

    # -- what is saved, see zero_state.py ------------------------------------------------------------------------------

    def stateful(self, model: nn.Module) -> ShardedState:
        self.require_begun()
        return self.state

    def widen(self) -> None:
        self.require_attached()
        for unit in self.parts:
            if unit.works:  # of memory that `narrow` writes
                unit.reshard()
        self.state.widen()

    def narrow(self) -> None:
        self.state.narrow()

    def wide(self) -> list[Tensor]:
        return [piece for flat in self.flats for piece in flat.sharded_params]

    def stop(self) -> None:
        """Forget the model. Not collective: parameters that are resharded then, without `finish`, stay NaN."""
        if self.reducer is not None:
            self.drop_gradients()
        super().stop()


class ZeRO2(ZeRO1):
    """Gradients in shards as well: a unit's are added and freed as soon as backward has made them.

    Whole gradients of this rank are there for the unit that backward is in and those whose reduce-scatter is under way;
    inside accumulating() they all are, as they travel once.
    Steps: one reduce_scatter, during backward, and one all_gather per unit.   Bytes per rank: as ZeRO1.
    """

    def register_hooks(self) -> None:
        for index, param in enumerate(self.params):
            self.hook(param.register_hook(lambda _, param=param: self.show_gradient(param)))
            self.hook(param.register_post_accumulate_grad_hook(lambda _, index=index: self.ready(index)))

    def show_gradient(self, param: nn.Parameter) -> None:
        """Take NaN away before autograd adds to it: a backward too many is named by the reducer then."""
        if param.grad is not None and param.grad.data_ptr() == self.placeholders[id(param)].data_ptr():
            param.grad = None

    def ready(self, index: int) -> None:
        """Send what can be sent, now that autograd has made the gradient of parameter `index`."""
        if not self.adds_up:
            gradient_ready(self.comm, self.require_begun(), index)
            self.hide_gradient(self.params[index])

    def add_gradients(self, comm: Comm, model: nn.Module) -> None:
        """Send what backward has not reached, and wait until all sums are in shards. Collective; see Strategy."""
        reducer = self.require_started(model)
        for index in reversed(range(len(self.params))):
            if not reducer.collected[index]:
                gradient_ready(comm, reducer, index)
        totals = reducer.results()
        self.require_attached()
        self.finalize_backward(comm, totals)


class ZeRO3(ZeRO2):
    """Parameters in shards as well: a unit gathers them before it is used, forward and backward, then reshards them.

    While a unit computes, the next one, in the order of the forward pass before, is gathered in the background.
    reshard_after_forward: True reshards every unit after its forward, 3 Psi bytes in a step; None, all but the last and
    the model itself, which backward needs at once; False none, 2 Psi. A unit that is computed again during
    backward (recomputation) is gathered once there. All ranks have to compute the same units in the same order.
    On simulated ranks backward waits inside autograd: sim.run(..., threads=True).
    Steps: per unit two all_gathers, or one, and one reduce_scatter.   Bytes per rank: as each of its parameters.
    """

    sharded = True

    def __init__(
        self,
        reduce_scatter: OnFlat = own_reduce_scatter,
        all_gather: OnFlat = own_all_gather,
        precision: str | Precision | None = None,
        units: Units = _units_of,
        reshard_after_forward: bool | None = None,
    ) -> None:
        super().__init__(reduce_scatter, all_gather, precision, units)
        self.reshard_after_forward = reshard_after_forward

    @property
    def talks_in_backward(self) -> bool:
        return True

    def register_hooks(self) -> None:
        super().register_hooks()
        self.expected = self.parts  # the units in the order of the latest forward pass; at first as they are registered
        self.order: list[Unit] = []  # of the one that is made
        self.with_backward = False  # is backward expected after it?
        self.unit_of = {id(p): unit for unit in self.parts for flat in unit.flats for p in flat.params}
        for unit in self.parts:
            before, after = partial(self.pre_forward, unit), partial(self.post_forward, unit)
            self.hook(unit.module.register_forward_pre_hook(before, prepend=True))
            self.hook(unit.module.register_forward_hook(after, with_kwargs=True))

    def gather(self, unit: Unit) -> None:
        """Begin to gather a unit, in the background, unless that has begun."""
        if not unit.unsharded and not unit.works:
            for flat in unit.flats:
                flat.allocate()
            unit.works = [self.comm.background(self.all_gather, flat.full) for flat in unit.flats]

    def unshard(self, unit: Unit, prefetched: Unit | None = None) -> None:
        """Make the parameters of a unit whole, and begin to gather `prefetched`."""
        self.gather(unit)
        works, unit.works = unit.works, []
        if prefetched is not None:
            self.gather(prefetched)
        results_of(works)
        if not unit.unsharded:
            self.require_attached(unit)
            unit.unsharded = True
            for flat in unit.flats:
                flat.attach()

    def pre_forward(self, unit: Unit, *_: object) -> None:
        if _in_backward():  # it is computed again
            position = max((k for k, other in enumerate(self.order) if other is unit), default=0)
            self.unshard(unit, self.order[position - 1] if position else None)
            return
        if unit is self.parts[0]:  # the model itself
            self.expected, self.order = self.order or self.expected, []
            self.with_backward = torch.is_grad_enabled()
            for other in self.parts:
                other.begin()
        position = len(self.order)
        self.order.append(unit)
        known = self.expected[position + 1 : position + 2] if self.expected[position : position + 1] == [unit] else []
        self.unshard(unit, known[0] if known else None)

    def post_forward(self, unit: Unit, _: nn.Module, args: object, kwargs: object, out: object) -> None:
        if _in_backward():
            return
        keeps = self.reshard_after_forward is False
        if self.reshard_after_forward is None:
            keeps = unit is self.parts[0] or unit is self.expected[-1]
        if not self.with_backward or not keeps:
            unit.reshard()
        order, position = self.order, len(self.order) - 1 - self.order[::-1].index(unit)
        for tensor in _with_gradient(out):  # pre-backward
            tensor.register_hook(lambda _: self.unshard(unit, order[position - 1] if position else None))
        if unit.has_frozen and (tensors := _with_gradient((args, kwargs))):
            unit.calls += 1
            register_multi_grad_hook(tensors, lambda _: self.post_backward(unit))

    def post_backward(self, unit: Unit) -> None:
        """Count one call of a unit as done: backward has come through it, to all of its inputs."""
        unit.calls -= 1
        self.reshard_if_done(unit)

    def ready(self, index: int) -> None:
        super().ready(index)
        unit = self.unit_of[id(self.params[index])]
        unit.waiting -= 1
        self.reshard_if_done(unit)

    def reshard_if_done(self, unit: Unit) -> None:
        """Reshard a unit that has all gradients; if parameters are frozen, its inputs', too."""
        if unit.waiting <= 0 and unit.calls <= 0:
            unit.begin()
            unit.reshard()

    def add_gradients(self, comm: Comm, model: nn.Module) -> None:
        for unit in self.parts:
            unit.begin()
            unit.reshard()  # if backward has not reached all
        super().add_gradients(comm, model)

    def all_gather_params(self) -> None:
        """Send nothing yet: a unit is gathered when it is used."""
        for unit in self.parts:
            unit.reshard()

    def summon_full_params(self) -> None:
        for unit in self.parts:
            self.unshard(unit)


def _in_backward() -> bool:
    """Return True if autograd is at work in this thread."""
    return torch._C._current_graph_task_id() != -1


def _with_gradient(values: object) -> list[Tensor]:
    """Return the tensors in `values`, nested tuples, lists and dicts, that need a gradient."""
    if isinstance(values, Tensor):
        return [values] if values.requires_grad else []
    if isinstance(values, dict):
        return [t for v in values.values() for t in _with_gradient(v)]
    return [t for v in values for t in _with_gradient(v)] if isinstance(values, list | tuple) else []
