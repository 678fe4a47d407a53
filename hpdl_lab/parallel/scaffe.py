"""S-Caffe's three designs of a training step: one root solver, and how much of its messages hides behind arithmetic.

    SC-B    | b1 b2 b3 | f1 f2 f3 | B3 B2 B1 | r3 r2 r1 | update        blocking
    SC-OB   | b1 b2 b3 |            B3 B2 B1 | r3 r2 r1 | update        overlapped propagation: layer 1 computes while
               | f1 f2 f3 |                                             layer 2's parameters are on their way
    SC-OBR  | b1 b2 b3 |            B3 B2 B1 | update                   and overlapped reduction: layer 3's gradients
               | f1 f2 f3 |            | r3 r2 r1 |                     travel while layer 2's are computed

b: broadcast of a layer's parameters from rank 0, f and B: forward and backward of the layer, r: reduction of its
gradients to rank 0, which alone takes the optimizer's step. Ref: Awan et al. 2017, "S-Caffe", PPoPP.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..comm.base import Comm, Work
from ..predict.graph import Need, TaskGraph
from .consensus import overflowed
from .data_parallel import Strategy, broadcast_buffers
from .reducer import Reducer, by_dtype, gradient_ready

NOTHING = -1  # in the place of the index of a parameter


class SCaffe(Strategy):
    """The blocking design, SC-B: nothing overlaps.

        seconds per step = sum(b) + sum(f) + sum(B) + sum(r) + update

    The first forward of a step brings rank 0's parameters to the other ranks, be it for training or, under no_grad,
    to evaluate. So all calls go to the model as a whole. A step begins with add_gradients, and again with the step of a
    torch optimizer: a forward between the two brings the old parameters, and the next one the new ones.
    Steps: a broadcast and a reduction per layer and dtype, and a broadcast of a flag.
    Bytes: N elements from rank 0 to all, and N + layers from all to rank 0.
    """

    overlaps_propagation = overlaps_reduction = False
    background = True

    def __init__(self) -> None:
        super().__init__()

    def assign(self, params: Sequence[nn.Parameter]) -> list[list[int]]:
        index_of = {id(p): index for index, p in enumerate(params)}
        return [[index_of[id(p)] for p in layer] for layer in reversed(self.layers)]  # the last one is ready first

    def start(self, comm: Comm, model: nn.Module) -> None:
        """Begin with rank 0's parameters; hooks bring them to the other ranks at the beginning of every forward."""
        self.layers = _layers_of(model)
        super().start(comm, model)
        self.comm = comm
        self.reducer = Reducer(self.require_begun().buckets, _reduce_layer)
        self.layer_of = {id(p): i for i, layer in enumerate(self.layers) for p in layer}
        self._begin_step()
        # Before all other hooks: such a one may compute a weight from parameters, as weight_norm does.
        for module in model.modules():
            used = module.parameters() if _owns_parameters(module) else ()  # perhaps without a call of their module
            needed = sorted({self.layer_of[id(p)] for p in used if id(p) in self.layer_of})
            if needed:
                self.hook(module.register_forward_pre_hook(lambda *_, n=needed: self._await(n), prepend=True))
        self.hook(model.register_forward_pre_hook(lambda *_: self._propagate(), prepend=True))
        self.hook(model.register_forward_hook(lambda *_: self._arrive(range(len(self.layers)))))
        self.hook(register_optimizer_step_post_hook(lambda optimizer, *_: self._after_step(optimizer)))
        for index, param in enumerate(self.params):
            self.hook(param.register_post_accumulate_grad_hook(lambda _, index=index: self._on_gradient(index)))

    def _begin_step(self) -> None:
        self.coming: list[Work | None] = []  # broadcasts by layer, None of one that has arrived; [] before a forward
        self.awaited: set[int] = set()  # layers that a hook has waited for

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget what came before the step of this model's optimizer. Every rank calls it, rank 0 changes."""
        params = (p for group in optimizer.param_groups for p in group["params"])
        if not self.require_begun().works and any(id(p) in self.layer_of for p in params):
            self._begin_step()

    def _propagate(self) -> None:
        """Start to broadcast every layer, the first one first; wait for all of them, unless layers do it one by one."""
        one_by_one = self.overlaps_propagation and torch.is_grad_enabled()
        if not self.coming:
            if one_by_one and self.comm.rank != 0:
                for param in self.params:
                    param.data.fill_(torch.nan)  # what is used before it comes must not go unseen
            self.coming = [self.comm.background(_broadcast_layer, layer) for layer in self.layers]
        if not one_by_one:
            self._await(range(len(self.layers)))

    def _await(self, layers: Iterable[int]) -> None:
        """Wait for `layers`, before they are used. Not in the forward of a part of the model only: nothing comes."""
        if self.coming:
            self._arrive(layers)
            self.awaited.update(layers)

    @torch.inference_mode(False)  # in an evaluation, too, parameters stay what backward can go through
    def _arrive(self, layers: Iterable[int]) -> None:
        for i in layers:
            work, self.coming[i] = self.coming[i], None
            if work is not None:
                flat = work.wait()
                if self.comm.rank != 0:
                    sizes = [p.numel() for p in self.layers[i]]
                    for param, part in zip(self.layers[i], flat.split(sizes), strict=True):
                        param.data.copy_(part.view(param.shape))

    def _on_gradient(self, index: int) -> None:
        """Start the reduction of every layer that is whole and next, from the last on."""
        if self.layer_of[id(self.params[index])] not in self.awaited:
            raise ValueError(
                f"{self.names[index]} was used before it came from rank 0: {self} waits for a parameter when its "
                "module is called. Call the whole model, and in its forward this module; with SCaffe() the first is "
                "enough"
            )
        if self.overlaps_reduction and not self.adds_up:
            gradient_ready(self.comm, self.require_begun(), index)

    def add_gradients(self, comm: Comm, model: nn.Module) -> None:
        """Leave on rank 0 the sum over ranks; elsewhere no gradient: the new parameters come with the next forward.

        Raises:  FloatingPointError on every rank if one has NaN or infinity in a gradient: which rank, which layer;
                 or if the sum overflows float16: which layer.
        """
        reducer = self.require_started(model)
        self._propagate()  # on a rank that had nothing to compute
        self._await(range(len(self.layers)))
        for index in reversed(range(len(self.params))):
            if not reducer.collected[index]:
                gradient_ready(comm, reducer, index)
        totals = reducer.end(comm)
        self._begin_step()
        self.finalize_backward(comm, totals)

    def finalize_backward(self, comm: Comm, totals: Sequence[Tensor]) -> None:
        """Make the sums the gradients of rank 0, and tell all ranks if they are sound. totals: of rank 0."""
        reducer, news = self.require_begun(), [0.0, NOTHING]
        if comm.rank == 0:
            too_large = overflowed(reducer.buckets, totals)
            news = [sum(float(total[-1]) for total in totals), NOTHING if too_large is None else too_large]
        flag, too_large = comm.broadcast(torch.tensor(news, dtype=torch.float64, device=comm.device)).split(1)
        unused = self.gradient_check.check(comm, self.params, reducer.buckets, [flag])
        self.gradient_check.require_no_overflow(None if too_large == NOTHING else int(too_large))
        for param in self.params:
            param.grad = None
        if comm.rank == 0:
            for bucket, total in zip(reducer.buckets, totals, strict=True):
                bucket.set_grads(total)
            for index in unused:
                self.params[index].grad = None

    def finish(self, comm: Comm, model: nn.Module) -> None:
        """Give every rank the parameters of the last step, which only rank 0 has taken, and rank 0's buffers."""
        self.require_started(model)
        self._propagate()
        self._await(range(len(self.layers)))
        # In the background, as everything before it: a rank that makes one step more meets it in one order of messages.
        comm.background(broadcast_buffers, model).wait()


class SCaffeOverlappedPropagation(SCaffe):
    """SC-OB: a layer's forward waits for its own parameters only.

    A module that has parameters of its own may use its children's, too, without a call (MultiheadAttention
    does): it waits for all of them. Other modules wait for nothing, and may only call theirs: the gradient of a
    parameter that was not waited for is a ValueError. Until they come, parameters are NaN on all ranks but 0, so
    that a use before the call is NaN in a gradient, and found as such. A forward without gradients waits for all.

    end of f[l] = max(end of f[l-1], b[1] + ... + b[l]) + f[l];   then + sum(B) + sum(r) + update
    """

    overlaps_propagation = True


class SCaffeOverlappedReduction(SCaffeOverlappedPropagation):
    """SC-OBR: and a layer's gradients travel as soon as its backward has ended.

    end of r[l] = max(end of r[l+1], end of B[l]) + r[l];   then + update
    """

    overlaps_reduction = True


def _layers_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the trainable parameters of each module that has some, in order of registration; tied ones with the first.

    The parameters of one module are one layer, or one for each dtype.
    """
    seen, layers = set(), []
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(id(p) for p in own)
        layers += [[own[i] for i in part] for part in by_dtype(own).values()]
    return layers


def _owns_parameters(module: nn.Module) -> bool:
    """Return whether `module` has parameters itself, or in a child that cannot be called, such as a ParameterList."""
    held = [child for child in module.children() if type(child).forward is nn.Module.forward]
    return any(True for _ in module.parameters(recurse=False)) or any(map(_owns_parameters, held))


def _broadcast_layer(comm: Comm, layer: Sequence[nn.Parameter]) -> Tensor:
    """Return (n,): rank 0's parameters of one layer, one after the other, on every rank."""
    return comm.broadcast(torch.cat([p.detach().reshape(-1) for p in layer]))


def _reduce_layer(comm: Comm, flat: Tensor) -> Tensor | None:
    """Return on rank 0 the gradients of one layer and their flag, (n + 1,), added over ranks; None elsewhere."""
    return comm.reduce(flat)


def step_seconds(
    design: type[SCaffe],
    broadcasts: Sequence[float],
    forwards: Sequence[float],
    backwards: Sequence[float],
    reductions: Sequence[float],
    update: float = 0.0,
) -> float:
    """Compute the seconds of a step by the formula of a design: SCaffe or one of its two kin.

    Args:    broadcasts, forwards, backwards, reductions: seconds of each layer, the first layer first.
    """
    graph = TaskGraph()
    arrived = [graph.add(b, row="messages") for b in broadcasts]
    for f, ready in zip(forwards, arrived, strict=True):
        graph.add(f, [Need(ready if design.overlaps_propagation else arrived[-1])], row="computing")
    computed = [graph.add(back, row="computing") for back in reversed(backwards)]
    last = computed[-1]
    for r, ready in zip(reversed(reductions), computed, strict=True):
        last = graph.add(r, [Need(ready if design.overlaps_reduction else computed[-1])], row="messages")
    end = graph.add(update, [Need(last), Need(computed[-1])])
    return graph.times()[1][end]
