"""S-Caffe's three designs of a training step: one root solver, and how much of its messages hides behind arithmetic.

    SC-B    | b1 b2 b3 | f1 f2 f3 | B3 B2 B1 | r3 r2 r1 | update        blocking
    SC-OB   | b1 b2 b3 |            B3 B2 B1 | r3 r2 r1 | update        overlapped propagation: layer 1 computes while
               | f1 f2 f3 |                                             layer 2's parameters are on their way
    SC-OBR  | b1 b2 b3 |            B3 B2 B1 | update                   and overlapped reduction: layer 3's gradients
               | f1 f2 f3 |            | r3 r2 r1 |                     travel while layer 2's are computed

b: broadcast of a layer's parameters from rank 0, f and B: forward and backward of the layer, r: reduction of its
gradients to rank 0, which alone takes the optimizer's step. Ref: Awan et al. 2017, "S-Caffe", PPoPP.
"""

from contextlib import ExitStack

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .consensus import overflowed
from .data_parallel import Strategy, broadcast_buffers
from .reducer import by_dtype

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
    beside = True

    def __init__(self):
        super().__init__()
        self.hooks = ExitStack()

    def assign(self, params):
        place = {id(p): index for index, p in enumerate(params)}
        return [[place[id(p)] for p in layer] for layer in self.layers]

    def start(self, comm, model):
        """Begin with rank 0's parameters; hooks bring them to the other ranks at the beginning of every forward."""
        self.layers = layers_of(model)
        super().start(comm, model)
        self.comm = comm
        self.layer_of = {id(p): i for i, layer in enumerate(self.layers) for p in layer}
        self._begin_step()
        # Before all other hooks: such a one may compute a weight from parameters, as weight_norm does.
        for module in model.modules():
            needed = sorted({self.layer_of[id(p)] for p in used_without_a_call(module) if id(p) in self.layer_of})
            if needed:
                self._hook(module.register_forward_pre_hook(lambda *_, n=needed: self._await(n), prepend=True))
        self._hook(model.register_forward_pre_hook(lambda *_: self._propagate(), prepend=True))
        self._hook(model.register_forward_hook(lambda *_: self._arrive(range(len(self.layers)))))
        self._hook(register_optimizer_step_post_hook(lambda optimizer, *_: self._after_step(optimizer)))
        for name, param in zip(self.names, self.params, strict=True):
            self._hook(param.register_post_accumulate_grad_hook(lambda p, name=name: self._on_gradient(p, name)))

    def _hook(self, handle):
        self.hooks.callback(handle.remove)

    def _begin_step(self):
        self.coming = []  # Works of the broadcasts by layer, None of one that has arrived; [] before the first forward
        self.awaited = set()  # layers that a hook has waited for
        self.left = [{id(p) for p in layer} for layer in self.layers]  # whose gradients are still to come
        self.going = []  # Works of the reductions, from the last layer on

    def _after_step(self, optimizer):
        """What has come before the step of this model's optimizer is old now. Every rank calls it, rank 0 changes."""
        if not self.going and any(id(p) in self.layer_of for group in optimizer.param_groups for p in group["params"]):
            self._begin_step()

    def _propagate(self):
        """Start to broadcast every layer, the first one first; wait for all of them, unless layers do it one by one."""
        one_by_one = self.overlaps_propagation and torch.is_grad_enabled()
        if not self.coming:
            if one_by_one and self.comm.rank != 0:
                for param in self.params:
                    param.data.fill_(torch.nan)  # what is used before it comes must not go unseen
            self.coming = [self.comm.background(broadcast_layer, layer) for layer in self.layers]
        if not one_by_one:
            self._await(range(len(self.layers)))

    def _await(self, layers):
        """Wait for `layers`, before they are used. Not in the forward of a part of the model only: nothing comes."""
        if self.coming:
            self._arrive(layers)
            self.awaited.update(layers)

    @torch.inference_mode(False)  # in an evaluation, too, parameters stay what backward can go through
    def _arrive(self, layers):
        for i in layers:
            if self.coming[i] is not None:
                flat, self.coming[i] = self.coming[i].wait(), None
                if self.comm.rank != 0:
                    sizes = [p.numel() for p in self.layers[i]]
                    for param, part in zip(self.layers[i], flat.split(sizes), strict=True):
                        param.data.copy_(part.view(param.shape))

    def _on_gradient(self, param, name):
        """One more gradient is there: start the reduction of every layer that is whole and next, from the last on."""
        layer = self.layer_of[id(param)]
        if layer not in self.awaited:
            raise ValueError(
                f"{name} was used before it came from rank 0, for which {self} waits when modules are called: call the "
                "model as a whole, and in it the module of this parameter; or use SCaffe(), where only the first counts"
            )
        if self.adds_up or not self.overlaps_reduction:
            return
        if id(param) not in self.left[layer]:
            raise ValueError(
                f"the gradient of {name} became ready twice in one step: all backward passes but the last belong into "
                "`with strategy.accumulating():`"
            )
        self.left[layer].discard(id(param))
        while len(self.going) < len(self.layers) and not self.left[len(self.layers) - 1 - len(self.going)]:
            self._reduce_next()

    def _reduce_next(self):
        bucket = self.buckets[len(self.layers) - 1 - len(self.going)]
        for i in range(len(bucket.params)):
            bucket.put(i)
        self.going.append(self.comm.background(reduce_layer, bucket.packed()))

    def add_gradients(self, comm, model):
        """On rank 0 the sum over ranks; elsewhere no gradient: the new parameters come with the next forward.

        Raises:  FloatingPointError on every rank where one has NaN or infinity in a gradient: which rank, which layer;
                 or where the sum overflows float16: which layer.
        """
        self.require_started(model)
        self._propagate()  # on a rank that had nothing to compute
        self._await(range(len(self.layers)))
        while len(self.going) < len(self.layers):
            self._reduce_next()
        totals = [work.wait() for work in self.going]
        self._begin_step()
        self.hand_back(comm, totals[::-1])

    def hand_back(self, comm, totals):
        """Tell all ranks whether all is well, which only rank 0 sees, then as everywhere. totals: None elsewhere."""
        told = [0.0, NOTHING]
        if comm.rank == 0:
            too_large = overflowed(self.buckets, totals)
            told = [sum(float(total[-1]) for total in totals), NOTHING if too_large is None else too_large]
        flag, too_large = comm.broadcast(torch.tensor(told, dtype=torch.float64, device=comm.device)).split(1)
        unused = self.verdict.of(comm, self.params, self.buckets, [flag])
        if too_large != NOTHING:
            raise FloatingPointError(self.verdict.too_large(int(too_large)))
        for param in self.params:
            param.grad = None
        if comm.rank == 0:
            for bucket, total in zip(self.buckets, totals, strict=True):
                bucket.hand_back(total)
            for index in unused:
                self.params[index].grad = None

    def finish(self, comm, model):
        """Give every rank the parameters of the last step, which only rank 0 has taken, and rank 0's buffers."""
        self.require_started(model)
        self._propagate()
        self._await(range(len(self.layers)))
        # Beside, as everything before it: where a rank makes one step more, the two meet in one order of messages.
        comm.background(broadcast_buffers, model).wait()

    def stop(self):
        self.hooks.close()
        super().stop()


class SCaffeOverlappedPropagation(SCaffe):
    """SC-OB: a layer's forward waits for its own parameters only.

    A module that has parameters of its own may use those of its children, too, without a call (MultiheadAttention
    does): it waits for all of them. Other modules wait for nothing, and may only call theirs: the gradient of a
    parameter that nobody has waited for is a ValueError. Until they come, parameters are NaN on all ranks but 0, so
    that a use before the call is NaN in a gradient, and found as such. A forward without gradients waits for all.

    end of f[l] = max(end of f[l-1], b[1] + ... + b[l]) + f[l];   then + sum(B) + sum(r) + update
    """

    overlaps_propagation = True


class SCaffeOverlappedReduction(SCaffeOverlappedPropagation):
    """SC-OBR: and a layer's gradients travel as soon as its backward has ended.

    end of r[l] = max(end of r[l+1], end of B[l]) + r[l];   then + update
    """

    overlaps_reduction = True


def layers_of(model):
    """The trainable parameters of each module that has some, in order of registration; tied ones with the first.

    Those of one module are one layer, or one for each dtype.
    """
    seen, layers = set(), []
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(id(p) for p in own)
        layers += [[own[i] for i in part] for part in by_dtype(own).values()]
    return layers


def used_without_a_call(module):
    """Parameters that the forward of `module` may use without a call of their module: all, or none. See SC-OB."""
    return list(module.parameters()) if owns_parameters(module) else []


def owns_parameters(module):
    """True where `module` has parameters itself, or in a child that cannot be called, such as a ParameterList."""
    held = [child for child in module.children() if type(child).forward is nn.Module.forward]
    return any(True for _ in module.parameters(recurse=False)) or any(map(owns_parameters, held))


def broadcast_layer(comm, layer):
    """(n,): rank 0's parameters of one layer, one after the other, on every rank."""
    return comm.broadcast(torch.cat([p.detach().reshape(-1) for p in layer]))


def reduce_layer(comm, flat):
    """On rank 0 the gradients of one layer and their flag, (n + 1,), added over ranks; None elsewhere."""
    return comm.reduce(flat)


def step_seconds(design, broadcasts, forwards, backwards, reductions, update=0.0):
    """The formula of a design, in seconds: SCaffe or one of its two kin.

    Args:    broadcasts, forwards, backwards, reductions: seconds of each layer, the first layer first.
    """
    arrived = forward_end = 0.0
    for b, f in zip(broadcasts, forwards, strict=True):
        arrived += b
        forward_end = max(forward_end, arrived if design.overlaps_propagation else sum(broadcasts)) + f
    backward_end, reduced = forward_end, 0.0
    for back, r in zip(reversed(backwards), reversed(reductions), strict=True):
        backward_end += back
        ready = backward_end if design.overlaps_reduction else forward_end + sum(backwards)
        reduced = max(reduced, ready) + r
    return max(backward_end, reduced) + update
