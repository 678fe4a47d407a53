"""Backward in two halves: first the gradients of a stage's inputs, which another rank waits for, then of its weights.

    forward    x --linear--> a --relu--> b --linear--> y         the operations that use a weight: the two linears
                    |w1                     |w2

    inputs     dx <--linear-- da <--relu-- db <--linear-- dy     one walk through the graph, which computes neither dw1
                              kept                   kept        nor dw2, and keeps the gradient of each linear's output
    weights        dw1 from da               dw2 from dy         later: each linear once more, for its weights alone

Together they cost about what a whole backward costs. A weight whose gradient cannot be left for later, because it is
used more than once in the stage, is computed with the inputs.
Ref: Qi et al. 2024, "Zero bubble pipeline parallelism", arXiv:2401.10241, section 2. In torch.distributed.pipelining
these are stage_backward_input and stage_backward_weight.
"""

from collections import deque
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

OUTPUT = "output"  # stands for whoever uses the outputs of the stage


class Group(NamedTuple):
    """Parameters that one operation uses. edges: of that operation's outputs; params: list."""

    edges: tuple
    params: list


class DeferredWeights:
    """The backward of one micro-batch through the graph from `roots` down to `params`, in two halves.

    roots: GradientEdges of the outputs; params: the trainable parameters of the stage.
    """

    def __init__(self, roots, params):
        self.roots = roots
        require_halves(roots)
        self.groups, self.at_once = grouped(roots, params)
        self.gradients = []  # of the edges of every group, between the halves

    def input_gradients(self, inputs, gradients):
        """The gradients of `inputs`, in order, None where the outputs do not depend on one.

        gradients: of the roots. The gradients of parameters that cannot wait are added to them here.
        """
        if not self.roots:
            return [None] * len(inputs)
        edges = [edge for group in self.groups for edge in group.edges]
        wanted = [*inputs, *self.at_once, *edges]
        if not wanted:
            return []
        found = torch.autograd.grad(self.roots, wanted, gradients, retain_graph=True, allow_unused=True)
        n = len(inputs)
        for param, gradient in zip(self.at_once, found[n:], strict=False):
            if gradient is not None:
                param.grad = gradient.clone() if param.grad is None else param.grad + gradient
        self.gradients = deque(found[n + len(self.at_once) :])
        self.roots = ()  # frees what is above the operations that use weights
        return found[:n]

    def add_weight_gradients(self):
        """Add the gradients of the other parameters to them, operation by operation; frees the graph."""
        for edges, params in self.groups:
            pairs = [(edge, self.gradients.popleft()) for edge in edges] if self.gradients else []
            pairs = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
            if pairs:
                torch.autograd.backward(*zip(*pairs, strict=True), inputs=params)
        self.groups = []


def require_halves(roots):
    """Raise ValueError where a layer's own backward can only be done as a whole."""
    if any(node.name() == "CheckpointFunctionBackward" for node in users_below(roots)):
        raise ValueError(
            "a layer uses torch.utils.checkpoint(use_reentrant=True), whose backward cannot be done in two halves, as "
            "this schedule does it: say use_reentrant=False there, or take a schedule of whole backwards, such as 1f1b"
        )


def grouped(roots, params):
    """([Group], parameters that cannot wait) of the graph below `roots`.

    From a parameter the walk goes up through operations that do nothing but change it, such as the transpose in a
    linear, to the operation that combines it with something else. All of its gradient comes through there.
    """
    users = users_below(roots)
    groups, at_once = {}, []
    for param in params:
        leaf = top = get_gradient_edge(param).node
        if leaf not in users:
            continue  # the outputs do not depend on it
        while (user := only(users[top])) not in (None, OUTPUT) and takes_one(user):
            top = user
        node = top if user is OUTPUT else user
        if node is None or node is leaf:
            at_once.append(param)  # used more than once, or itself an output
        else:
            groups.setdefault(node, Group(edges_of(node, users, roots), [])).params.append(param)
    return list(groups.values()), at_once


def only(users):
    """The one element of a set; None where it has more."""
    return next(iter(users)) if len(users) == 1 else None


def takes_one(node):
    """Does the operation behind `node` take only one tensor whose gradient is asked for?"""
    return sum(child is not None for child, _ in node.next_functions) == 1


def edges_of(node, users, roots):
    """The GradientEdges of the outputs of the operation behind `node` that somebody uses."""
    numbers = {n for user in users[node] - {OUTPUT} for child, n in user.next_functions if child is node}
    numbers |= {root.output_nr for root in roots if root.node is node}
    return tuple(GradientEdge(node, n) for n in sorted(numbers))


def users_below(roots):
    """{node: set of the nodes that use its output, and OUTPUT where it is one of the roots} of all below the roots."""
    users = {root.node: {OUTPUT} for root in roots}
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
