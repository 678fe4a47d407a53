"""One step of a grid on simulated ranks: 1,024 of them in a minute, with the messages of the real one, and no numbers.

    stage           comm.compute for its arithmetic, per layer where gradients become ready
    over pp         the executor of real pipelines, with tensors as large as the activations
    over dp         a ring all-reduce per layer in the background, as soon as the last micro-batch has passed it; what
                    several stages share (tied tokens, the replicas of GEMS) after the last of them
    over tp         inside a layer, on ranks that do the same at the same time: real messages, or what a ring of them
                    takes as a formula, exact on ports that nobody else uses, and a hundred times fewer messages

Messages of gigabytes are not carried around: a simulated byte stands for `grain` bytes, on links that are slower by as
much, so that every message takes the time that it would take.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ... import schedules
from ...collectives import ring
from ...collectives.cost import all_gather
from ...comm import sim
from ...comm.network import Islands
from ...mesh import DeviceMesh
from ..hybrid.gradients import comm_of_holders, holders
from ..pipeline.run_schedule import run_schedule
from ..pipeline.stage import Spec
from . import memory as memories
from .machine import MACHINES
from .model import all_reduce_seconds, gradients_of, message_cost, require_possible

SMALLEST = 2048  # bytes that a simulated message between stages has


class Simulated(NamedTuple):
    """seconds: of the step, virtual; pipeline: until the last rank has ended its last backward.

    ranks: how many; results: comm.base.Results with the events, if they were recorded.
    """

    seconds: float
    pipeline: float
    ranks: int
    results: list


def simulate(
    spec,
    grid,
    schedule="1f1b",
    micro_batches=8,
    recompute=False,
    machine=None,
    batch=None,
    chunks=None,
    tp_messages=False,
    trace=False,
    deadline=600.0,
):
    """Take one step of `spec` on `grid`, on simulated ranks.

    Args:    as of grid.model.predict. tp_messages: whether all-reduces over tp are sent, or their time only spent.
             trace: record events; deadline: s of real time.
    Returns: Simulated.
    Raises:  ValueError as predict.
    """
    machine = MACHINES["laptop"] if machine is None else machine
    batch = grid["dp"] * micro_batches if batch is None else batch
    require_possible(spec, grid, micro_batches, batch)
    plan = schedules.build(schedule, grid["pp"], micro_batches, chunks)
    layers = memories.stages_of(spec, plan.stages)
    step = Step(spec, machine, plan, layers, batch // grid["dp"] // micro_batches, recompute, tp_messages)
    network = coarse(machine.network, step.grain)
    results = sim.run(grid.size, step_of, grid, step, network=network, trace=trace, deadline=deadline)
    return Simulated(max(r[0] for r in results), max(r[1] for r in results), grid.size, results)


@dataclass(frozen=True)
class Step:
    """What every rank needs to know of a step. Ranks share it: it is not copied for each of them."""

    spec: object
    machine: object
    plan: object
    layers: tuple
    micro_batch: int
    recompute: bool
    tp_messages: bool

    def __deepcopy__(self, memo):
        return self

    @property
    def itemsize(self):
        """Bytes of an activation of one micro-batch, per number."""
        return self.spec.bytes_each.activations * self.micro_batch

    @property
    def grain(self):
        """Bytes that a simulated byte stands for."""
        return max(1, min(part[-1].output for part in self.layers) * self.itemsize // SMALLEST)

    def key(self, place, i):
        """The name of layer number `i` of stage `place`; tied layers have one."""
        first, last = place == 0 and i == 0, place == len(self.layers) - 1 and i == len(self.layers[place]) - 1
        return "tied" if self.spec.tied and (first or last) else f"{place}.{i}"

    def keys(self):
        """The names of the layers of every stage."""
        return [[self.key(place, i) for i in range(len(part))] for place, part in enumerate(self.layers)]

    def gradients(self, key, grid):
        """Bytes of the gradients of a layer by its name, on one rank."""
        if key == "tied":
            return self.spec.tied // grid["tp"] * self.spec.bytes_each.gradients
        place, i = map(int, key.split("."))
        return gradients_of((self.layers[place][i],), self.spec, grid)

    def tensor(self, nbytes):
        """Zeros that stand for so many bytes."""
        return torch.zeros(max(1, round(nbytes / self.grain / 4)), dtype=torch.float32)


def coarse(network, grain):
    """The same network for messages that are shorter by `grain`."""
    if isinstance(network, Islands):
        fast, slow = (replace(kind, GBps=kind.GBps / grain) for kind in (network.inside, network.between))
        return replace(network, inside=fast, between=slow)
    return replace(network, beta=network.beta * grain)


def step_of(comm, grid, step):
    """(s of the step, s until this rank's last backward has ended) on one rank."""
    mesh = DeviceMesh(comm, grid)
    numbers = step.plan.stages_of(mesh["pp"].rank)
    shared = holders(step.plan, step.keys())
    comms = {ranks: comm_of_holders(mesh, ranks) for ranks in sorted({*shared.values()})}
    stages = {number: SimulatedStage(mesh, step, number, shared) for number in numbers}
    mine = {key: ranks for key, ranks in shared.items() if mesh["pp"].rank in ranks}
    comm.barrier()
    begin = comm.trace.clock()
    run_schedule(mesh["pp"], step.plan, stages)
    ended = comm.trace.clock()
    with comm.trace.span("add gradients"):
        for stage in stages.values():
            for work in stage.works:
                work.wait()
        for key, ranks in mine.items():
            ring.all_reduce(comms[ranks], step.tensor(step.gradients(key, grid)))
    return (comm.trace.clock() - begin) / 1e9, (ended - begin) / 1e9


class SimulatedStage:
    """Has the methods of stage.Stage. works: the all-reduces over dp that it has begun."""

    def __init__(self, mesh, step, number, shared):
        """shared: names of layers whose gradients are not sent from here."""
        self.step, self.works, self.saved = step, [], ()
        self.comm, self.dp, self.tp, self.grid = mesh.comm, mesh["dp"], mesh["tp"], mesh.grid
        self.shared, self.place = shared, (place := number % step.plan.stages)
        self.layers = step.layers[place]
        self.takes = self.tensors_behind(step.layers[place - 1]) if place else ()
        self.gives = self.tensors_behind(self.layers)
        self.left = step.plan.micro_batches // step.plan.replicas  # backward passes until its gradients are complete
        self.spent = {}  # (layers, passes, sums) -> s

    def tensors_behind(self, layers):
        """What the last of `layers` hands on: a tuple of Spec."""
        tensor = self.step.tensor(layers[-1].output_on(self.tp.size, False) * self.step.itemsize)
        return (Spec(tuple(tensor.shape), torch.float32, True),)

    def forward(self, micro_batch, inputs, loss=None):
        self.compute(self.layers, 1, ("sums",))
        return tuple(torch.zeros(spec.shape, dtype=spec.dtype) for spec in self.gives)

    def backward(self, micro_batch, gradients=()):
        return self.input_gradient(micro_batch, gradients, passes=2)

    def input_gradient(self, micro_batch, gradients=(), passes=1):
        """passes: backward takes 2 times as long as forward; 1 where its half for the weights comes later."""
        again = ("sums",) if self.step.recompute else ()
        if passes == 2:
            self.gradients(passes + len(again), (*again, "returns"))
        else:
            self.compute(self.layers, passes + len(again), (*again, "returns"))
        return tuple(torch.zeros(spec.shape, dtype=spec.dtype) for spec in self.takes)

    def weight_gradient(self, micro_batch):
        self.gradients(1, ())

    def forget(self):
        """Nothing is kept."""

    def gradients(self, passes, sums):
        """Compute gradients of weights, and where they are complete send those of each layer, the last one first."""
        self.left -= 1
        if self.left or self.dp.size == 1:
            return self.compute(self.layers, passes, sums)
        for i, layer in reversed(list(enumerate(self.layers))):
            self.compute((layer,), passes, sums)
            key = self.step.key(self.place, i)
            again = key == "tied" and i  # on one stage: complete when backward has come to its first layer
            if key not in self.shared and not again:
                tensor = self.step.tensor(self.step.gradients(key, self.grid))
                self.works.append(self.dp.background(ring.all_reduce, tensor))

    def compute(self, layers, passes, sums):
        """Spend the time of so many forward passes through `layers`, and of these all-reduces over tp.

        sums: names of Layer's fields that list them.
        """
        if self.step.tp_messages and self.tp.size > 1:
            self.comm.compute(self.arithmetic(layers, passes))
            for nbytes in self.sizes(layers, sums):
                ring.all_reduce(self.tp, self.step.tensor(nbytes))
            for nbytes in self.sizes(layers, gathered(sums)):
                ring.all_gather(self.tp, self.step.tensor(self.tp.size * nbytes))
            return
        key = layers, passes, sums
        if key not in self.spent:
            cost = message_cost(self.step.machine.network, self.grid, "tp")
            p = self.tp.size
            seconds = sum(all_reduce_seconds(p, nbytes, *cost) for nbytes in self.sizes(layers, sums))
            seconds += sum(all_gather(p, p * nbytes).seconds(*cost) for nbytes in self.sizes(layers, gathered(sums)))
            self.spent[key] = seconds + self.arithmetic(layers, passes)
        self.comm.compute(self.spent[key])

    def arithmetic(self, layers, passes):
        """s."""
        flops = sum(layer.flops_on(self.tp.size) for layer in layers)
        return passes * self.step.micro_batch * flops / self.step.machine.network.flops_per_s

    def sizes(self, layers, sums):
        """Bytes of each all-reduce over tp."""
        return [n * self.step.itemsize for name in sums for layer in layers for n in getattr(layer, name)]


def gathered(sums):
    """The fields of Layer with all-gathers that come with those of `sums`."""
    return ("gathers",) if "sums" in sums else ()
