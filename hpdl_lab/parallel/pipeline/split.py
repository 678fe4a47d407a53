"""An unchanged model, cut into stages: between layers, with everything that a later stage still needs passed along.

    model     x -> embed -> block -> block -> norm -> head -> y          five layers
    stages    [ embed  block ] --a--> [ block ] --b--> [ norm  head ]    a, b: what crosses the cuts

If a value skips stages, every stage between passes it on, and its gradient back. A weight that is used by layers of
several stages is a parameter of each of them: their gradients have to be added.

The model is run once on an example, and every call of a layer and every torch function outside of layers is recorded.
What depends on the values of the data cannot be recorded: a module that does this is taken as a whole, as one layer.

torch.distributed.pipelining.pipeline refuses a module with an autograd function that communicates (batch norm over
ranks, every tensor-parallel layer); it has no layer that is not to be looked into, and takes 2 s to import.
"""

from __future__ import annotations

import math
import operator
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple, SupportsIndex, TypeAlias, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument, map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ...models.batch_norm import BatchNorm
from ...models.cnn import Block as ConvolutionBlock
from ...models.transformer import PreNorm
from ..reducer import require_function
from .stage import Spec, Stage

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
WHOLE = (BatchNorm, ConvolutionBlock, PreNorm)  # a cut inside would send more than one between them
WHOLE_FROM = ("torch.nn.", "hpdl_lab.parallel.")  # classes of these are layers: they may communicate inside
ABOUT_SHAPE = {  # what a tensor says of itself that does not depend on its values
    "__len__", "dim", "ndimension", "numel", "nelement", "size", "stride", "storage_offset", "element_size",
    "is_floating_point", "is_complex", "is_signed", "is_contiguous", "get_device", "is_same_size", "__hash__",
}  # fmt: skip
HARMLESS = (torch.Size, torch.dtype, torch.device, torch.layout, type(None))  # results of a function that say no values


class CannotLook(Exception):
    """A module, `name`, whose inside cannot be written down."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


Given: TypeAlias = tuple[tuple[Argument, ...], dict[str, Argument]]  # to an operation


class _Running(NamedTuple):
    """A layer that runs: its name, what it was given, and the versions of these tensors."""

    name: str
    given: Given
    before: list[int]


class _Traced(NamedTuple):
    """graph: of the whole model; specs: {node: Spec} of nodes whose value is a tensor.

    writing: nodes of operations that write into something that they are given.
    """

    graph: fx.Graph
    specs: dict[fx.Node, Spec]
    writing: set[fx.Node]


@contextmanager
def _as_before(model: nn.Module) -> Generator[None]:
    """Let `model` run inside: its buffers and gradients, and torch's random numbers, are afterwards as before."""
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


def _trace(model: nn.Module, example: tuple[Tensor, ...]) -> _Traced:
    """Run `model` on `example` and write down what it does.

    Its parameters, gradients and buffers, and torch's random numbers, are afterwards as before.

    Args:    model: nn.Module, in training mode or not; example: tuple of tensors.
    Returns: Traced.
    Raises:  ValueError if the outermost module itself cannot be written down.
    """
    whole: set[str] = set()
    while True:
        try:
            with _as_before(model), torch.enable_grad():
                return _Recorder(model, whole).record(example)
        except CannotLook as error:
            if not error.name:
                kind = type(model).__name__
                raise ValueError(f"{kind} cannot be split into stages: its forward {error}") from None
            whole.add(error.name)


def _is_whole(module: nn.Module) -> bool:
    """Return True if it is a layer, which is not looked into."""
    if isinstance(module, CONTAINERS):
        return False
    return isinstance(module, WHOLE) or type(module).__module__.startswith(WHOLE_FROM)


class _Recorder(TorchFunctionMode):
    """A record of what happens while it is entered. whole: names of modules that are layers, besides the usual ones."""

    def __init__(self, model: nn.Module, whole: set[str]) -> None:
        super().__init__()
        self.model, self.whole = model, whole
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Tensor] = {}
        self.nodes: dict[int, fx.Node] = {}  # id of a tensor -> its node
        self.inside = [""]  # names of the modules that run now, the outermost first
        self.writing: set[fx.Node] = set()
        self.layer: _Running | None = None  # the layer that runs now, inside which nothing is written down
        self.attributes = {id(t): name for name, t in _attributes_of(model)}

    def record(self, example: tuple[Tensor, ...]) -> _Traced:
        copies = [x.detach().clone() for x in example]  # forward may write into what it is given
        for i, x in enumerate(copies):
            self._keep(x, self.graph.placeholder(f"x{i}"))
        handles: list[RemovableHandle] = []
        before = dict(_attributes_of(self.model))
        try:
            for name, module in self.model.named_modules():
                handles += self._watch(name, module) if name else []
            with self:
                output = self.model(*copies)
        finally:
            for handle in handles:
                handle.remove()
        self._require_same_attributes(before)
        if not isinstance(output, torch.Tensor):
            raise CannotLook("", f"returns something of type {type(output).__name__}, and one tensor is needed")
        self.graph.output(self._node(output))
        specs = {node: Spec.of(x) for node, x in self.values.items()}
        return _Traced(self.graph, specs, self.writing)

    def _require_same_attributes(self, before: dict[str, Tensor]) -> None:
        """Raise CannotLook if a module that was looked into has replaced a tensor of its own: that is lost here."""
        after = dict(_attributes_of(self.model))
        for name in {**before, **after}:
            owner, _, attribute = name.rpartition(".")
            if before.get(name) is not after.get(name) and not self._inside_layer(owner):
                raise CannotLook(owner, f"replaces its tensor {attribute}, as a batch norm does that is not torch's")

    def _inside_layer(self, name: str) -> bool:
        """Return True if the module of this name is a layer, or a part of one."""
        steps = name.split(".") if name else []
        paths = [".".join(steps[: i + 1]) for i in range(len(steps))]
        return any(path in self.whole or _is_whole(self.model.get_submodule(path)) for path in paths)

    def _watch(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        """Return hooks that note when `module` runs."""
        layer = name in self.whole or _is_whole(module)

        def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if self.layer is None:
                self.inside.append(name)
                if layer:
                    self.layer = _Running(name, self._nodes(args, kwargs), _versions((args, kwargs)))

        def after(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], out: object) -> None:
            if self.layer is not None and self.layer.name == name:
                _, given, before = self.layer
                self.layer = None
                self._keep(out, self.graph.call_module(name, *given), _versions((args, kwargs)) != before)
            if self.layer is None:
                self.inside.pop()

        return [
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
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
        given, before = self._nodes(args, kwargs), _versions((args, kwargs))
        out = func(*args, **kwargs)
        writes = _versions((args, kwargs)) != before
        if writes or any(isinstance(x, torch.Tensor) for x in tree_leaves(out)):
            self._keep(out, self.graph.call_function(func, *given), writes)
        elif name not in ABOUT_SHAPE and not isinstance(out, HARMLESS):
            raise CannotLook(self.inside[-1], f"asks for the value of a tensor ({name}), which depends on the data")
        return out

    def _keep(self, out: object, node: fx.Node, writes: bool = False) -> None:
        """Note that `out`, a tensor or a nest of them, comes from `node`."""
        if writes:
            self.writing.add(node)
        if isinstance(out, torch.Tensor):
            self.nodes[id(out)], self.values[node] = node, out  # which keeps it alive, and so its id
        elif isinstance(out, (tuple, list)):
            for i, part in enumerate(out):
                if any(isinstance(x, torch.Tensor) for x in tree_leaves(part)):
                    self._keep(part, self.graph.call_function(operator.getitem, (node, i)))
        elif isinstance(out, dict):
            for key, part in out.items():
                self._keep(part, self.graph.call_function(operator.getitem, (node, key)))

    def _nodes(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Given:
        """Return both with nodes in place of tensors."""
        nest = cast(Given, (args, kwargs))
        return map_aggregate(nest, lambda x: self._node(x) if isinstance(x, torch.Tensor) else x)

    def _node(self, tensor: Tensor) -> fx.Node:
        node = self.nodes.get(id(tensor))
        if node is None and id(tensor) in self.attributes:
            node = self.graph.create_node("get_attr", self.attributes[id(tensor)])
            self._keep(tensor, node)
        if node is None:
            shape = tuple(tensor.shape)
            raise CannotLook(self.inside[-1], f"uses a tensor of shape {shape} that no torch function has made")
        return node


def _attributes_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of parameters, buffers, and tensors that are plain attributes of a module."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


def _versions(nest: object) -> list[int]:
    """Return how often each tensor in `nest` has been written into."""
    return [x._version for x in tree_leaves(nest) if isinstance(x, torch.Tensor)]


REPEATS = 3
CONSTANTS = {torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.linspace, torch.tensor}


def partition(costs: Sequence[float], stages: int) -> list[int]:
    """Cut layers into stages so that the most expensive stage is as cheap as possible.

        costs   5  1 | 1  1  4 | 4      stages that cost 6, 6 and 4: the slowest takes 6
        sizes   2      3         1      with two layers each they would cost 6, 2 and 8

    Args:    costs: a number >= 0 for each layer, in the order of the model: the seconds
             of its forward and backward. stages: how many stages to make.
    Returns: list of `stages` ints, all >= 1: how many layers each stage has.
    Raises:  ValueError for more stages than layers.
    Steps: stages * layers^2 comparisons.
    Ref: Pinar & Aykanat 2004, "Fast optimal load balancing algorithms for 1D
        partitioning"; Huang et al. 2019 (GPipe), section 2.2.
    """
    n = len(costs)
    if not 1 <= stages <= n:
        raise ValueError(f"{n} layers cannot be shared by {stages} stages: each needs a layer of its own")
    ### BEGIN SOLUTION
    before = [0.0]  # before[i]: cost of layers 0 to i - 1
    for cost in costs:
        before.append(before[-1] + cost)
    # best[i]: (the largest part, the sizes) when the first i layers are shared by as many stages as the loop has done
    best = {i: (before[i], [i]) for i in range(1, n + 1)}
    for done in range(2, stages + 1):
        best = {
            i: min((max(best[j][0], before[i] - before[j]), [*best[j][1], i - j]) for j in range(done - 1, i))
            for i in range(done, n + 1)
        }
    return best[n][1]
    ### END SOLUTION


Partition: TypeAlias = Callable[[Sequence[float], int], Sequence[int]]


class Layers:
    """A model, written down for one example, as a list of layers: operations with parameters, and what follows each.

    names: of the layers, between which it can be cut; layer_of: {node: number of its layer}. example: what the model is
    given for one micro-batch, a tensor or a tuple of them; every micro-batch has these shapes.
    """

    def __init__(self, model: nn.Module, example: Tensor | tuple[Tensor, ...]) -> None:
        self.model, self.example = model, example if isinstance(example, tuple) else (example,)
        self.graph, self.specs, self.writing = _trace(model, self.example)
        self.names: list[str] = []
        self.layer_of: dict[fx.Node, int] = {}
        known = dict(model.named_parameters(remove_duplicate=False))
        for node in self.graph.nodes:
            names = _parameter_names(node, known)
            if names:
                self.names.append(node.target if node.op == "call_module" else names[0])
            if node.op in ("call_module", "call_function"):
                self.layer_of[node] = max(len(self.names) - 1, 0)
        if not self.names:
            raise ValueError(f"{type(model).__name__} has no parameters that its output depends on: nothing to split")
        for node in reversed(self.graph.nodes):  # what needs nothing, such as arange, goes to its first use
            if node in self.layer_of and not node.all_input_nodes and node.target in CONSTANTS:
                users = [self.layer_of.get(user, len(self) - 1) for user in node.users]
                self.layer_of[node] = min(users, default=self.layer_of[node])

    def __len__(self) -> int:
        return len(self.names)

    def require(self, stages: int, costs: Sequence[float] | None = None) -> None:
        """Raise ValueError unless the layers suffice for so many stages, and there is one of `costs` for each."""
        known = f"{len(self)} layers ({', '.join(self.names)})"
        if not 1 <= stages <= len(self):
            kind = type(self.model).__name__
            raise ValueError(f"{kind} has {known}, which cannot be shared by {stages} stages")
        if costs is not None and len(costs) != len(self):
            raise ValueError(f"{len(costs)} costs were given for {known}")
        if wrong := [cost for cost in costs or () if not isinstance(cost, Real) or not 0 <= cost < math.inf]:
            raise ValueError(f"the cost of a layer is a number of at least 0, got {wrong[0]!r}")

    def split(
        self,
        stages: int,
        costs: Sequence[float] | None = None,
        recompute: bool = False,
        partition: Partition = partition,
    ) -> list[Stage]:
        """Cut the model into stages that together do what it does.

        Args:    costs: of each layer, numbers; by default the seconds that forward and backward take here, which differ
                 from run to run, so ranks have to agree on them.
                 recompute: see stage.Stage; partition: f(costs, stages) -> layers of each stage, as `partition`.
        Returns: list of Stage. Their parameters are the model's, not copies, under the model's names.
        Raises:  ValueError for more stages than layers, another number of costs than layers, or a model that cannot be
                 split, whose module is named.
        """
        self.require(stages, costs)
        if costs is None:
            costs = self.measured() if stages > 1 else [1] * len(self)
        sizes = _whole_numbers(require_function("partition(costs, stages)", partition)(list(costs), stages))
        if len(sizes) != stages or sum(sizes) != len(self) or min(sizes) < 1:
            raise ValueError(f"{sizes} does not share {len(self)} layers among {stages} stages, one at least for each")
        found = self.stages(sizes, recompute)
        self._require_same_output(found)
        return found

    def stages(self, sizes: Sequence[int], recompute: bool = False) -> list[Stage]:
        """Return the Stages that have `sizes` layers each."""
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        cuts = [self.crossing(end) for end in [0, *ends]]
        found = []
        for begin, end, taken, given in zip([0, *ends], ends, cuts, cuts[1:], strict=False):
            takes, gives = ([self.specs[node] for node in nodes] for nodes in (taken, given))
            found.append(Stage(self.module(begin, end, taken, given), takes, gives, recompute))
        return found

    def crossing(self, cut: int) -> list[fx.Node]:
        """Return the nodes whose values pass from the layers before number `cut` to those from there on, in order."""
        output = next(node for node in self.graph.nodes if node.op == "output")
        if cut == len(self):
            return output.all_input_nodes
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        if cut == 0:
            return inputs
        # Of tensors alone: a tuple travels as its parts, which have nodes of their own.
        made = [*inputs, *(node for node, layer in self.layer_of.items() if layer < cut)]
        return [
            n for n in made if any(self.layer_of.get(user, len(self)) >= cut for user in n.users) and n in self.specs
        ]

    def module(self, begin: int, end: int, taken: list[fx.Node], given: list[fx.Node]) -> nn.Module:
        """Return the layers from number `begin` to before `end`, as a module from `taken` values to `given` ones."""
        graph, new = fx.Graph(), {}
        inside = [node for node in self.graph.nodes if begin <= self.layer_of.get(node, -1) < end]
        for i, node in enumerate(taken):
            new[node] = graph.placeholder(f"x{i}")
        if self.writing.intersection(inside):  # what is received must stay as it is: recompute needs it again
            new |= {node: graph.call_method("clone", (new[node],)) for node in taken}
        for node in inside:
            if node not in new:
                for needed in node.all_input_nodes:
                    if needed not in new:  # a parameter or another attribute of the model
                        new[needed] = graph.node_copy(needed, lambda n: new[n])
                new[node] = graph.node_copy(node, lambda n: new[n])
        graph.output(tuple(new[node] for node in given))
        module = fx.GraphModule(self.model, graph, class_name="StageModule")
        module.training = self.model.training  # of layers each keeps its own mode: some may be frozen
        return module

    def measured(self) -> list[float]:
        """Return seconds of forward and backward of each layer for one micro-batch, the median of a few runs."""
        with _as_before(self.model):
            stages = self.stages([1] * len(self))
            runs = [_timed(stages, self.example) for _ in range(REPEATS)]
        return [statistics.median(times) for times in zip(*runs, strict=True)]

    def _require_same_output(self, stages: list[Stage]) -> None:
        """Raise ValueError unless `stages`, one after the other, compute for the example what the model has."""
        with _as_before(self.model), torch.no_grad():  # its values may have changed since it was looked at
            want = self.model(*(x.clone() for x in self.example))
        with _as_before(self.model), torch.no_grad():  # with the random numbers that the model has drawn
            found = self.example
            for stage in stages:
                found = stage.module(*(x.clone() for x in found))  # a message is a copy
        (found,) = found
        if (
            found.dtype != want.dtype
            or found.shape != want.shape
            or not torch.equal(found.nan_to_num(), want.nan_to_num())
        ):
            kind = type(self.model).__name__
            raise ValueError(
                f"{kind} cannot be split into {len(stages)} stages: its operations, run one by one, give another "
                "result. Does its forward use autocast, or write into a tensor that another stage has a view of?"
            )


def _whole_numbers(sizes: Iterable[SupportsIndex]) -> list[int]:
    """Return `sizes`, which a partition has returned, as a list of ints. Raises ValueError."""
    try:
        return [operator.index(size) for size in sizes]
    except TypeError:
        wanted = "whole numbers of layers, one for each stage, are needed"
        raise ValueError(f"the partition returned {sizes!r}: {wanted}") from None


def _parameter_names(node: fx.Node, known: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the parameters, of all that are `known`, that the operation of `node` has or is given."""
    given = [n.target for n in node.all_input_nodes if n.op == "get_attr" and n.target in known]
    if node.op == "call_module":
        return [*(name for name in known if name.startswith(f"{node.target}.")), *given]
    return given if node.op == "call_function" else []


def _timed(stages: list[Stage], x: Sequence[Tensor]) -> list[float]:
    """Return the seconds that each stage of a model takes for forward and backward of one micro-batch."""
    seconds: list[float] = []
    device = x[0].device
    for stage in stages:
        begin = time.perf_counter()
        x = stage.forward(0, x)
        seconds.append(time.perf_counter() - begin)
    for i, stage in reversed(list(enumerate(stages))):
        needed = [spec for spec in stage.gives if spec.requires_grad]
        gradients = [torch.ones(spec.shape, dtype=spec.dtype, device=device) for spec in needed]
        begin = time.perf_counter()
        stage.backward(0, gradients)
        seconds[i] += time.perf_counter() - begin
    return seconds
