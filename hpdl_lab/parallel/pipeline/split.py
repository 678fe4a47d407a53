"""An unchanged model, cut into stages: between layers, with everything that a later stage still needs passed along.

    model     x -> embed -> block -> block -> norm -> head -> y          five layers
    stages    [ embed  block ] --a--> [ block ] --b--> [ norm  head ]    a, b: what crosses the cuts

Where a value skips stages, as in a U-shaped network, every stage between passes it on, and its gradient back. A weight
that is used by layers of several stages is a parameter of each of them: their gradients have to be added.
"""

import math
import operator
import statistics
import time
from numbers import Real

import torch
from torch import fx

from ..data import require_function
from .partition import partition
from .stage import Stage
from .tracing import as_before, trace

REPEATS = 3
CONSTANTS = {torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.linspace, torch.tensor}


def split(model, stages, example, costs=None, recompute=False, partition=partition):
    """Cut `model` into stages that together do what it does.

    Args:    stages: number of them. example: what the model is given for one micro-batch, a tensor or a tuple of them;
             every micro-batch has these shapes. costs: of each layer (see layers_of), numbers; by default the seconds
             that forward and backward take here, which differ from run to run, so ranks have to agree on them.
             recompute: see stage.Stage; partition: f(costs, stages) -> layers of each stage, as partition.partition.
    Returns: list of Stage. Their parameters are those of the model, not copies, under the model's names.
    Raises:  ValueError for more stages than layers, another number of costs than layers, or a model that cannot be
             split, whose module is named.
    """
    return Layers(model, example).split(stages, costs, recompute, partition)


def layers_of(model, example):
    """The names of the layers between which the model can be cut: operations with parameters, in order.

    What has no parameters belongs to the layer before it.
    """
    return Layers(model, example).names


def measured_costs(model, example):
    """Seconds of forward and backward of each layer for one micro-batch, the median of a few runs."""
    return Layers(model, example).measured()


def trainable(stages):
    """[{name: parameter} of each stage of a model], trainable ones, each once.

    A weight that stages share has the name of its first use in all of them: a model may call it `embed.weight` and
    `head.weight`, and it is one parameter.
    """
    first = {}
    return [
        {first.setdefault(id(p), name): p for name, p in stage.module.named_parameters() if p.requires_grad}
        for stage in stages
    ]


def shared_parameters(stages):
    """{name: [numbers of stages]} of the parameters that several stages use."""
    users = {}
    for number, params in enumerate(trainable(stages)):
        for name in params:
            users.setdefault(name, []).append(number)
    return {name: numbers for name, numbers in users.items() if len(numbers) > 1}


class Layers:
    """A model, written down for one example, as a list of layers. names: of them; layer_of: {node: its number}."""

    def __init__(self, model, example):
        self.model, self.example = model, example if isinstance(example, tuple) else (example,)
        self.graph, self.specs, self.writing = trace(model, self.example)
        self.names, self.layer_of = [], {}
        known = dict(model.named_parameters(remove_duplicate=False))
        for node in self.graph.nodes:
            names = parameter_names(node, known)
            if names:
                self.names.append(node.target if node.op == "call_module" else names[0])
            if node.op in ("call_module", "call_function"):
                self.layer_of[node] = max(len(self.names) - 1, 0)
        if not self.names:
            raise ValueError(f"{type(model).__name__} has no parameters that its output depends on: nothing to split")
        for node in reversed(self.graph.nodes):  # what needs nothing, such as arange, goes where it is first used
            if node in self.layer_of and not node.all_input_nodes and node.target in CONSTANTS:
                users = [self.layer_of.get(user, len(self) - 1) for user in node.users]
                self.layer_of[node] = min(users, default=self.layer_of[node])

    def __len__(self):
        return len(self.names)

    def require(self, stages, costs=None):
        """Raise ValueError unless the layers suffice for so many stages, and there is one of `costs` for each."""
        known = f"{len(self)} layers ({', '.join(self.names)})"
        if not 1 <= stages <= len(self):
            kind = type(self.model).__name__
            raise ValueError(f"{kind} has {known}, which cannot be shared by {stages} stages")
        if costs is not None and len(costs) != len(self):
            raise ValueError(f"{len(costs)} costs were given for {known}")
        if wrong := [cost for cost in costs or () if not isinstance(cost, Real) or not 0 <= cost < math.inf]:
            raise ValueError(f"the cost of a layer is a number of at least 0, got {wrong[0]!r}")

    def split(self, stages, costs=None, recompute=False, partition=partition):
        """See `split`."""
        self.require(stages, costs)
        if costs is None:
            costs = self.measured() if stages > 1 else [1] * len(self)
        sizes = whole_numbers(require_function("partition(costs, stages)", partition)(list(costs), stages))
        if len(sizes) != stages or sum(sizes) != len(self) or min(sizes) < 1:
            raise ValueError(f"{sizes} does not share {len(self)} layers among {stages} stages, one at least for each")
        stages = self.stages(sizes, recompute)
        self._require_same_output(stages)
        return stages

    def stages(self, sizes, recompute=False):
        """The Stages that have `sizes` layers each."""
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        cuts = [self.crossing(end) for end in [0, *ends]]
        found = []
        for begin, end, taken, given in zip([0, *ends], ends, cuts, cuts[1:], strict=False):
            takes, gives = ([self.specs[node] for node in nodes] for nodes in (taken, given))
            found.append(Stage(self.module(begin, end, taken, given), takes, gives, recompute))
        return found

    def crossing(self, cut):
        """The nodes whose values pass from the layers before number `cut` to those from there on, in order."""
        output = next(node for node in self.graph.nodes if node.op == "output")
        if cut == len(self):
            return output.all_input_nodes
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        if cut == 0:
            return inputs
        made = [*inputs, *(node for node, layer in self.layer_of.items() if layer < cut)]
        return [n for n in made if any(self.layer_of.get(user, len(self)) >= cut for user in n.users) and self.sent(n)]

    def sent(self, node):
        """Is the value of `node` a tensor? A tuple travels as its parts, which have nodes of their own."""
        return node in self.specs

    def module(self, begin, end, taken, given):
        """The layers from number `begin` to before `end`, as a module from the values `taken` to those `given`."""
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

    def measured(self):
        """s of forward and backward per layer: list of float."""
        with as_before(self.model):
            stages = self.stages([1] * len(self))
            runs = [timed(stages, self.example) for _ in range(REPEATS)]
        return [statistics.median(times) for times in zip(*runs, strict=True)]

    def _require_same_output(self, stages):
        """Raise ValueError unless `stages`, one after the other, compute for the example what the model has."""
        with as_before(self.model), torch.no_grad():  # its values may have changed since it was looked at
            want = self.model(*(x.clone() for x in self.example))
        with as_before(self.model), torch.no_grad():  # random numbers, too, are those that the model has drawn
            found = self.example
            for stage in stages:
                found = stage.module(*(x.clone() for x in found))  # a message is a copy
        (found,) = found
        if found.dtype != want.dtype or found.shape != want.shape or not same(found, want):
            kind = type(self.model).__name__
            raise ValueError(
                f"{kind} cannot be split into {len(stages)} stages: its operations, done again one by one, answer "
                "otherwise. Does its forward use autocast, or write into a tensor of which another stage has a view?"
            )


def whole_numbers(sizes):
    """`sizes`, which a partition has returned, as a list of ints. Raises ValueError."""
    try:
        return [operator.index(size) for size in sizes]
    except TypeError:
        wanted = "how many layers each stage gets, in whole numbers, is needed"
        raise ValueError(f"the partition returned {sizes!r}: {wanted}") from None


def parameter_names(node, known):
    """The names of the parameters, of all that are `known`, that the operation of `node` has or is given."""
    given = [n.target for n in node.all_input_nodes if n.op == "get_attr" and n.target in known]
    if node.op == "call_module":
        return [*(name for name in known if name.startswith(f"{node.target}.")), *given]
    return given if node.op == "call_function" else []


def timed(stages, x):
    """s that each of the stages of a model takes for forward and backward of one micro-batch."""
    seconds, device = [], x[0].device
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


def same(a, b):
    return torch.equal(a.nan_to_num(), b.nan_to_num())
