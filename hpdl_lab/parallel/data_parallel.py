"""Data parallelism: every rank holds the whole model, sees its shard of each batch, and gradients are added over ranks.

    rank 0: model, shard 0 -> gradient g0 --+                        +--> g --> the same update
    rank 1: model, shard 1 -> gradient g1 --+-- g = g0 + g1 + g2 ----+--> g --> the same update
    rank 2: model, shard 2 -> gradient g2 --+      (all_reduce)      +--> g --> the same update

The loss on a rank is the sum over its shard divided by the *global* batch. So gradients add up to the gradient of the
mean over the global batch, whatever the sizes of the shards. If every rank takes the mean over its own shard, and
all shards are of one size, the mean over ranks is the same: that is `average_all_gradients`, as Horovod and DDP do it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..comm.base import Comm, best_all_reduce
from ..comm.buffers import DTYPES, dtype_name
from ..units import MIB
from .checkpoint import Stateful
from .consensus import GradientCheck, is_finite, overflowed, require_same_model, require_sums_of
from .optimizer_state import OptimizerLike, OptimizerOf, StrategyOptimizer
from .precision import Precision
from .reducer import (
    AllReduce,
    AssignBuckets,
    Bucket,
    GradientReady,
    Reducer,
    assign_buckets,
    by_dtype,
    gradient_ready,
    name_of,
    parts_of,
    require_function,
    result_of,
)

if TYPE_CHECKING:
    from collections.abc import Generator


def broadcast_parameters(comm: Comm, model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0.

    Replicas that start different stay different, although all of them take the same
    steps. Buffers, such as the running mean of a batch norm, are a part of the replica,
    too, and no gradient reaches them.

    Args:    model: nn.Module, of the same structure on every rank, overwritten in
             place.
    Returns: None.
    Raises:  Mismatch if the ranks' sizes or dtypes differ; CommTimeout if a rank does
             not answer.
    Steps: one broadcast per tensor.
    Bytes: rank 0 sends every parameter and buffer; other ranks may pass them on.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        comm.broadcast(tensor.data)


def replicate(comm: Comm, model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0: tensors of any dtype and any order in memory."""
    for tensor in (*model.parameters(), *model.buffers()):
        flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        comm.broadcast(as_sent(flat))
        tensor.data.copy_(flat.view(tensor.shape))


def broadcast_buffers(comm: Comm, model: nn.Module) -> None:
    """Give every rank the buffers of rank 0, as `replicate` does at the start."""
    for buffer in model.buffers():
        flat = buffer.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        comm.broadcast(as_sent(flat))
        buffer.copy_(flat.view(buffer.shape))


def as_sent(flat: Tensor) -> Tensor:
    """Return `flat` in its own dtype, which every rank must have; as bytes if no message has it, as for bools."""
    return flat if dtype_name(flat.dtype) in DTYPES else flat.view(torch.uint8)


def average_all_gradients(comm: Comm, params: Iterable[nn.Parameter], all_reduce: AllReduce) -> None:
    """Replace every gradient by its mean over ranks, with a single all_reduce.

        w1.grad (64, 128)   b1.grad (128,)   w2.grad (128, 10)  ...  this rank's
        [ w1 ........ | b1 | w2 .... | ... ]   (N,)                  packed, averaged
        w1.grad (64, 128)   b1.grad (128,)   w2.grad (128, 10)  ...  unpacked

    Args:    params: parameters of one dtype, in the same order on every rank. If a
             parameter has no gradient on this rank, send zeros for it. Another rank may
             have a gradient for it, and all ranks must send the same number N.
             all_reduce: f(comm, x), which replaces the flat tensor x by its sum over
             ranks.
    Returns: None. Every p.grad is overwritten. It is bitwise the same on every rank if
             the result of all_reduce is.
    Raises:  ValueError if the ranks' sizes differ; CommTimeout if a rank does not
             answer.
    Steps: one all_reduce.
    Bytes per rank: one all_reduce of N elements.
    Ref: Sergeev & Del Balso 2018 (Horovod), tensor fusion; Li et al. 2020 (PyTorch
    DDP), section 3.2.
    """
    params = list(params)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    ### BEGIN SOLUTION
    flat = torch.cat([grad.reshape(-1) for grad in grads])  # (N,)
    all_reduce(comm, flat)
    flat /= comm.size
    for param, mean in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = mean.view(param.shape)

    ### END SOLUTION


class Strategy(ABC):
    """The way in which gradients are added over ranks; a subclass says which parameters travel together.

        strategy.start(comm, model)
        optimizer = strategy.optimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-3))
        for every step:
            with strategy.accumulating():       # for all micro-batches but the last; not needed for a single one
                strategy.scaled(loss(micro-batch)).backward()
            strategy.scaled(loss(last micro-batch)).backward()
            strategy.add_gradients(comm, model)
            optimizer.step()
            strategy.after_step(comm, model)
        strategy.finish(comm, model)
        strategy.stop()

    all_reduce: f(comm, x), replaces the flat tensor x by its sum over ranks; by default the communicator's own.
    precision: "bfloat16" ("bf16"), "float16" ("fp16") or a Precision: the model computes in it and gradients travel in
    it, while the optimizer updates float32 masters, and takes no step if any rank has infinity or NaN in a scaled
    gradient. model.state_dict() holds the masters. "float32" ("fp32") is the same as None.
    A parameter that is used twice (tied weights) is one parameter, one that needs no gradient is left alone, and one
    that no rank has a gradient for keeps none, as on a single rank.
    Batch norm takes its statistics from the shard of its rank, so ranks do not equal one rank with the whole batch,
    whatever the strategy: models/batch_norm.py makes it one batch.
    """

    synchronous = True  # every rank takes the same step at the same time
    background = False  # are buckets sent by comm.background?

    def __init__(self, all_reduce: AllReduce | None = None, precision: str | Precision | None = None) -> None:
        self.precision = Precision.of(precision)
        self.all_reduce = best_all_reduce if all_reduce is None else require_function("all_reduce(comm, x)", all_reduce)
        self.reducer: Reducer[Bucket] | None = None  # between start and stop
        self.owner: tuple[int, int] | None = None  # (this object, which no copy is; the rank that has started it)
        self.adds_up = False  # inside accumulating()?
        self.hooks = ExitStack()  # removes them when it is closed
        self.saves = ExitStack()  # the same for the hooks of `register_state_dict_hooks`
        self.pairs: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # (parameter, in 16 bits, what it is in float32)

    @property
    def talks_in_backward(self) -> bool:
        """True if a hook of it may wait for messages, so that simulated ranks have to be threads."""
        return False

    def __repr__(self) -> str:
        options = inspect.signature(type(self).__init__).parameters.values()
        given = [(o.name, getattr(self, o.name)) for o in options if o.name != "self"]
        defaults = {o.name: o.default for o in options} | {"all_reduce": best_all_reduce}
        texts = [f"{name}={name_of(value)}" for name, value in given if value != defaults[name]]
        return f"{type(self).__name__}({', '.join(texts)})"

    @abstractmethod
    def assign(self, params: Sequence[nn.Parameter]) -> list[list[int]]:
        """Say which parameters share a message: lists of indices into `params`, in the order in which they are sent."""

    def start(self, comm: Comm, model: nn.Module) -> None:
        """Begin with equal replicas: rank 0's parameters and buffers. Collective, before the first step.

        Raises:  ValueError on every rank if their models differ in more than values: which rank, what it has.
        """
        self.require_own(comm)
        self.stop()
        self.owner = (id(self), comm.rank)
        require_same_model(comm, model, repr(self))
        replicate(comm, model)
        pairs = [(name, p) for name, p in model.named_parameters() if p.requires_grad]  # tied ones once
        self.names, self.params = [name for name, _ in pairs], [p for _, p in pairs]
        self.gradient_check = GradientCheck(self.names)
        if self.precision is not None:
            self.lower(model, self.precision)
        parts = self.assign(self.params)
        buckets = [Bucket(comm, [self.params[i] for i in part], part, self.background) for part in parts]
        self.reducer = Reducer(buckets, self.all_reduce)

    def lower(self, model: nn.Module, precision: Precision) -> None:
        """Compute in 16 bits until `stop`, which gives the model what the masters hold."""
        self.masters = precision.masters(self.params)
        master_of = {id(p): master.data for p, master in zip(self.params, self.masters, strict=True)}
        wide = [master_of.get(id(p), p.data) for p in model.parameters()]
        for handle in precision.lower(model):
            self.hook(handle)
        self.pairs = [(p, p.data, whole) for p, whole in zip(model.parameters(), wide, strict=True)]

        def restore() -> None:
            for param in model.parameters():
                param.grad = None
            self.widen()

        self.hooks.callback(restore)
        self.register_state_dict_hooks(model)

    def register_state_dict_hooks(self, model: nn.Module) -> None:
        """Let model.state_dict() hold, and model.load_state_dict() take, what `widen` gives the model, until `stop`.

        Between these two torch saves and loads the model as it would without a strategy:

            masters --widen--> the whole model in float32 --narrow--> masters, and 16 bits or shards that compute
                                 |             ^
                            state_dict   load_state_dict

        state_dict(keep_vars=True) gives the parameters themselves, as they compute.
        """
        opened = ExitStack()

        def begin(*_: object) -> None:
            self.widen()
            opened.callback(self.narrow)

        def end(*_: object) -> None:
            opened.close()

        def begin_to_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            if not keep_vars:
                begin()

        for handle in (
            model.register_state_dict_pre_hook(begin_to_save),
            model._register_state_dict_hook(end),  # this and the next have no underscore from torch 2.5 on
            model._register_load_state_dict_pre_hook(begin),
            model.register_load_state_dict_post_hook(end),
        ):
            self.saves.callback(handle.remove)

    def widen(self) -> None:
        """Give the model its whole parameters in the dtype in which it came. Collective if ranks have shards."""
        for param, _, whole in self.pairs:
            param.data = whole

    def narrow(self) -> None:
        """Undo `widen`, and take the values that the model has by now."""
        for param, low, whole in self.pairs:
            param.data = low.copy_(whole)

    def wide(self) -> list[Tensor]:
        """Return what this rank keeps of the parameters in the dtype in which they came."""
        return [whole for *_, whole in self.pairs]

    def optimizer(self, model: nn.Module, make: OptimizerOf) -> OptimizerLike:
        """Return what make(parameters), a torch optimizer, is here; after `start`, which decides on the parameters."""
        self.require_begun()
        if self.precision is None:
            return make(list(model.parameters()))
        return StrategyOptimizer(self, make(self.masters))

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the masters, unless all ranks skip this step, and round them into the parameters that compute."""
        if self.precision is not None and not self.precision.skipped:
            optimizer.step()
            self.precision.masters_to_params(self.masters, self.params)

    def drop_gradients(self) -> None:
        """Forget the gradients of masters and parameters."""
        for param in (*self.params, *self.masters):
            param.grad = None

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss that backward starts from: times the loss scale, if there is one."""
        return loss if self.precision is None else self.precision.scaled(loss)

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients down if their norm is larger than `max_norm`; returns the norm before.

        After add_gradients. With masters these are the gradients of the masters, which hold no loss scale any more.
        Ref: torch.nn.utils.clip_grad_norm_.
        """
        self.require_begun()
        return float(nn.utils.clip_grad_norm_(self.params if self.precision is None else self.masters, max_norm))

    def facts(self) -> dict[str, float]:
        """Return {name: number} of what changes from step to step, which a training reports."""
        scaler = self.precision.scaler if self.precision else None
        return {"loss_scale": scaler.scale} if scaler else {}

    def require_sums(self, comm: Comm) -> None:
        """Raise ValueError on every rank unless `all_reduce` adds what it should. Collective, after `start`."""
        require_sums_of(comm, self.all_reduce, [bucket.flat.dtype for bucket in self.require_begun().buckets])

    def hook(self, handle: RemovableHandle) -> None:
        """Let `stop` remove this hook."""
        self.hooks.callback(handle.remove)

    def add_gradients(self, comm: Comm, model: nn.Module) -> None:
        """Replace every parameter's gradient by its sum over ranks. Collective, after the last backward of a step.

        Raises:  FloatingPointError on every rank if one has NaN or infinity in a gradient: which rank, which layer;
                 or if the sum overflows float16: which layer.
        """
        reducer = self.require_started(model)
        reducer.begin()
        for index in reversed(range(len(self.params))):
            reducer.collect(index)
        totals = [self.reduce_bucket(comm, bucket) for bucket in reducer.buckets]
        self.finalize_backward(comm, totals)

    def finalize_backward(self, comm: Comm, totals: Sequence[Tensor]) -> None:
        """Make the sums of all buckets the gradients, of the masters if there are any. Collective."""
        skips = self.precision is not None and self.precision.scaler is not None
        finalize_gradients(comm, self.gradient_check, self.params, self.require_begun().buckets, totals, skips)
        if self.precision is not None:
            self.precision.grads_to_masters(comm, self.masters, [p.grad for p in self.params])

    def reduce_bucket(self, comm: Comm, bucket: Bucket) -> Tensor:
        """Return (N + 1,), the sum over ranks of a bucket that has its gradients, and of its flag."""
        return result_of(self.all_reduce, comm, bucket.packed())

    def after_step(self, comm: Comm, model: nn.Module) -> None:
        """Do what follows the optimizer's step, in strategies whose replicas differ for a while. See local_sgd.py."""
        return None

    @contextmanager
    def accumulating(self) -> Generator[None]:
        """Let backward, inside, only add up on this rank: gradients travel once, after the last micro-batch."""
        self.adds_up = True
        try:
            yield
        finally:
            self.adds_up = False

    def require_own(self, comm: Comm) -> None:
        """Raise ValueError if simulated ranks, whose memory is one, use one strategy together."""
        started, rank = self.owner or (None, None)
        if started == id(self) and rank != comm.rank:
            raise ValueError(
                f"rank {comm.rank} starts the {type(self).__name__} of rank {rank}: every simulated rank needs its "
                "own: make it inside the function, or pass it to sim.run as an argument, which copies it for each rank"
            )

    def require_begun(self) -> Reducer[Bucket]:
        """Return the reducer. Raises ValueError outside start ... stop."""
        if self.reducer is None:
            raise ValueError(
                f"{type(self).__name__} was not started: strategy.start(comm, model) before the first step"
            )
        return self.reducer

    def require_started(self, model: nn.Module) -> Reducer[Bucket]:
        """Return the reducer. Raises ValueError unless `model` is what was started, and its gradients are complete."""
        reducer = self.require_begun()
        if self.adds_up:
            raise ValueError("add_gradients inside accumulating(): call it, and the last backward, after that block")
        now = [p for p in model.parameters() if p.requires_grad]
        if len(now) != len(self.params) or any(a is not b for a, b in zip(now, self.params, strict=True)):
            raise ValueError(
                f"{type(self).__name__} was started with {len(self.params)} trainable parameters and now there are "
                f"{len(now)}, or others: call strategy.start(comm, model) again after a change"
            )
        return reducer

    def finish(self, comm: Comm, model: nn.Module) -> None:
        """Make all replicas one model, after the last step and before the model is used. Collective.

        Parameters are equal by now. Buffers are not if each rank has kept the running mean of its own shards: all
        take rank 0's.
        Raises:  ValueError if the strategy was not started.
        """
        self.require_begun()
        broadcast_buffers(comm, model)

    def stateful(self, model: nn.Module) -> Stateful:
        """Return what a checkpoint saves, and loads, as the model."""
        return model

    def tensors(self, model: nn.Module) -> dict[str, list[Tensor]]:
        """Return the parameters and the gradients that this rank holds now."""
        params = list(model.parameters())
        buckets = [] if self.reducer is None else [bucket.flat for bucket in self.reducer.buckets]
        return {"parameters": [*params], "gradients": [*buckets, *(p.grad for p in params if p.grad is not None)]}

    def held(self, model: nn.Module, optimizer: OptimizerLike) -> dict[str, int]:
        """Return the bytes of "parameters", "gradients" and "optimizer" that this rank holds now; after `start`.

        Memory is counted, whatever tensors look at it: once, and whole. optimizer: of `self.optimizer`; its part are
        its states, and what is in float32 of parameters in 16 bits: masters, and frozen ones.
        """
        inner: Any = getattr(optimizer, "optimizer", optimizer)  # torch's own
        states = [value for row in inner.state.values() for value in row.values() if isinstance(value, Tensor)]
        updated = [p for group in inner.param_groups for p in group["params"]]
        seen: set[int] = set()
        found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
        for kind, tensors in (self.tensors(model) | {"optimizer": [*updated, *states, *self.wide()]}).items():
            for storage in (tensor.untyped_storage() for tensor in tensors):
                if storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    found[kind] += storage.nbytes()
        return found

    def stop(self) -> None:
        """Forget the model. Not collective."""
        self.saves.close()
        self.hooks.close()
        self.reducer, self.owner, self.pairs = None, None, []


def finalize_gradients(
    comm: Comm,
    check: GradientCheck,
    params: Sequence[nn.Parameter],
    buckets: Sequence[Bucket],
    totals: Sequence[Tensor],
    skips: bool = False,
) -> None:
    """Make the sums of all buckets the parameters' gradients, unless something is wrong with them.

    skips: infinity and NaN pass: the step will be skipped for them.
    """
    unused = []
    if not skips or all(map(is_finite, totals)):
        unused = check.check(comm, params, buckets, totals)
        check.require_no_overflow(overflowed(buckets, totals))
    for bucket, total in zip(buckets, totals, strict=True):
        bucket.set_grads(total)
    for index in unused:
        params[index].grad = None


class DataParallelNaive(Strategy):
    """An all-reduce per parameter: right, and slow if latency counts (a message per tensor, however small).

    Steps: one all_reduce per parameter tensor.   Bytes per rank: as in an all_reduce of N + 1 elements each.
    """

    def assign(self, params: Sequence[nn.Parameter]) -> list[list[int]]:
        return [[index] for index in range(len(params))]


class DataParallel(Strategy):
    """A single all-reduce for all gradients together, packed into one flat vector.

        [ w1 ........ | b1 | w2 .... | ... | flag ]  (N + 1,)   one message per hop, so latency is paid once

    Steps: one all_reduce per dtype.   Bytes per rank: as in an all_reduce of N + 1 elements.
    Ref: Sergeev & Del Balso 2018 (tensor fusion); Li et al. 2020.
    """

    def assign(self, params: Sequence[nn.Parameter]) -> list[list[int]]:
        return list(by_dtype(params).values())


class DataParallelBucketed(Strategy):
    """An all-reduce per bucket, after backward: the sizes of DataParallelOverlapped, without its overlap.

    bucket_nbytes, first_nbytes: see assign_buckets, in whose place another function can cut them. Parameters of
    different dtypes share no bucket.
    The defaults are DDP's, for networks between hosts: for small models, or in the memory of one machine, try a
    tenth of them.
    Steps: one all_reduce per bucket.   Bytes per rank: as in an all_reduce of N + 1 elements of each bucket.
    """

    def __init__(
        self,
        all_reduce: AllReduce | None = None,
        bucket_nbytes: float = 25 * MIB,
        first_nbytes: float = 1 * MIB,
        assign_buckets: AssignBuckets = assign_buckets,
        precision: str | Precision | None = None,
    ) -> None:
        super().__init__(all_reduce, precision)
        if not all(isinstance(nbytes, int | float) and nbytes >= 1 for nbytes in (bucket_nbytes, first_nbytes)):
            got = f"got {bucket_nbytes!r} and {first_nbytes!r} for the first"
            raise ValueError(f"a bucket holds a number of bytes, at least 1: {got}")
        self.bucket_nbytes, self.first_nbytes = bucket_nbytes, first_nbytes
        self.assign_buckets = require_function("assign_buckets(nbytes, limit, first)", assign_buckets)

    def assign(self, params: Sequence[nn.Parameter]) -> list[list[int]]:
        buckets = parts_of(params, self.bucket_nbytes, self.first_nbytes, self.assign_buckets)
        # Whichever dtype: a bucket is complete when its first-registered gradient is ready.
        return sorted(buckets, key=min, reverse=True) if len(by_dtype(params)) > 1 else buckets


class DataParallelOverlapped(DataParallelBucketed):
    """The buckets of DataParallelBucketed, each sent while backward still computes the gradients of the others.

    Every trainable parameter has a hook that autograd calls when its gradient is complete. A parameter that backward
    does not reach keeps its bucket, and those after it, back until add_gradients, which counts it as zeros.
    gradient_ready: what the hook does.
    Steps: one all_reduce per bucket.   Bytes per rank: as in an all_reduce of N + 1 elements of each bucket.
    """

    background = True

    def __init__(
        self,
        all_reduce: AllReduce | None = None,
        bucket_nbytes: float = 25 * MIB,
        first_nbytes: float = 1 * MIB,
        assign_buckets: AssignBuckets = assign_buckets,
        gradient_ready: GradientReady = gradient_ready,
        precision: str | Precision | None = None,
    ) -> None:
        super().__init__(all_reduce, bucket_nbytes, first_nbytes, assign_buckets, precision)
        self.gradient_ready = require_function("gradient_ready(comm, reducer, index)", gradient_ready)

    @property
    def talks_in_backward(self) -> bool:
        return self.gradient_ready is not gradient_ready  # somebody else's may do anything

    def start(self, comm: Comm, model: nn.Module) -> None:
        super().start(comm, model)

        def ready(index: int) -> None:
            if not self.adds_up:
                self.gradient_ready(comm, self.require_begun(), index)

        for index, param in enumerate(self.params):
            self.hook(param.register_post_accumulate_grad_hook(lambda _, index=index: ready(index)))

    def add_gradients(self, comm: Comm, model: nn.Module) -> None:
        """Send what backward has not reached, and wait until all buckets have come back. See Strategy."""
        reducer = self.require_started(model)
        for index in reversed(range(len(self.params))):
            if not reducer.collected[index]:
                self.gradient_ready(comm, reducer, index)
        if len(reducer.works) != len(reducer.buckets):
            raise ValueError(
                f"gradient_ready has started {len(reducer.works)} of {len(reducer.buckets)} buckets, but all are full"
            )
        self.finalize_backward(comm, reducer.end(comm))
