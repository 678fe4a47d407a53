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

from .data import Strategy


class SCaffe(Strategy):
    """The blocking design, SC-B: nothing overlaps.

        seconds per step = sum(b) + sum(f) + sum(B) + sum(r) + update

    Steps: a broadcast and a reduction per layer.   Bytes: N elements from rank 0 to all, and N from all to rank 0.
    """

    overlaps_propagation = overlaps_reduction = False

    def __init__(self):
        super().__init__()
        self.hooks = ExitStack()

    def assign(self, params):
        return []

    def start(self, comm, model):
        """Begin with rank 0's parameters; hooks bring them to the other ranks at the beginning of every forward."""
        super().start(comm, model)
        self.layers = layers_of(model)
        self.layer_of = {id(p): i for i, layer in enumerate(self.layers) for p in layer}
        self.coming, self.going = [], []  # Works: of the broadcasts by layer; of the reductions, from the last layer on
        self._forget_gradients()
        self._hook(model.register_forward_pre_hook(lambda *_: self._propagate(comm)))
        for module in model.modules():
            needed = sorted({self.layer_of[id(p)] for p in module.parameters(recurse=False) if id(p) in self.layer_of})
            if needed:
                self._hook(module.register_forward_pre_hook(lambda *_, needed=needed: self._await(needed)))
        for param in self.params:
            self._hook(param.register_post_accumulate_grad_hook(lambda param: self._on_gradient(comm, param)))

    def _hook(self, handle):
        self.hooks.callback(handle.remove)

    def _propagate(self, comm):
        """Start to broadcast every layer, the first one first; in the blocking design, wait for all of them."""
        if not torch.is_grad_enabled() or self.coming:
            return
        self.coming = [comm.background(broadcast_layer, layer) for layer in self.layers]
        if not self.overlaps_propagation:
            self._await(range(len(self.layers)))

    def _await(self, layers):
        for i in layers:
            if self.coming:
                self.coming[i].wait()

    def _on_gradient(self, comm, param):
        """One more gradient is there: start the reduction of every layer that is whole and next, from the last on."""
        self.left[self.layer_of[id(param)]].discard(id(param))
        if self.overlaps_reduction and not self.adds_up:
            while len(self.going) < len(self.layers) and not self.left[len(self.layers) - 1 - len(self.going)]:
                self._reduce_next(comm)

    def _reduce_next(self, comm):
        layer = self.layers[len(self.layers) - 1 - len(self.going)]
        self.going.append(comm.background(reduce_layer, layer))

    def add_gradients(self, comm, model):
        """On rank 0 the sum over ranks; elsewhere no gradient: the new parameters come with the next forward."""
        self.require_started(model)
        while len(self.going) < len(self.layers):
            self._reduce_next(comm)
        for layer, work in zip(reversed(self.layers), self.going, strict=True):
            for param, total in zip(layer, work.wait() or [None] * len(layer), strict=True):
                param.grad = total
        self._await(range(len(self.layers)))  # where no forward has waited for them
        self.coming, self.going = [], []
        self._forget_gradients()

    def _forget_gradients(self):
        self.left = [{id(p) for p in layer} for layer in self.layers]

    def finish(self, comm, model):
        """Give every rank the parameters of the last step, which only rank 0 has taken."""
        for layer in self.layers:
            broadcast_layer(comm, layer)

    def stop(self):
        self.hooks.close()
        super().stop()


class SCaffeOverlappedPropagation(SCaffe):
    """SC-OB: a layer's forward waits for its own parameters only.

    end of f[l] = max(end of f[l-1], b[1] + ... + b[l]) + f[l];   then + sum(B) + sum(r) + update
    """

    overlaps_propagation = True


class SCaffeOverlappedReduction(SCaffeOverlappedPropagation):
    """SC-OBR: and a layer's gradients travel as soon as its backward has ended.

    end of r[l] = max(end of r[l+1], end of B[l]) + r[l];   then + update
    """

    overlaps_reduction = True


def layers_of(model):
    """The trainable parameters of each module that has some, in order of registration; tied ones with the first."""
    seen, layers = set(), []
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(id(p) for p in own)
        if own:
            layers.append(own)
    return layers


def broadcast_layer(comm, layer):
    """Give every rank rank 0's parameters of one layer."""
    for param in layer:
        flat = param.detach().clone().reshape(-1)
        comm.broadcast(flat)
        param.data.copy_(flat.view(param.shape))


def reduce_layer(comm, layer):
    """On rank 0 the gradients of one layer, added over ranks; None elsewhere."""
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in layer])
    total = comm.reduce(flat)
    if total is None:
        return None
    return [part.view(p.shape) for p, part in zip(layer, total.split([p.numel() for p in layer]), strict=True)]


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
