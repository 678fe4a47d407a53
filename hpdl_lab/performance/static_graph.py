"""Define-and-run in 70 lines: a graph is recorded first and run later, as in Theano and TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable

import torch

COMPUTE: dict[str, Callable[..., torch.Tensor]] = {  # the value of a node, from the values of its inputs
    **{op: getattr(torch, op) for op in ("matmul", "add", "sub", "relu", "square", "mean", "gt", "neg", "ones_like")},
    **{"g bT": lambda g, b: g @ b.T, "aT g": lambda a, g: a.T @ g, "2 a g": lambda a, g: 2 * a * g},
    **{"fold": lambda g, b: g.sum_to_size(b.shape), "mask": lambda g, out: g * (out > 0)},
    "spread": lambda g, a: g.expand_as(a) / a.numel(),
}
BACKWARD: dict[str, Callable[..., tuple[Node, ...]]] = {  # the gradients of its inputs, from the gradient of its output
    "matmul": lambda g, out, a, b: (Node("g bT", g, b), Node("aT g", a, g)),
    "add": lambda g, out, a, b: (g, Node("fold", g, b)),  # b may be one row, which is added to every row of a
    "sub": lambda g, out, a, b: (g, Node("neg", g)),
    "relu": lambda g, out, a: (Node("mask", g, out),),
    "square": lambda g, out, a: (Node("2 a g", a, g),),
    "mean": lambda g, out, a: (Node("spread", g, a),),
}


def _recorded(op: str) -> Callable[..., Node]:
    """Return a method of Node that computes nothing."""
    return lambda *inputs: Node(op, *inputs)


class Node:
    """An operation and its inputs: nodes, or a number (gt). `order`: all nodes that its value needs, itself last."""

    def __init__(self, op: str, *inputs: Node | float) -> None:
        self.op, self.inputs = op, inputs
        before = dict.fromkeys(node for i in inputs if isinstance(i, Node) for node in i.order)
        self.order: list[Node] = [*before, self]

    __matmul__, __add__, __sub__, __gt__ = map(_recorded, ("matmul", "add", "sub", "gt"))
    relu, square, mean = map(_recorded, ("relu", "square", "mean"))

    def __bool__(self) -> bool:
        raise TypeError(f"{self.op!r} has no value yet: Python decides an `if` once, while the graph is built")


def placeholder(name: str) -> Node:
    """Return a node whose value is fed to run_graph()."""
    return Node(f"placeholder {name}")


def gradients(loss: Node, weights: list[Node]) -> list[Node]:
    """Record a backward pass, and return the nodes of the gradients of `weights`."""
    found = {loss: Node("ones_like", loss)}
    for node in reversed(loss.order):
        if node.op in BACKWARD:
            inputs = [i for i in node.inputs if isinstance(i, Node)]
            for i, g in zip(inputs, BACKWARD[node.op](found[node], node, *inputs), strict=True):
                found[i] = found[i] + g if i in found else g
    return [found[weight] for weight in weights]


def run_graph(outputs: list[Node], feed: dict[Node, torch.Tensor], free: bool = True) -> tuple[list[torch.Tensor], int]:
    """Return (values of `outputs`, most computed values in memory); `free` drops each after its last reader."""
    order = list(dict.fromkeys(node for output in outputs for node in output.order))
    last_reader = {i: node for node in order for i in node.inputs}
    values, kept, most = dict(feed), {*feed, *(outputs if free else order)}, 0
    for node in order:
        if node not in feed:
            values[node] = COMPUTE[node.op](*(values[i] if isinstance(i, Node) else i for i in node.inputs))
        most = max(most, len(values) - len(feed))
        values = {i: value for i, value in values.items() if i in kept or last_reader[i] is not node}
    return [values[output] for output in outputs], most
