"""DualPipe's overlap: while one micro-batch's tokens travel to their experts, another one computes.

    one after the other     computes    F attention |        | F experts |        | B experts |         | B attention
                            all-to-all              dispatch             combine              dispatch

    a pair                  computes    F attention | B experts  | F experts  | B attention |
                            all-to-all  B combine   | F dispatch | B dispatch | F combine   |      backward of each

A forward is cut into segments at its messages, and so is the graph that autograd keeps: backward goes through the
segments in reverse, and the all-to-all between two of them goes the other way. Both are generators that yield the Work
for which they would have to wait; their caller decides what is done meanwhile.

Ref: DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 3.2.1 and figure 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.functional import cross_entropy

from ...collectives.pairwise import all_to_all_v
from ...comm.base import Comm, Work
from ...mesh import DeviceMesh
from ...models.experts import MixtureOfExperts
from ...models.llama import Decoder
from ...models.transformer import PreNorm
from ...schedules import KINDS, Action, Schedule
from ...trace import Event
from ..experts import ExpertParallel, shard_experts
from .run_schedule import ResultT, Steps, action_of, name_of, run_schedule
from .stage import DeferredWeights, Loss, Spec

Sizes: TypeAlias = Callable[[Comm], tuple[list[int], list[int]]]  # f(comm) -> (sent, received)
Later: TypeAlias = list[tuple[str, DeferredWeights]]  # (name of a segment, gradients of its weights)


def alternate(*programs: Steps[ResultT]) -> list[ResultT]:
    """Carry out `programs` in turns: each goes on until it has to wait, and waits when its turn comes again.

    Returns: what each of them returns.
    """
    results: dict[int, ResultT] = {}
    waiting: dict[int, Work | None] = dict.fromkeys(range(len(programs)))
    while waiting:
        for i, work in list(waiting.items()):
            if work is not None:
                work.wait()
            try:
                waiting[i] = next(programs[i])
            except StopIteration as end:
                results[i] = end.value
                del waiting[i]
    return [results[i] for i in range(len(programs))]


class _Segment(NamedTuple):
    """A part that ran without a message. leaves: copies of `inputs`, at which its graph begins; edges: its ends."""

    name: str
    inputs: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    edges: tuple[GradientEdge | None, ...]


class _AllToAll(NamedTuple):
    """An all-to-all: rows of x went out, `sent` to each rank, and rows of y came. back: its name in backward."""

    back: str
    x: Tensor
    y: Tensor
    sent: list[int]
    received: list[int]


class _Tape:
    """The segments and the exchanges of one micro-batch's forward, for its backward. comm: of the exchanges.

    spend: f(name of a segment), which lets virtual time pass: once for forward, and for each half of backward.
    """

    def __init__(self, comm: Comm, spend: Callable[[str], None]) -> None:
        self.comm, self.spend = comm, spend
        self.steps: list[_Segment | _AllToAll] = []

    def run(self, name: str, label: str, fn: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return fn(*inputs), tensors whose graph ends at the inputs. label: of the event, after the name."""
        with self.comm.trace.span(f"{name} {label}"):
            leaves = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
            outputs = fn(*leaves)
            self.spend(name)
        edges = tuple(get_gradient_edge(y) if y.requires_grad else None for y in outputs)
        step = _Segment(name, inputs, leaves, tuple(y.detach() for y in outputs), edges)
        self.steps.append(step)
        return step.outputs

    def exchange(self, names: tuple[str, str], label: str, x: Tensor, sizes: Sizes) -> Steps[Tensor]:
        """Bring rows of x (sum of sent, d) to their ranks -> (sum of received, d).

        Args:    names: of that, and of its backward; sizes: f(comm) -> (sent, received), called in the background.
        """
        y, sent, received = yield from self._moved(f"{names[0]} {label}", x, sizes)
        self.steps.append(_AllToAll(names[1], x, y, sent, received))
        return y

    def backward(
        self, label: str, gradients: dict[int, Tensor], params: Sequence[nn.Parameter], later: Later | None
    ) -> Steps[dict[int, Tensor]]:
        """Go back through all steps -> {id of a tensor of the first segment's inputs: its gradient}.

        Args:    gradients: {id: gradient} of the last segment's outputs. params: of the stage.
                 later: takes (name, DeferredWeights) of each segment, by which the gradients of weights can be added;
                 None: they are added at once.
        """
        for step in reversed(self.steps):
            if isinstance(step, _AllToAll):
                y = gradients.pop(id(step.y)).contiguous()
                sizes = step.received, step.sent
                x, *_ = yield from self._moved(f"{step.back} {label}", y, lambda comm, sizes=sizes: sizes)
                found = [(step.x, x)]
            else:
                with self.comm.trace.span(f"{step.name} {label}"):
                    found = self._through(step, gradients, params, later)
            for x, gradient in found:
                gradients[id(x)] = gradients[id(x)] + gradient if id(x) in gradients else gradient
        return gradients

    def _through(
        self, step: _Segment, gradients: dict[int, Tensor], params: Sequence[nn.Parameter], later: Later | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return [(input, its gradient)] of one segment."""
        ends = [(edge, gradients.pop(id(y))) for y, edge in zip(step.outputs, step.edges, strict=True) if edge]
        weights = DeferredWeights(tuple(edge for edge, _ in ends), params)
        pairs = [(x, leaf) for x, leaf in zip(step.inputs, step.leaves, strict=True) if leaf.requires_grad]
        found = weights.input_gradients([leaf for _, leaf in pairs], [gradient for _, gradient in ends])
        self.spend(step.name)
        if later is None:
            weights.add_weight_gradients()
            self.spend(step.name)
        else:
            later.append((step.name, weights))
        return [(x, gradient) for (x, _), gradient in zip(pairs, found, strict=True) if gradient is not None]

    def _moved(self, name: str, x: Tensor, sizes: Sizes) -> Steps[tuple[Tensor, list[int], list[int]]]:
        def move(comm: Comm, x: Tensor) -> tuple[Tensor, list[int], list[int]]:
            with comm.trace.span(name):
                sent, received = sizes(comm)
                return all_to_all_v(comm, x, sent, received), sent, received

        work = self.comm.background(move, x)
        yield work
        return work.wait()


class _ExpertStage:
    """A stage whose layers have experts on several ranks: has the methods of stage.Stage, and `steps` for a pair.

    number:  of the stage, which events name. layers: PreNorm with a MixtureOfExperts, or any f(x) -> x.
    comm:    of the ranks that share the experts, see experts.expert_parallel.
    takes, gives: as of stage.Stage, one tensor each. seconds: {segment: s of its forward} on simulated ranks; each half
    of its backward takes as long.
    """

    def __init__(
        self,
        number: int,
        layers: Iterable[nn.Module],
        comm: Comm,
        takes: Spec,
        gives: Spec,
        seconds: dict[str, float] | None = None,
    ) -> None:
        self.number, self.layers, self.comm = number, nn.ModuleList(layers), comm
        self.takes, self.gives, self.seconds = (takes,), (gives,), seconds or {}
        self.saved: dict[int, tuple[_Tape, Tensor, Tensor]] = {}  # micro-batch -> its tape, input and output
        self.halves: dict[int, list[tuple[str, DeferredWeights]]] = {}  # between the two halves of a backward

    def steps(self, action: Action, given: Sequence[Tensor], loss: Loss | None = None) -> Steps[tuple[Tensor, ...]]:
        """Return an action as a generator that returns what it makes, as the methods below do."""
        if action.kind == "F":
            return self._forward(name_of(action), action.micro_batch, given[0], loss)
        return self._backward(name_of(action), action.micro_batch, given, whole=action.kind == "B")

    def forward(self, micro_batch: int, inputs: Sequence[Tensor], loss: Loss | None = None) -> tuple[Tensor, ...]:
        return alternate(self.steps(Action(self.number, "F", micro_batch), inputs, loss))[0]

    def backward(self, micro_batch: int, gradients: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        return alternate(self.steps(Action(self.number, "B", micro_batch), gradients))[0]

    def input_gradient(self, micro_batch: int, gradients: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        return alternate(self.steps(Action(self.number, "I", micro_batch), gradients))[0]

    def weight_gradient(self, micro_batch: int) -> None:
        for name, weights in self.halves.pop(micro_batch):
            weights.add_weight_gradients()
            self._spend(name)

    def forget(self) -> None:
        self.saved.clear()
        self.halves.clear()

    def _spend(self, name: str) -> None:
        self.comm.compute(self.seconds.get(name, 0.0))

    def _forward(self, label: str, micro_batch: int, first: Tensor, loss: Loss | None) -> Steps[tuple[Tensor, ...]]:
        tape, x = _Tape(self.comm, self._spend), first
        for layer in self.layers:
            if isinstance(layer, PreNorm) and isinstance(layer.mlp, MixtureOfExperts):
                x = yield from self._experts(tape, label, layer, layer.mlp, x)
            else:
                (x,) = tape.run("layer", label, lambda x, layer=layer: (layer(x),), x)
        if loss is not None:
            (x,) = tape.run("loss", label, lambda x: (loss(x),), x)
        self.saved[micro_batch] = tape, first, x
        return (x,)

    def _experts(self, tape: _Tape, label: str, layer: PreNorm, mixture: MixtureOfExperts, x: Tensor) -> Steps[Tensor]:
        """Return x + attention, + what the experts make of that, in three segments and two exchanges."""

        def attention(x: Tensor) -> tuple[Tensor, ...]:
            x = x + layer.attention(layer.norm1(x))  # (b, s, d)
            tokens = layer.norm2(x).flatten(0, -2)  # (n, d)
            order, weights, counts = mixture.route(tokens)
            return x, tokens, mixture.permute(tokens, order), weights, order, counts

        def sizes(comm: Comm) -> tuple[list[int], list[int]]:
            assert isinstance(mixture.exchange, ExpertParallel)
            ways.append(mixture.exchange.ways(mixture.record_loads(comm.all_gather(counts))))
            return ways[0][:2]

        def experts(there: Tensor) -> tuple[Tensor]:
            *_, by_expert, counts = ways[0]
            return (mixture.experts(there[by_expert], counts)[by_expert.argsort()],)

        ways: list[tuple[list[int], list[int], Tensor, Tensor]] = []  # one, once the sizes are there
        x, tokens, copies, weights, order, counts = tape.run("attention", label, attention, x)
        there = yield from tape.exchange(("dispatch", "combine"), label, copies, sizes)
        (made,) = tape.run("experts", label, experts, there)
        back = yield from tape.exchange(("combine", "dispatch"), label, made, lambda comm: (ways[0][1], ways[0][0]))

        def added(x: Tensor, tokens: Tensor, back: Tensor, weights: Tensor) -> tuple[Tensor]:
            return (x + mixture.combine(tokens, back, weights, order).view_as(x),)

        (y,) = tape.run("sum", label, added, x, tokens, back, weights)
        return y

    def _backward(
        self, label: str, micro_batch: int, given: Sequence[Tensor], whole: bool
    ) -> Steps[tuple[Tensor, ...]]:
        tape, first, last = self.saved.pop(micro_batch)
        later = None if whole else self.halves.setdefault(micro_batch, [])
        gradient = given[0] if given else torch.ones_like(last)  # of the loss
        gradients = yield from tape.backward(label, {id(last): gradient}, [*self.layers.parameters()], later)
        return (gradients[id(first)],) if self.takes[0].requires_grad else ()


# -- a step, and what it hides ----------------------------------------------------------------------------------------


def _expert_stages(
    ep: Comm, model: Decoder, plan: Schedule, rank: int, example: Tensor, seconds: dict[str, float] | None = None
) -> dict[int, _ExpertStage]:
    """Return {number: ExpertStage} of rank `rank` of a pipeline: equally many layers with experts for each stage.

    Args:    model: a DeepSeek of this rank of `ep` (experts.expert_parallel), whose layers without experts come first.
             example: (b, s) int64, a micro-batch of tokens; seconds: see ExpertStage.
    Raises:  ValueError if the stages do not divide the layers with experts.
    """
    blocks = [*cast("Iterable[PreNorm]", model.blocks)]
    dense = sum(not isinstance(block.mlp, MixtureOfExperts) for block in blocks)
    each, rest = divmod(len(blocks) - dense, plan.stages)
    if rest:
        raise ValueError(f"{len(blocks) - dense} layers with experts cannot be shared equally by {plan.stages} stages")
    tokens = Spec.of(example)
    hidden = Spec((*example.shape, model.tokens.embedding_dim), model.tokens.weight.dtype, True)
    stages: dict[int, _ExpertStage] = {}
    for number in plan.stages_of(rank):
        first, last = plan.is_first(number), plan.is_last(number)
        begin = dense + number % plan.stages * each
        layers: list[nn.Module] = [model.tokens, *blocks[:dense]] if first else []
        layers += [*blocks[begin : begin + each], *((model.norm, model.head) if last else ())]
        stages[number] = _ExpertStage(number, layers, ep, tokens if first else hidden, hidden, seconds)
    return stages


def expert_step(
    comm: Comm, plan: Schedule, model: Decoder, x: Tensor, y: Tensor, seconds: dict[str, float], together: bool
) -> tuple[dict[int, Tensor], Decoder]:
    """Take one step of a pipeline whose stages share their experts over the other axis: a pp x ep mesh. Collective.

    Args:    plan: of comm.size / x.shape[1] ranks; model: a DeepSeek, alike on all ranks, which is cut.
             x, y: (m, ep, b, s) int64, the tokens of every micro-batch and ep rank, and what follows them.
             seconds: see ExpertStage; together: pairs overlap.
    Returns: ({micro-batch: loss}, this rank's part of the model with its gradients); losses add up to the mean.
    """
    mesh = DeviceMesh(comm, pp=plan.ranks, ep=x.shape[1])
    pp, ep = mesh["pp"], mesh["ep"]
    shard_experts(ep, model)
    stages = _expert_stages(ep, model, plan, pp.rank, x[0, 0], seconds)

    def loss(i: int, logits: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), y[i, ep.rank].flatten(), reduction="sum") / y.numel()

    comm.barrier()
    drive = alternate if together else None
    losses = run_schedule(pp, plan, stages, lambda i: (x[i, ep.rank],), loss, drive=drive)
    return losses, model


class Bar(NamedTuple):
    """The work of a rank for `action`, from begin to end, in s. name: a segment, or "dispatch", "combine"."""

    begin: float
    end: float
    action: Action
    name: str = ""


def bars_of(events: Iterable[Event], rank: int) -> tuple[list[Bar], list[Bar]]:
    """Return (what `rank` computed, its all-to-alls): lists of Bar in order, in s since its first action."""
    mine = sorted((e for e in events if e.rank == rank), key=lambda e: (e.t0_ns, e.step))
    origin = next(e.t0_ns for e in mine if action_of(e.op))
    found: dict[str, list[Bar]] = {"": [], "background": []}
    for e in mine:
        name, _, rest = e.op.partition(" ")
        action = action_of(e.op) if e.op.startswith(KINDS["W"]) else action_of(rest)
        if action is not None:
            found[e.lane].append(Bar((e.t0_ns - origin) / 1e9, (e.t1_ns - origin) / 1e9, action, name))
    return found[""], found["background"]


def hidden_by(message: Bar, computing: Sequence[Bar]) -> tuple[dict[str, float], float]:
    """List the actions that hide an all-to-all, and the time in which nothing hides it.

        computing   | 6B1    |      | 1F4      | 6B3        |
        message         | 1F5 dispatch     |    -> {"6B1": ..., "1F4": ...}, and the gap

    A Bar is one piece of work: bar.begin and bar.end in seconds, and bar.action.

    Args:    message: the Bar of one all-to-all.
             computing: list of Bars, what the same rank computes. No two Bars overlap.
    Returns: (under, rest).
             under: {str(bar.action): seconds} for each action that computes during the
             message. If an action has several bars during the message, their seconds
             are added.
             rest: the seconds of the message in which nothing computes.
    """
    ### BEGIN SOLUTION
    under: dict[str, float] = {}
    for bar in computing:
        seconds = min(bar.end, message.end) - max(bar.begin, message.begin)
        if seconds > 0:
            under[str(bar.action)] = under.get(str(bar.action), 0.0) + seconds
    return under, message.end - message.begin - sum(under.values())
    ### END SOLUTION


def exposed(events: Sequence[Event], rank: int) -> tuple[float, float]:
    """Return (s of all-to-alls of `rank`, s of them during which it computed nothing)."""
    computing, messages = bars_of(events, rank)
    return sum(m.end - m.begin for m in messages), sum(hidden_by(m, computing)[1] for m in messages)
