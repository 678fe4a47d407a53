"""An attendee's part of a layer on one rank: forward, backward, and what each of them left and sent."""

from typing import NamedTuple

import numpy as np
import torch

BARRIER = "barrier"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all")


class Sent(NamedTuple):
    """What one rank did in one phase. calls: [(collective, elements)] in order; nbytes: of all messages it sent.

    barriers: how often it stood in a barrier, which sends no elements and is no call of `calls`.
    """

    calls: list
    nbytes: int
    barriers: int

    def told(self):
        """What this rank did, in words: "calls all_reduce of 24 numbers, 2 times", "sends nothing"."""
        if not self.calls:
            return f"sends {self.nbytes:,} bytes" if self.nbytes else "sends nothing"
        same = len(set(self.calls)) == 1
        parts = [f"{name} of {n:,} numbers" for name, n in (self.calls[:1] if same else self.calls)]
        return "calls " + ", ".join(parts) + (f", {len(self.calls)} times" if same and len(self.calls) > 1 else "")


class Ran(NamedTuple):
    """One rank after forward and backward.

    y:       what the answer returned, as an array, or None where it is no tensor; kind: its type.
    grads:   {name of an input: its gradient as an array, or None}.
    forward, backward: Sent; kept: elements of the largest tensor that autograd kept for backward.
    changed: names of the inputs that the answer wrote into; hooked: whether it changes what others say about x.
    """

    y: np.ndarray | None
    kind: str
    grads: dict
    forward: Sent
    backward: Sent
    kept: int
    changed: list
    hooked: bool


class Watch:
    """Notes which collectives are called on a communicator, and how many bytes its rank sends, phase by phase."""

    def __init__(self, comm):
        self.comm, self.calls, self.inside, self.begun = comm, [], False, len(comm.trace.log)
        for name in (*COLLECTIVES, BARRIER):
            setattr(comm, name, self.noting(name, getattr(comm, name)))

    def noting(self, name, method):
        def noted(*args, **kwargs):
            if self.inside:  # a part of another collective
                return method(*args, **kwargs)
            self.calls.append((name, elements(*args, **kwargs)))
            self.inside = True
            try:
                return method(*args, **kwargs)
            finally:
                self.inside = False

        return noted

    def phase(self):
        """What has been sent since the last phase ended: Sent."""
        events = self.comm.trace.events[self.begun :]
        calls = [call for call in self.calls if call[0] != BARRIER]
        nbytes = sum(e.nbytes for e in events if e.op == "send")
        sent = Sent(calls, nbytes, len(self.calls) - len(calls))
        self.calls, self.begun = [], self.begun + len(events)
        return sent


def elements(x=None, *args, **kwargs):
    """Of what a collective is called with: none for a barrier."""
    return 0 if x is None else x.numel() if isinstance(x, torch.Tensor) else x.size


def run_layer(comm, fn, inputs, weight, given=()):
    """Call fn(comm, *inputs, *given) and go back through it; returns Ran.

    inputs: {name: tensor} in the order of the arguments, those of this rank; each of them gets a gradient.
    weight: the gradient of the loss for y; where y has another shape, there is no backward.
    """
    leaves = {name: x.detach().clone().requires_grad_(True) for name, x in inputs.items()}
    kept, watch = [0], Watch(comm)
    x = leaves["x"].view_as(leaves["x"])  # as it comes out of another layer

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = fn(comm, *(leaves | {"x": x}).values(), *given)
    kind, forward = type(y).__name__, watch.phase()
    y = y if isinstance(y, torch.Tensor) else None
    value = None if y is None else y.detach().cpu().numpy().copy()
    if y is not None and y.requires_grad and y.shape == weight.shape:
        torch.autograd.backward(y, weight)
    backward = watch.phase()
    changed = [name for name, x in leaves.items() if not torch.equal(x, inputs[name])]
    grads = {name: None if x.grad is None else x.grad.cpu().numpy().copy() for name, x in leaves.items()}
    (others,) = torch.autograd.grad(x, leaves["x"], torch.ones_like(x))  # what a residual connection says about x
    hooked = not bool((others == 1).all())
    return Ran(value, kind, grads, forward, backward, max(kept), changed, hooked)
