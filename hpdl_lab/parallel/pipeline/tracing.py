"""What a model does with one example, operation by operation, written down as a graph that can be cut.

The model is run once, as it is. Every call of a layer and every torch function outside of layers is written down with
what it was given: forward may be any Python, with branches on shapes. What depends on the values of the data cannot be
written down, as another example would go another way: a module that does this is taken as a whole, as one layer.
"""

import operator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from ...models.batch_norm import BatchNorm
from ...models.cnn import Block as ConvolutionBlock
from ...models.transformer import Block as TransformerBlock
from .stage import Spec

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
WHOLE = (BatchNorm, ConvolutionBlock, TransformerBlock)  # a cut inside would send more than one between them
WHOLE_FROM = ("torch.nn.", "hpdl_lab.parallel.")  # classes of these are layers: they may communicate inside
ABOUT_SHAPE = {  # what a tensor says of itself that does not depend on its values
    "__len__", "dim", "ndimension", "numel", "nelement", "size", "stride", "storage_offset", "element_size",
    "is_floating_point", "is_complex", "is_signed", "is_contiguous", "get_device", "is_same_size", "__hash__",
}  # fmt: skip
HARMLESS = (torch.Size, torch.dtype, torch.device, torch.layout, type(None))  # results of a function that say no values


class CannotLook(Exception):
    """What happens inside module `name` cannot be written down."""

    def __init__(self, name, reason):
        super().__init__(reason)
        self.name = name


class Traced(NamedTuple):
    """graph: of the whole model; specs: {node: Spec} of those whose value is a tensor.

    writing: nodes of operations that write into something that they are given.
    """

    graph: fx.Graph
    specs: dict
    writing: set


@contextmanager
def as_before(model):
    """Inside, `model` may run: its buffers and gradients, and torch's random numbers, are afterwards as before."""
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    grads = {p: p.grad for p in model.parameters()}
    devices = {p.device for p in grads if p.is_cuda}
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for module, name, buffer, value in buffers:
            buffer.data.copy_(value)
            setattr(module, name, buffer)  # forward may have put another tensor there
        for param, grad in grads.items():
            param.grad = grad


def trace(model, example):
    """Run `model` on `example` and write down what it does.

    Its parameters, gradients and buffers, and torch's random numbers, are afterwards as before.

    Args:    model: nn.Module, in training mode or not; example: tuple of tensors.
    Returns: Traced.
    Raises:  ValueError where the outermost module itself cannot be written down.
    """
    whole = set()
    while True:
        try:
            with as_before(model), torch.enable_grad():
                return Recorder(model, whole).record(example)
        except CannotLook as error:
            if not error.name:
                kind = type(model).__name__
                raise ValueError(f"{kind} cannot be split into stages: its forward {error}") from None
            whole.add(error.name)


def is_whole(module):
    """Is it a layer, which is not looked into?"""
    if isinstance(module, CONTAINERS):
        return False
    return isinstance(module, WHOLE) or type(module).__module__.startswith(WHOLE_FROM)


class Recorder(TorchFunctionMode):
    """Writes down what happens while it is entered. whole: names of modules that are layers, beside the usual ones."""

    def __init__(self, model, whole):
        super().__init__()
        self.model, self.whole = model, whole
        self.graph, self.values = fx.Graph(), {}
        self.nodes = {}  # id of a tensor -> its node
        self.inside = [""]  # names of the modules that run now, the outermost first
        self.writing = set()
        self.layer = None  # the layer that runs now, inside which nothing is written down
        self.attributes = {id(t): name for name, t in attributes_of(model)}

    def record(self, example):
        example = [x.detach().clone() for x in example]  # forward may write into what it is given
        for i, x in enumerate(example):
            self._keep(x, self.graph.placeholder(f"x{i}"))
        handles, before = [], dict(attributes_of(self.model))
        try:
            for name, module in model_parts(self.model):
                handles += self._watch(name, module)
            with self:
                output = self.model(*example)
        finally:
            for handle in handles:
                handle.remove()
        self._require_same_attributes(before)
        if not isinstance(output, torch.Tensor):
            raise CannotLook("", f"returns something of type {type(output).__name__}, and one tensor is needed")
        self.graph.output(self._node(output))
        specs = {node: Spec.of(x) for node, x in self.values.items()}
        return Traced(self.graph, specs, self.writing)

    def _require_same_attributes(self, before):
        """Raise CannotLook where a module that was looked into has replaced a tensor of its own: that is lost here."""
        after = dict(attributes_of(self.model))
        for name in {**before, **after}:
            owner, _, attribute = name.rpartition(".")
            if before.get(name) is not after.get(name) and not self._inside_layer(owner):
                raise CannotLook(owner, f"replaces its tensor {attribute}, as a batch norm does that is not torch's")

    def _inside_layer(self, name):
        """Is the module of this name a layer, or a part of one?"""
        steps = name.split(".") if name else []
        paths = [".".join(steps[: i + 1]) for i in range(len(steps))]
        return any(path in self.whole or is_whole(self.model.get_submodule(path)) for path in paths)

    def _watch(self, name, module):
        """Hooks that tell when `module` runs."""
        layer = name in self.whole or is_whole(module)

        def before(module, args, kwargs):
            if self.layer is None:
                self.inside.append(name)
                if layer:
                    self.layer = name, self._nodes((args, kwargs)), versions((args, kwargs))

        def after(module, args, kwargs, out):
            if self.layer is not None and self.layer[0] == name:
                _, given, before = self.layer
                self.layer = None
                self._keep(out, self.graph.call_module(name, *given), versions((args, kwargs)) != before)
            if self.layer is None:
                self.inside.pop()

        return [
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.layer is not None:
            return func(*args, **kwargs)
        name = func.__name__
        if not torch.is_grad_enabled():
            raise CannotLook(self.inside[-1], "computes without gradients, or by an autograd function of its own")
        if name == "__get__":
            out = func(*args, **kwargs)
            if isinstance(out, torch.Tensor):
                self._keep(out, self.graph.call_function(getattr, (self._node(args[0]), func.__self__.__name__)))
            return out
        given, before = self._nodes((args, kwargs)), versions((args, kwargs))
        out = func(*args, **kwargs)
        writes = versions((args, kwargs)) != before
        if writes or any(isinstance(x, torch.Tensor) for x in flat(out)):
            self._keep(out, self.graph.call_function(func, *given), writes)
        elif name not in ABOUT_SHAPE and not isinstance(out, HARMLESS):
            raise CannotLook(self.inside[-1], f"asks for the value of a tensor ({name}), which depends on the data")
        return out

    def _keep(self, out, node, writes=False):
        """`node` is where `out`, a tensor or a nest of them, comes from."""
        if writes:
            self.writing.add(node)
        if isinstance(out, torch.Tensor):
            self.nodes[id(out)], self.values[node] = node, out  # which keeps it alive, and so its id
        elif isinstance(out, (tuple, list)):
            for i, part in enumerate(out):
                if any(isinstance(x, torch.Tensor) for x in flat(part)):
                    self._keep(part, self.graph.call_function(operator.getitem, (node, i)))
        elif isinstance(out, dict):
            for key, part in out.items():
                self._keep(part, self.graph.call_function(operator.getitem, (node, key)))

    def _nodes(self, nest):
        """`nest` with nodes in place of tensors."""
        if isinstance(nest, torch.Tensor):
            return self._node(nest)
        if isinstance(nest, (tuple, list)):
            return type(nest)(map(self._nodes, nest)) if type(nest) in (tuple, list) else tuple(map(self._nodes, nest))
        if isinstance(nest, dict):
            return {key: self._nodes(value) for key, value in nest.items()}
        if isinstance(nest, slice):
            return slice(*map(self._nodes, (nest.start, nest.stop, nest.step)))
        return nest

    def _node(self, tensor):
        node = self.nodes.get(id(tensor))
        if node is None and id(tensor) in self.attributes:
            node = self.graph.create_node("get_attr", self.attributes[id(tensor)])
            self._keep(tensor, node)
        if node is None:
            shape = tuple(tensor.shape)
            raise CannotLook(self.inside[-1], f"uses a tensor of shape {shape} that no torch function has made")
        return node


def model_parts(model):
    """(name, module) of every module within `model`."""
    return [(name, module) for name, module in model.named_modules() if name]


def attributes_of(model):
    """(name, tensor) of parameters, buffers, and tensors that are plain attributes of a module."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


def versions(nest):
    """How often each tensor in `nest` has been written into."""
    return [x._version for x in flat(nest) if isinstance(x, torch.Tensor)]


def flat(nest):
    """The leaves of nested tuples, lists and dicts."""
    if isinstance(nest, dict):
        nest = list(nest.values())
    if isinstance(nest, (tuple, list)):
        for part in nest:
            yield from flat(part)
    else:
        yield nest
