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
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..comm.base import Comm, Work
from .checkpoint import StateDict, shard_of
from .consensus import Verdict, gather_integers, gather_items, require_same_model
from .data_parallel import Strategy, replicate
from .flat import Flat, grad_of, own_all_gather, own_reduce_scatter
from .precision import OptimizerOf, Precision
from .reducer import Reducer, gradient_ready, require_function, results_of
from .tensor.cuts import cuts_of

# -- the units of a model ---------------------------------------------------------------------------------------------


def units_of(model: nn.Module) -> list[nn.Module]:
    """Say which modules are units: the items of the outermost nn.Sequential and nn.ModuleList that own parameters.

    In a GPT or ViT those are the blocks, in a multi-layer perceptron the layers. What is in no unit, such as embedding
    and last norm, belongs to the unit of the model itself.
    """
    if isinstance(model, nn.Sequential | nn.ModuleList):
        return [item for item in model if any(True for _ in item.parameters())]
    return [unit for child in model.children() for unit in units_of(child)]


OnFlat: TypeAlias = Callable[[Comm, Tensor], Tensor]  # a reduce-scatter or an all-gather
Units: TypeAlias = Callable[[nn.Module], Iterable[nn.Module]]


class Unit:
    """A module whose parameters are gathered and released together. waiting: for gradients of this many of them."""

    def __init__(self, name: str, module: nn.Module, flats: list[Flat]) -> None:
        self.name, self.module, self.flats = name, module, flats
        self.works: list[Work] = []  # gathers under way
        self.whole = not any(flat.sharded for flat in flats)
        self.trainable = sum(p.requires_grad for flat in flats for p in flat.params)
        self.has_frozen = any(not p.requires_grad for flat in flats for p in flat.params)
        self.begin()

    def begin(self) -> None:
        """Begin a backward pass: nothing of it has come yet."""
        self.waiting, self.calls = self.trainable, 0  # calls of forward whose inputs have no gradient yet

    def release(self) -> None:
        """Give the memory of the parameters back."""
        if self.works:  # their memory is being written
            results_of(self.works)
            self.works, self.whole = [], True
        if self.whole:
            for flat in self.flats:
                flat.release()
            self.whole = False


class ShardedParameter(nn.Parameter):
    """A parameter whose gradient may be in shards: then reading `.grad` raises ValueError instead of giving None."""

    @property
    def grad(self) -> Tensor | None:
        where = self.__dict__.get("gradient_is")
        if where:
            raise ValueError(where)
        return grad_of(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)  # pyrefly: ignore[missing-attribute]


# -- the strategies ----------------------------------------------------------------------------------------------------


class ZeRO1(Strategy):
    """Optimizer states in shards: every rank updates its chunk of the parameters, and all gather what became of them.

    reduce_scatter, all_gather: f(comm, x) of a flat x, whose chunk r on rank r is the result, or the input, as those
    of collectives/ring.py; by default the communicator's own.
    precision: see Strategy. units: f(model) -> modules, whose parameters travel together; by default `units_of`.

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
        units: Units = units_of,
    ) -> None:
        super().__init__(precision=precision)
        self.reduce_scatter = require_function("reduce_scatter(comm, x)", reduce_scatter)
        self.all_gather = require_function("all_gather(comm, x)", all_gather)
        self.units = require_function("units(model)", units)

    def assign(self, params: Sequence[nn.Parameter]) -> list[list[int]]:
        place = {id(p): i for i, p in enumerate(params)}
        return [[place[id(p)] for p in flat.params] for flat in self.trainable]

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
        self.verdict = Verdict(self.names)
        self.index_of = {id(p): i for i, p in enumerate(self.params)}
        self.dtypes = {id(p): p.dtype for p in model.parameters()}
        wide = {} if self.precision is None else {id(p): p.detach() for p in model.parameters()}
        if self.precision is not None:
            for handle in self.precision.lower(model):
                self.hook(handle)
        self.parts = [Unit(name, module, self.flats_of(comm, own)) for name, module, own in groups]
        self.trainable = [f for unit in self.parts for f in unit.flats if f.params[0].requires_grad]
        self.pieces_of = {id(f): self.cut(f, wide) for unit in self.parts for f in unit.flats}
        self.pieces = [piece for flat in self.trainable for piece in self.pieces_of[id(flat)]]
        self.reducer = Reducer(self.trainable[::-1], self.scatter)  # pyrefly: ignore[bad-assignment]
        self.version = {id(p): p._version for p in model.parameters()}
        for param in self.params:
            if type(param) is nn.Parameter:
                param.__class__ = ShardedParameter
        self.drop_gradients()
        self.hook(register_optimizer_step_pre_hook(self.require_not_before))
        self.follow(comm)
        self.save_whole(model)

    def scatter(self, comm: Comm, x: Tensor) -> Tensor:
        """Return chunk r of the sum of flat `x` in memory of its own, so that `x` can be freed."""
        total = self.reduce_scatter(comm, x)
        return total.clone() if total.untyped_storage().nbytes() > total.nbytes else total

    def follow(self, comm: Comm) -> None:
        """Hang what a stage does during forward and backward on the model."""

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
        place = {id(unit): number for number, unit in enumerate(units)}
        users: dict[int, set[int]] = {}

        def walk(module: nn.Module, number: int) -> None:
            number = place.get(id(module), number)
            for param in module.parameters(recurse=False):
                users.setdefault(id(param), set()).add(number)
            for child in module.children():
                walk(child, number)

        walk(model, 0)
        found: list[list[nn.Parameter]] = [[] for _ in units]
        for param in model.parameters():
            found[min(users[id(param)]) if len(users[id(param)]) == 1 else 0].append(param)
        return [(names[id(u)] or "the model", u, own) for u, own in zip(units, found, strict=True) if own or u is model]

    def flats_of(self, comm: Comm, params: list[nn.Parameter]) -> list[Flat]:
        """Return the vectors of one unit: parameters of one dtype that all need gradients, or all need none.

        Frozen parameters are in vectors, too, if they are sharded, or if what they were in float32 is.
        """
        kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[nn.Parameter]] = {}
        for param in params:
            if param.requires_grad or self.sharded or self.precision is not None:
                kind = self.dtypes[id(param)], param.dtype, param.requires_grad
                kinds.setdefault(kind, []).append(param)
        return [Flat(comm, own, [self.index_of.get(id(p), -1) for p in own], self.sharded) for own in kinds.values()]

    def cut(self, flat: Flat, wide: dict[int, Tensor]) -> list[nn.Parameter]:
        """Return this rank's parts of the parameters in `flat`, or of what they were before rounding: its masters.

        wide: {id of a parameter: what it was before it was rounded}.
        """
        if self.precision is None:
            return [nn.Parameter(part, flat.params[0].requires_grad) for part in flat.slices(flat.shard)]
        parts = [wide[id(flat.params[i])].reshape(-1)[begin:end] for i, begin, end, _ in flat.pieces]
        if flat.params[0].requires_grad:
            return self.precision.masters(parts)
        return [nn.Parameter(part.clone(), requires_grad=False) for part in parts]

    def optimizer(self, model: nn.Module, make: OptimizerOf) -> ShardedOptimizer:
        """Return the optimizer of this rank's pieces, which make(list of parameters) makes; after `start`."""
        self.require_begun()
        return ShardedOptimizer(self, make(self.pieces or [nn.Parameter(torch.zeros(0))]))

    def require_sums(self, comm: Comm) -> None:
        """Check nothing: `all_reduce` adds nothing here."""

    def require_not_before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raise ValueError for an optimizer of the model's own parameters, which have no gradients here."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = [name for name, p in zip(self.names, self.params, strict=True) if id(p) in held]
        if names:
            raise ValueError(
                f"this {type(optimizer).__name__} was made of the model's parameters, {names[0]} and {len(names) - 1} "
                f"more, whose gradients are in shards: after strategy.start, make it by strategy.optimizer(model, make)"
            )

    def require_unchanged(self, *units: Unit) -> None:
        """Raise ValueError if somebody else has changed a parameter of these units, or of any."""
        for unit in units or self.parts:
            for flat in unit.flats:
                for param, view in zip(flat.params, flat.views, strict=True):
                    shown = view if unit.whole else flat.nothing
                    if param.data_ptr() != shown.data_ptr() or param._version != self.version[id(param)]:
                        name = next(name for name, p in self.model.named_parameters() if p is param)
                        how = "in place" if param.data_ptr() == shown.data_ptr() else "its tensor was replaced"
                        raise ValueError(
                            f"{name} was changed behind the back of {type(self).__name__} ({how}), and its shards have "
                            "other values: give it its values before strategy.start, or by strategy.load_state_dict"
                        )

    # -- a step ---------------------------------------------------------------------------------------------------

    def add_gradients(self, comm: Comm, model: nn.Module) -> None:
        """Leave the sum over ranks of all gradients in shards, for the optimizer. Collective; see Strategy."""
        reducer = self.require_started(model)
        self.require_unchanged()
        reducer.begin()
        totals = []
        for flat in self.trainable[::-1]:  # the reducer's buckets
            for k in reversed(range(len(flat.indices))):
                flat.put(k)
            totals.append(self.reduce_scatter(comm, flat.packed()))
        self.hand_out(comm, totals)

    def hand_out(self, comm: Comm, totals: list[Tensor]) -> None:
        """Make the sums, [(n,)] in the order of the reducer, the gradients of the pieces. Collective."""
        flats = self.trainable[::-1]
        bad = [pair for flat in flats for pair in flat.bad]
        missing = sorted(index for flat in flats for index in flat.missing)
        for flat in flats:
            flat.begin()
        scaled = self.precision is not None and self.precision.scaler is not None
        unused = self.verdict.of_shards(comm, [] if scaled else bad, missing)
        by_flat = {id(flat): total for flat, total in zip(flats, totals, strict=True)}
        grads: list[Tensor | None] = []
        for flat in self.trainable:
            parts = flat.slices(by_flat[id(flat)])
            grads += [None if flat.indices[i] in unused else g for (i, *_), g in zip(flat.pieces, parts, strict=True)]
        self.grads = grads  # of the pieces, as they have traveled
        if self.precision is None:
            for piece, grad in zip(self.pieces, grads, strict=True):
                piece.grad = grad
        for index in range(len(self.params)):
            self.mark(index)

    def mark(self, index: int) -> None:
        """Let nobody read the gradient of parameter `index` as None, which is in shards now."""
        self.params[index].__dict__["gradient_is"] = (
            f"the gradient of {self.names[index]} is in shards from backward to optimizer.step(): clip by "
            "strategy.clip_gradients(max_norm), which has all of them"
        )

    def take(self) -> None:
        """Give the masters, if there are any, the gradients that have come, in float32. Collective; once in a step."""
        if self.precision is not None and self.grads:
            grads, self.grads = self.grads, []
            self.precision.take(self.comm, self.pieces, grads)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float, tp: Comm | None = None) -> float:
        """Scale all gradients down if their norm, of all shards together, is larger than `max_norm`. Collective.

        Args:    tp: the communicator along which the model itself is cut, such as mesh["tp"], if it is.
        Returns: the norm before; the same on every rank.
        Steps: one all_reduce of 8 bytes, and one over tp.   Ref: torch.nn.utils.clip_grad_norm_.
        """
        self.require_begun()
        self.take()
        cuts = cuts_of(self.model)
        square = torch.zeros(1, dtype=torch.float64, device=self.comm.device)
        for piece, (index, *_) in zip(self.pieces, self.pieces_in(), strict=True):
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
        self.require_unchanged()
        self.take()
        if self.precision is None or not self.precision.skipped:
            optimizer.step()
            self.publish()
        self.drop_gradients()

    def publish(self) -> None:
        """Give every rank the parameters that the pieces have become."""
        if self.precision is not None:
            self.precision.publish(self.pieces, self.places())
        self.spread()

    def spread(self) -> None:
        """Gather all chunks, as soon as they are new."""
        results_of([self.comm.background(self.all_gather, flat.full) for flat in self.trainable])

    def drop_gradients(self) -> None:
        """Forget the gradients of pieces and parameters."""
        self.grads = []
        for param in (*self.pieces, *self.params):
            param.__dict__.pop("gradient_is", None)
            param.grad = None

    def finish(self, comm: Comm, model: nn.Module) -> None:
        super().finish(comm, model)
        if self.precision is None:
            self.assemble()
        else:
            self.saves.close()
            self.widen()

    def assemble(self) -> None:
        """Make all parameters whole. Collective."""

    # -- what is held, and what is saved -----------------------------------------------------------------------------

    def tensors(self, model: nn.Module) -> dict[str, list[Tensor]]:
        flats = [flat for unit in self.parts for flat in unit.flats]
        packed = [flat.grad for flat in self.trainable if flat.grad is not None]
        grads = [grad for grad in (*map(grad_of, self.params), *self.grads) if grad is not None]
        own = [grad for grad in map(grad_of, self.pieces) if grad is not None] if self.precision is None else []
        parameters = [*model.parameters(), *(f.shard for f in flats), *(f.full for f in flats)]
        return {"parameters": parameters, "gradients": [*packed, *grads, *own]}

    def stateful(self, model: nn.Module) -> ZeRO1:
        self.require_begun()
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the whole model's state_dict(), {name: tensor}, on every rank. Collective."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def shards(self) -> StateDict:
        """Return this rank's shards of `state_dict`, as checkpoint.save_shards writes them; rank 0 has the buffers."""
        mine: dict[int, list[tuple[int, Tensor]]] = {}
        for flat in (flat for unit in self.parts for flat in unit.flats):
            mine |= {id(param): [] for param in flat.params}
            for (i, begin, *_), piece in zip(flat.pieces, self.pieces_of[id(flat)], strict=True):
                mine[id(flat.params[i])] = [(begin, piece)]
        found: StateDict = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) in mine:
                found[name] = shard_of(tensor.shape, mine[id(tensor)])
            elif self.comm.rank == 0:
                found[name] = tensor.detach()
        return found

    def load_state_dict(self, whole: dict[str, Tensor]) -> None:
        """Take this rank's chunks of `whole`, the state_dict() of the model, saved on any number of ranks. Collective.

        Raises:  RuntimeError of torch that names the tensor which is missing or has another shape.
        """
        self.model.load_state_dict(whole)

    def widen(self) -> None:
        self.require_unchanged()
        for unit in self.parts:
            if unit.works:  # of memory that `narrow` writes
                unit.release()
            for flat in unit.flats:
                if flat.sharded or self.precision is not None:
                    own = [piece.data for piece in self.pieces_of[id(flat)]]
                    wholes = flat.whole(own, self.dtypes[id(flat.params[0])])
                    for param, whole in zip(flat.params, wholes, strict=True):
                        param.data = whole

    def narrow(self) -> None:
        for unit in self.parts:
            for flat in unit.flats:
                wholes = [param.data for param in flat.params]
                for piece, (i, begin, end, _) in zip(self.pieces_of[id(flat)], flat.pieces, strict=True):
                    piece.data.copy_(wholes[i].reshape(-1)[begin:end])
                flat.fill(wholes, unit.whole)
        self.version = {id(p): p._version for p in self.model.parameters()}

    def wide(self) -> list[Tensor]:
        return [piece for own in self.pieces_of.values() for piece in own]

    def places(self) -> list[Tensor]:
        """Return the parts of the parameters that the pieces are, or are masters of."""
        return [part for flat in self.trainable for part in flat.slices(flat.shard)]

    def pieces_in(self) -> list[tuple[int, int, int]]:
        """Return [(index of the parameter, begin, end)] of every piece."""
        return [(flat.indices[i], begin, end) for flat in self.trainable for i, begin, end, _ in flat.pieces]

    def whole(self, values: Sequence[Tensor | float | None], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return the whole tensors from all ranks' pieces, `values`, in the order of the parameters: see Flat.whole.

        dtype: by default the pieces'. Collective: an all_gather per unit.
        """
        found: dict[int, Tensor] = {}
        rest = iter(values)
        for flat in self.trainable:
            own = [next(rest) for _ in flat.pieces]
            found |= zip(
                flat.indices, flat.whole(own, dtype or (torch.float32 if self.precision else None)), strict=True
            )
        return [found[index] for index in range(len(self.params))]

    def stop(self) -> None:
        """Forget the model. Not collective: parameters that are released then, without `finish`, stay NaN."""
        if self.reducer is not None:
            self.drop_gradients()
            for param in self.params:
                if type(param) is ShardedParameter:
                    param.__class__ = nn.Parameter  # pyrefly: ignore[bad-argument-type]
        super().stop()


class ZeRO2(ZeRO1):
    """Gradients in shards as well: a unit's are added and freed as soon as backward has made them.

    Whole gradients of this rank are there for the unit that backward is in and those whose reduce-scatter is under way;
    inside accumulating() they all are, as they travel once.
    Steps: one reduce_scatter, during backward, and one all_gather per unit.   Bytes per rank: as ZeRO1.
    """

    def follow(self, comm: Comm) -> None:
        for index, param in enumerate(self.params):
            self.hook(param.register_post_accumulate_grad_hook(lambda _, index=index: self.ready(index)))

    def ready(self, index: int) -> None:
        """Send what can be sent, now that autograd has made the gradient of parameter `index`."""
        if not self.adds_up:
            gradient_ready(self.comm, self.require_begun(), index)
            self.mark(index)

    def add_gradients(self, comm: Comm, model: nn.Module) -> None:
        """Send what backward has not reached, and wait until all sums are in shards. Collective; see Strategy."""
        reducer = self.require_started(model)
        for index in reversed(range(len(self.params))):
            if not reducer.collected[index]:
                gradient_ready(comm, reducer, index)
        totals = reducer.results()
        self.require_unchanged()
        self.hand_out(comm, totals)


class ZeRO3(ZeRO2):
    """Parameters in shards as well: a unit gathers them before it is used, forward and backward, then releases them.

    While a unit computes, the next one, in the order of the forward pass before, is gathered in the background.
    reshard_after_forward: True releases every unit after its forward, 3 Psi bytes in a step; None, all but the last and
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
        units: Units = units_of,
        reshard_after_forward: bool | None = None,
    ) -> None:
        super().__init__(reduce_scatter, all_gather, precision, units)
        self.reshard_after_forward = reshard_after_forward

    @property
    def talks_in_backward(self) -> bool:
        return True

    def follow(self, comm: Comm) -> None:
        super().follow(comm)
        self.expected = self.parts  # the units in the order of the latest forward pass; at first as they are registered
        self.trail: list[Unit] = []  # of the one that is made
        self.taping = False  # is it one that backward follows?
        self.unit_of = {id(p): unit for unit in self.parts for flat in unit.flats for p in flat.params}
        for unit in self.parts:
            before, after = partial(self.before_forward, unit), partial(self.after_forward, unit)
            self.hook(unit.module.register_forward_pre_hook(before, prepend=True))
            self.hook(unit.module.register_forward_hook(after, with_kwargs=True))

    def gather(self, unit: Unit) -> None:
        """Begin to gather a unit, in the background, if nobody has."""
        if not unit.whole and not unit.works:
            for flat in unit.flats:
                flat.allocate()
            unit.works = [self.comm.background(self.all_gather, flat.full) for flat in unit.flats]

    def need(self, unit: Unit, following: Unit | None) -> None:
        """Make the parameters of a unit whole, and begin to gather the `following` one's."""
        self.gather(unit)
        works, unit.works = unit.works, []
        if following is not None:
            self.gather(following)
        results_of(works)
        if not unit.whole:
            self.require_unchanged(unit)
            unit.whole = True
            for flat in unit.flats:
                flat.attach()

    def before_forward(self, unit: Unit, *_: object) -> None:
        if in_backward():  # it is computed again
            place = max((k for k, other in enumerate(self.trail) if other is unit), default=0)
            self.need(unit, self.trail[place - 1] if place else None)
            return
        if unit is self.parts[0]:  # the model itself
            self.expected, self.trail = self.trail or self.expected, []
            self.taping = torch.is_grad_enabled()
            for other in self.parts:
                other.begin()
        place = len(self.trail)
        self.trail.append(unit)
        known = self.expected[place + 1 : place + 2] if self.expected[place : place + 1] == [unit] else []
        self.need(unit, known[0] if known else None)

    def after_forward(self, unit: Unit, _: nn.Module, args: object, kwargs: object, out: object) -> None:
        if in_backward():
            return
        keeps = self.reshard_after_forward is False
        if self.reshard_after_forward is None:
            keeps = unit is self.parts[0] or unit is self.expected[-1]
        if not self.taping or not keeps:
            unit.release()
        trail, place = self.trail, len(self.trail) - 1 - self.trail[::-1].index(unit)
        for tensor in with_gradient(out):
            tensor.register_hook(lambda _: self.need(unit, trail[place - 1] if place else None))
        if unit.has_frozen and (tensors := with_gradient((args, kwargs))):
            unit.calls += 1
            register_multi_grad_hook(tensors, lambda _: self.behind(unit))

    def behind(self, unit: Unit) -> None:
        """Count one call of a unit as done: backward has come through it, to all of its inputs."""
        unit.calls -= 1
        self.release_if_done(unit)

    def ready(self, index: int) -> None:
        super().ready(index)
        unit = self.unit_of[id(self.params[index])]
        unit.waiting -= 1
        self.release_if_done(unit)

    def release_if_done(self, unit: Unit) -> None:
        """Release a unit that has all gradients; if parameters are frozen, its inputs', too."""
        if unit.waiting <= 0 and unit.calls <= 0:
            unit.begin()
            unit.release()

    def add_gradients(self, comm: Comm, model: nn.Module) -> None:
        for unit in self.parts:
            unit.begin()
            unit.release()  # if backward has not reached all
        super().add_gradients(comm, model)

    def spread(self) -> None:
        """Send nothing yet: what is needed is gathered when it is."""
        self.release()

    def release(self) -> None:
        for unit in self.parts:
            unit.release()

    def assemble(self) -> None:
        for unit in self.parts:
            self.need(unit, None)


def in_backward() -> bool:
    """Return True if autograd is at work in this thread."""
    return torch._C._current_graph_task_id() != -1


def with_gradient(values: object) -> list[Tensor]:
    """Return the tensors in `values`, nested tuples, lists and dicts, that need a gradient."""
    if isinstance(values, Tensor):
        return [values] if values.requires_grad else []
    if isinstance(values, dict):
        return [t for v in values.values() for t in with_gradient(v)]
    return [t for v in values for t in with_gradient(v)] if isinstance(values, list | tuple) else []


# -- what is saved -----------------------------------------------------------------------------------------------------


LIKE, NUMBER = "like its parameter", "one number"


class ShardedOptimizer:
    """A torch optimizer of this rank's pieces, whose step all ranks take together.

    optimizer: the torch optimizer itself, which a learning-rate schedule of torch needs.
    """

    def __init__(self, strategy: ZeRO1, optimizer: torch.optim.Optimizer) -> None:
        self.strategy, self.optimizer = strategy, optimizer
        of_all = strategy.model.parameters() if strategy.precision is None else strategy.params
        place = {id(p): number for number, p in enumerate(of_all)}
        self.count, self.numbers = len(place), [place[id(p)] for p in strategy.params]  # as DataParallel's counts them

    @property
    def param_groups(self) -> list[StateDict]:
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        self.strategy.drop_gradients()

    def step(self) -> None:
        """Update the parameters of all ranks, and drop the gradients. Collective."""
        self.strategy.update(self.optimizer)

    def state_dict(self) -> StateDict:
        """Return the state_dict() of the optimizer that DataParallel would have, on every rank. Collective.

        Raises:  ValueError on every rank for a state that is neither like a piece nor one number.
        """
        strategy = self.strategy
        rows = [self.optimizer.state.get(piece, {}) for piece in strategy.pieces]
        pairs = zip(strategy.pieces, rows, strict=True)
        mine = {(key, kind_of(v, piece)) for piece, row in pairs for key, v in row.items() if v is not None}
        tables = gather_items(strategy.comm, sorted(mine))
        state: dict[int, dict[str, Tensor]] = {}
        for key, kind in sorted({(pair[0], pair[1]) for table in tables for pair in table if len(pair) == 2}):
            if kind not in (LIKE, NUMBER):
                raise ValueError(
                    f"no checkpoint can hold an optimizer whose {key} is {kind}: SGD, Adam and the like can be saved"
                )
            values = [row.get(key) for row in rows]
            known = {place[0] for place, v in zip(strategy.pieces_in(), values, strict=True) if v is not None}
            tables_of = gather_integers(strategy.comm, [index in known for index in range(len(self.numbers))])
            wholes = strategy.whole(values, torch.float64 if kind == NUMBER else None)
            for index, (number, whole) in enumerate(zip(self.numbers, wholes, strict=True)):
                if any(row[index] for row in tables_of):
                    value = whole.flatten()[0].float() if kind == NUMBER else whole
                    state.setdefault(number, {})[key] = value
        inner = {"state": state, "param_groups": [self.group() | {"params": list(range(self.count))}]}
        if strategy.precision is None:
            return inner
        return {"inner": inner, "precision": strategy.precision.state_dict()}

    def shards(self) -> StateDict:
        """Return this rank's shards of `state_dict`, as checkpoint.save_shards writes them. No messages."""
        strategy = self.strategy
        state: dict[int, StateDict] = {}
        for piece, (index, begin, _) in zip(strategy.pieces, strategy.pieces_in(), strict=True):
            shape = strategy.params[index].shape
            for key, value in self.optimizer.state.get(piece, {}).items():
                like = kind_of(value, piece) == LIKE
                row = state.setdefault(self.numbers[index], {})
                row[key] = shard_of(shape, [(begin, value)]) if like else value
        inner = {"state": state, "param_groups": [self.group() | {"params": list(range(self.count))}]}
        if strategy.precision is None:
            return inner
        return {"inner": inner, "precision": strategy.precision.state_dict()}

    def load_state_dict(self, whole: StateDict) -> None:
        """Take this rank's pieces of the state of the whole model's optimizer, from any number of ranks. Collective.

        Raises:  ValueError that says what does not fit.
        """
        strategy, precision = self.strategy, self.strategy.precision
        inner = whole if precision is None else whole["inner"]
        (group,) = inner["param_groups"]
        if len(group["params"]) != self.count:
            raise ValueError(f"its optimizer has {len(group['params'])} parameters, this model {self.count}")
        rows = {}
        for k, (index, begin, end) in enumerate(strategy.pieces_in()):
            row, param = inner["state"].get(self.numbers[index], {}), strategy.params[index]
            like = {key for key, v in row.items() if shape_of(v) == param.shape and (param.ndim or key != "step")}
            rows[k] = {key: v.reshape(-1)[begin:end] if key in like else v for key, v in row.items()}
        mine = self.optimizer.state_dict()["param_groups"][0]["params"]
        self.optimizer.load_state_dict({"state": rows, "param_groups": [self.group() | group | {"params": mine}]})
        if precision is not None:
            precision.load_state_dict(whole["precision"])

    def group(self) -> StateDict:
        """Return the options of the one group of parameters. Raises ValueError if there are several."""
        groups = self.optimizer.state_dict()["param_groups"]
        if len(groups) > 1:
            raise ValueError(f"a checkpoint needs an optimizer of one group of parameters: this one has {len(groups)}")
        return groups[0]


def kind_of(value: object, piece: Tensor) -> str:
    """Return LIKE if a value of an optimizer's state is like the piece, NUMBER if it is one, else its shape."""
    shape = shape_of(value)
    return NUMBER if shape == () else LIKE if shape == piece.shape else f"of shape {tuple(shape)}"


def shape_of(value: object) -> Sequence[int]:
    return value.shape if isinstance(value, Tensor) else ()
