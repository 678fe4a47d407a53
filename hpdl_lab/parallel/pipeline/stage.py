"""A stage of a pipeline: the layers that a rank computes between two messages, and what it keeps in between.

Backward in two halves: first the gradients of a stage's inputs, which another rank waits for, then of its weights.

    forward    x --linear--> a --relu--> b --linear--> y         the operations that use a weight: the two linears
                    |w1                     |w2
    inputs     dx <--linear-- da <--relu-- db <--linear-- dy     one walk through the graph, which computes neither dw1
                              kept                   kept        nor dw2, and keeps the gradient of each linear's output
    weights        dw1 from da               dw2 from dy         later: each linear once more, for its weights alone

Together they cost about what a whole backward costs. A weight that is used more than once in the stage is computed with
the inputs.   Ref: Qi et al. 2024, "Zero bubble pipeline parallelism", arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.func import functional_call

Loss: TypeAlias = Callable[[Tensor], Tensor]  # of one micro-batch's output


class Spec(NamedTuple):
    """A tensor that passes between two stages. requires_grad: does its gradient come back?"""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class _Saved(NamedTuple):
    """The memory of a micro-batch in a stage, between its forward and its backward.

    inputs: leaves; roots: the start of backward, for outputs that need a gradient; ones: what it starts with if
    the output is the loss.
    """

    inputs: tuple[Tensor, ...]
    roots: tuple[GradientEdge, ...]
    ones: tuple[Tensor, ...] = ()


class _Rerun(NamedTuple):
    """The memory of a micro-batch in a stage that recomputes: inputs, and all else that its forward depends on."""

    inputs: tuple[Tensor, ...]
    loss: Loss | None
    buffers: dict[str, Tensor]
    random: tuple[Tensor, ...]


class Stage:
    """A `module` that runs micro-batches forward and later backward, any number of them in between.

    module:  nn.Module: forward(*inputs) -> tuple of tensors; its parameters have the names of the whole model.
    takes:   tuple of Spec: what comes from the stage before, or the batch; gives: what goes to the next stage.
    recompute: keep only the inputs of a micro-batch, and repeat its forward before its backward (Chen et al. 2016,
             arXiv:1604.06174). It draws the same random numbers, and buffers, such as the running mean of a batch
             norm, change only once: gradients are the same as without recompute, bit for bit.
    """

    def __init__(
        self, module: nn.Module, takes: Sequence[Spec] = (), gives: Sequence[Spec] = (), recompute: bool = False
    ) -> None:
        self.module, self.takes, self.gives, self.recompute = module, tuple(takes), tuple(gives), recompute
        self.saved: dict[int, _Saved | _Rerun] = {}  # micro-batch -> Saved or Rerun
        # micro-batch -> DeferredWeights, between the two halves of its backward
        self.deferred: dict[int, DeferredWeights | None] = {}

    def __repr__(self) -> str:
        return f"Stage({len(list(self.module.parameters()))} parameter tensors, {len(self.saved)} micro-batches live)"

    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters, each once."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def forget(self) -> None:
        """Drop all micro-batches that are under way."""
        self.saved.clear()
        self.deferred.clear()

    def forward(self, micro_batch: int, inputs: Sequence[Tensor], loss: Loss | None = None) -> tuple[Tensor, ...]:
        """Compute the outputs of one micro-batch, and keep what its backward needs.

        Args:    inputs: tensors as `takes` says, which must not be changed from now on.
                 loss: f(output) -> scalar, on the last stage.
        Returns: tuple of tensors without a graph, as `gives` says; on the last stage (the loss,).
        """
        inputs = tuple(
            x.detach().requires_grad_(spec.requires_grad) for x, spec in zip(inputs, self.takes, strict=True)
        )
        if not self.recompute:
            outputs = self._run(inputs, loss)
            self.saved[micro_batch] = _saved_of(inputs, outputs, loss)
        else:
            random = torch.get_rng_state(), *(torch.cuda.get_rng_state(x.device) for x in inputs[:1] if x.is_cuda)
            buffers = {name: b.clone() for name, b in self.module.named_buffers()}
            with torch.no_grad():
                outputs = self._run(inputs, loss)
            self.saved[micro_batch] = _Rerun(inputs, loss, buffers, random)
        return tuple(out.detach() for out in outputs)

    def backward(self, micro_batch: int, gradients: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Add to the parameters' gradients what one micro-batch contributes; returns the gradients of its inputs.

        Args:    gradients: of the outputs that require one, in order; () on the last stage, which starts at the loss.
        Returns: tuple of tensors: of the inputs that require one, in order.
        """
        saved = self._take(micro_batch)
        torch.autograd.backward(saved.roots, saved.ones or tuple(gradients))
        needed = (x for x in saved.inputs if x.requires_grad)  # zeros are sent, too: the stage before waits for them
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in needed)

    def input_gradient(self, micro_batch: int, gradients: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Do the first half of backward: return the gradients of the inputs, awaited by the stage before.

        Weights' gradients are left for weight_gradient, wherever autograd can compute them on their own. A first stage,
        whose input needs none, does all of its backward here.
        """
        saved = self._take(micro_batch)
        inputs = [x for x in saved.inputs if x.requires_grad]
        if not inputs:  # of a first stage: no rank waits, and two halves cost more than a whole
            self.deferred[micro_batch] = None
            torch.autograd.backward(saved.roots, saved.ones or tuple(gradients))
            return ()
        deferred = self.deferred[micro_batch] = DeferredWeights(saved.roots, self.parameters())
        found = deferred.input_gradients(inputs, saved.ones or tuple(gradients))
        return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True))

    def weight_gradient(self, micro_batch: int) -> None:
        """Do the second half of backward: add to the parameters' gradients what is left of this micro-batch."""
        deferred = self.deferred.pop(micro_batch)
        if deferred is not None:
            deferred.add_weight_gradients()

    def _run(
        self, inputs: tuple[Tensor, ...], loss: Loss | None, buffers: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        outputs = self.module(*inputs) if buffers is None else functional_call(self.module, buffers, inputs)
        return outputs if loss is None else (loss(*outputs),)

    def _take(self, micro_batch: int) -> _Saved:
        """Return the Saved of a micro-batch, whose forward is done again if only its inputs were kept."""
        saved = self.saved.pop(micro_batch)
        if isinstance(saved, _Saved):
            return saved
        devices = [x.device for x in saved.inputs if x.is_cuda][:1]
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            torch.set_rng_state(saved.random[0])
            for device, state in zip(devices, saved.random[1:], strict=False):
                torch.cuda.set_rng_state(state, device)
            outputs = self._run(saved.inputs, saved.loss, saved.buffers)
        return _saved_of(saved.inputs, outputs, saved.loss)


def _saved_of(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], loss: Loss | None) -> _Saved:
    """Return the Saved of a micro-batch: the start of backward, without the outputs, which are sent away."""
    needed = [out for out in outputs if out.requires_grad]
    if loss is not None and not needed and any(x.requires_grad for x in inputs):
        raise ValueError("the loss has no gradient: it was detached, or computed without one, from the model's output")
    ones = tuple(torch.ones_like(out) for out in needed) if loss is not None else ()
    return _Saved(inputs, tuple(map(get_gradient_edge, needed)), ones)


OUTPUT = "output"  # stands for the users of the stage's outputs


Used: TypeAlias = dict[Node, set[Node | str]]  # {operation: operations that use its output, or OUTPUT}


class Group(NamedTuple):
    """Parameters that one operation uses. edges: of that operation's outputs; params: list."""

    edges: tuple[GradientEdge, ...]
    params: list[nn.Parameter]


class DeferredWeights:
    """The backward of one micro-batch through the graph from `roots` down to `params`, in two halves.

    roots: GradientEdges of the outputs; params: the trainable parameters of the stage.
    """

    def __init__(self, roots: tuple[GradientEdge, ...], params: Sequence[nn.Parameter]) -> None:
        self.roots = roots
        _require_halves(roots)
        self.groups, self.at_once = _grouped(roots, params)
        self.gradients: deque[Tensor | None] = deque()  # of the edges of every group, between the halves

    def input_gradients(self, inputs: list[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradients of `inputs`, in order, None if the outputs do not depend on one.

        gradients: of the roots. The gradients of parameters that cannot wait are added to them here.
        """
        if not self.roots:
            return [None] * len(inputs)
        edges = [edge for group in self.groups for edge in group.edges]
        wanted = [*inputs, *self.at_once, *edges]
        if not wanted:
            return []
        found = torch.autograd.grad(
            self.roots, cast("Sequence[Tensor]", wanted), gradients, retain_graph=True, allow_unused=True
        )
        n = len(inputs)
        for param, gradient in zip(self.at_once, found[n:], strict=False):
            if gradient is not None:
                param.grad = gradient.clone() if param.grad is None else param.grad + gradient
        self.gradients = deque(found[n + len(self.at_once) :])
        self.roots = ()  # frees what is above the operations that use weights
        return found[:n]

    def add_weight_gradients(self) -> None:
        """Add the gradients of the other parameters to them, operation by operation; frees the graph."""
        for edges, params in self.groups:
            found = [(edge, self.gradients.popleft()) for edge in edges] if self.gradients else []
            pairs = [(edge, gradient) for edge, gradient in found if gradient is not None]
            if pairs:
                torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs], inputs=params)
        self.groups = []


def _require_halves(roots: tuple[GradientEdge, ...]) -> None:
    """Raise ValueError if a layer's own backward can only be done as a whole."""
    if any(node.name() == "CheckpointFunctionBackward" for node in _users_below(roots)):
        raise ValueError(
            "a layer uses torch.utils.checkpoint(use_reentrant=True), whose backward cannot be split in two halves, "
            "as in this schedule: set use_reentrant=False, or take a schedule of whole backwards, such as 1f1b"
        )


def _grouped(roots: tuple[GradientEdge, ...], params: Sequence[nn.Parameter]) -> tuple[list[Group], list[nn.Parameter]]:
    """Return ([Group], parameters that cannot wait) of the graph below `roots`.

    From a parameter the walk goes up through operations that do nothing but change it, such as the transpose in a
    linear, to the operation that combines it with something else. All of its gradient comes through there.
    """
    users = _users_below(roots)
    groups: dict[Node, Group] = {}
    at_once = []
    for param in params:
        leaf = top = get_gradient_edge(param).node
        if leaf not in users:
            continue  # the outputs do not depend on it
        while (user := _only(users[top])) is not None and not isinstance(user, str) and _takes_one(user):
            top = user
        node = top if isinstance(user, str) else user
        if node is None or node is leaf:
            at_once.append(param)  # used more than once, or itself an output
        else:
            groups.setdefault(node, Group(_edges_of(node, users, roots), [])).params.append(param)
    return list(groups.values()), at_once


def _only(users: set[Node | str]) -> Node | str | None:
    """Return the one element of a set; None if it has more."""
    return next(iter(users)) if len(users) == 1 else None


def _takes_one(node: Node) -> bool:
    """Return True if the operation behind `node` takes only one tensor whose gradient is asked for."""
    return sum(child is not None for child, _ in node.next_functions) == 1


def _edges_of(node: Node, users: Used, roots: tuple[GradientEdge, ...]) -> tuple[GradientEdge, ...]:
    """Return the GradientEdges of the outputs of the operation behind `node` that are used."""
    using = [user for user in users[node] if not isinstance(user, str)]
    numbers = {n for user in using for child, n in user.next_functions if child is node}
    numbers |= {root.output_nr for root in roots if root.node is node}
    return tuple(GradientEdge(node, n) for n in sorted(numbers))


def _users_below(roots: tuple[GradientEdge, ...]) -> Used:
    """Return {node: the nodes that use its output, and OUTPUT if it is one of the roots} of all below the roots."""
    users: Used = {root.node: {OUTPUT} for root in roots}
    left = list(users)
    while left:
        node = left.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child not in users:
                users[child] = set()
                left.append(child)
            users[child].add(node)
    return users
