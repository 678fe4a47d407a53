"""Notebook 08: a step with sharded optimizer state, and layers that are whole only while they are used."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from ...collectives.chunks import bounds
from ...collectives.ring import reduce_scatter
from ...comm import Results
from ...comm.base import Comm
from ...comm.network import Switch
from ...parallel.sharding import ShardedLayer, gather_and_release, sharded_step
from ...trace import bytes_sent
from ...units import counted
from ..checkers import because, engine_facts, exactly, in_all_cases, reason
from ..layer import drawn
from ..ranks import case, compared_with, number, simulate
from ..record import Answer, Broken, Drawing, Exercise, Passed, Reason, Runner
from ..traffic import check_waits

STEPS = 3
CASES = ((3, 12), (4, 14), (2, 7), (5, 3), (1, 6))  # ranks, elements
ITEM = 8  # bytes of an element: float64
COPIES = 2  # that the optimizer keeps of what it updates


class _AdamState(TypedDict, total=False):
    """The state of Adam for a tensor; empty before the first step."""

    step: int
    mean: Tensor
    square: Tensor


class _Update(NamedTuple):
    """A call of update on a rank: where x begins in params (-1: elsewhere), its length, and the gradient given.

    fresh: whether the state was empty.
    """

    first: int
    n: int
    grad: np.ndarray
    fresh: bool


class _Stepped(NamedTuple):
    """A rank's params after each step, the calls of update in each, and the bytes of all optimizer state there is."""

    params: list[np.ndarray]
    updates: list[list[_Update]]
    state_nbytes: int


def _adam(x: Tensor, grad: Tensor, state: _AdamState) -> None:
    """Take a step of Adam for the tensor x. Its epsilon is large, so that twice the gradient is another step."""
    if not state:
        state |= {"step": 0, "mean": torch.zeros_like(x), "square": torch.zeros_like(x)}
    state["step"] += 1
    state["mean"].lerp_(grad, 0.1)
    state["square"].lerp_(grad * grad, 0.05)
    mean, square = state["mean"] / (1 - 0.9 ** state["step"]), state["square"] / (1 - 0.95 ** state["step"])
    x -= 0.1 * mean / (square.sqrt() + 0.1)


def _gradient(step: int, rank: int, n: int) -> Tensor:
    """Return (n,) the gradient of a rank in a step: other numbers on every rank."""
    return drawn(100 * step + rank + 1, n)


def _take_steps(comm: Comm, fn: Answer, n: int) -> _Stepped:
    """Call the answer STEPS times on one rank, with an update that notes what it is given."""
    params, state, states = drawn(0, n), {}, {}
    kept, updates = [], []

    def update(x: Tensor, grad: Tensor, state: _AdamState) -> None:
        offset = (x.data_ptr() - params.data_ptr()) // ITEM
        inside = x.untyped_storage().data_ptr() == params.untyped_storage().data_ptr()
        updates[-1].append(_Update(offset if inside else -1, x.numel(), grad.numpy().copy(), not state))
        _adam(x, grad, state)
        states[id(state)] = state

    for step in range(STEPS):
        updates.append([])
        fn(comm, params, _gradient(step, comm.rank, n), state, update)
        kept.append(params.numpy().copy())
    tensors = [tensor for each in states.values() for tensor in each.values() if isinstance(tensor, Tensor)]
    return _Stepped(kept, updates, sum(tensor.untyped_storage().nbytes() for tensor in tensors))


def _course_of_one(p: int, n: int) -> list[np.ndarray]:
    """Return params after each step on one rank that has the gradients of all p."""
    params, kept = drawn(0, n), []
    state: _AdamState = {}
    for step in range(STEPS):
        _adam(params, sum((_gradient(step, r, n) for r in range(p)), torch.zeros(())) / p, state)
        kept.append(params.numpy().copy())
    return kept


def _check_sharded_step(fn: Answer, runner: Runner = None) -> Passed:
    def judge(run: Results, where: str, n: int) -> None:
        _check_params(run, where, n)
        check_waits(run.events, len(run))
        with compared_with(partial(simulate, len(run), _take_steps, sharded_step, n, evidence=False), run):
            _check_bytes(run, where, n)

    run = [in_all_cases(fn, _take_steps, [c], case, judge) for c in CASES][0]
    p, n = CASES[0]
    facts = [
        f"{counted(STEPS, 'step')} on 1 to 5 simulated ranks, also with sizes that they do not divide: the same "
        "parameters as on a single rank",
        f"optimizer state: with {p} ranks {run[0].state_nbytes} bytes on each, where a single rank keeps "
        f"{COPIES * n * ITEM}",
        f"bytes: with {p} ranks each sends {bytes_sent(run.events)[0] // STEPS} per step, as in one all-reduce",
    ]
    facts += engine_facts(runner, _check_params, _take_steps, fn, n + 1)
    return Passed(*facts, run=run)


def _check_params(run: Results, where: str, n: int) -> None:
    """Raise Broken if params differ from a single rank's, or a rank keeps more state than its chunk needs."""
    right = [drawn(0, n).numpy(), *_course_of_one(len(run), n)]
    for step in range(STEPS):
        for r, stepped in enumerate(run):
            got, expected = stepped.params[step], right[step + 1]
            close = np.isclose(got, expected, rtol=1e-10, atol=1e-10)
            if not close.all():
                i = int(np.argmin(close))
                text = f"after step {step} params[{i}] on rank {r} should be {number(expected[i])} and is "
                why = _why_params(run, n, step, r, i, right)
                raise because(why, f"{where}, {text}{number(got[i])}.")
    for r, stepped in enumerate(run):
        first, last = bounds(n, len(run), r)
        most = COPIES * (last - first) * ITEM
        if stepped.state_nbytes > most:
            whole = stepped.state_nbytes >= COPIES * n * ITEM
            what = ", as much as a single rank: nothing is saved" if whole else ""
            raise Broken(f"""memory: {where}, the parameters are right, but rank {r} keeps {stepped.state_nbytes} bytes
                of optimizer state{what}. Its chunk of {last - first} elements needs {most}: update no more.""")


def _why_params(run: Results, n: int, step: int, r: int, i: int, right: list[np.ndarray]) -> Reason:
    """Return the Reason for a wrong params[i] on rank r, from what the owner of i has updated, with which gradient."""
    p = len(run)
    owner = next(c for c in range(p) if bounds(n, p, c)[0] <= i < bounds(n, p, c)[1])
    calls, chunk = run[owner].updates[step], bounds(n, p, owner)
    if not any(stepped.updates[step] for stepped in run):
        return "update: No rank calls update(x, g, state)."
    if any(call.first < 0 < call.n for call in calls):
        return f"""copy: Rank {owner} updates a copy, and params stay as they were: give update a view of params,
            which `chunk` returns."""
    reached = any(call.first <= i < call.first + call.n for call in calls)
    if not reached and n % p and all(call.n == n // p for stepped in run for call in stepped.updates[step]):
        return f"""uneven: {n} elements are no multiple of {p}: chunks of {n} // {p} = {n // p} elements leave out
            the last {n % p}. `chunk` gives the first {n % p} ranks one element more."""
    if not reached:
        spans = " and ".join(f"params[{call.first}:{call.first + call.n}]" for call in calls) or "nothing"
        return f"""shard: It belongs to chunk {owner}, and rank {owner} updates {spans}: reduce_scatter leaves on rank
            {owner} the sum of chunk {owner}, [{chunk[0]}:{chunk[1]}], and all_gather sends that chunk."""
    if step and any(call.fresh for call in calls):
        return """state: update was given an empty state in a step that is not the first: what the optimizer has
            remembered is lost. Hand on `state` itself."""
    grads = [_gradient(step, s, n).numpy() for s in range(p)]
    call = next(call for call in calls if call.first <= i < call.first + call.n)
    if why := _why_gradient(call, grads, owner):
        return why
    if r != owner and np.isclose(run[owner].params[step][i], right[step + 1][i], rtol=1e-10):
        stale = np.isclose(run[r].params[step][i], run[r].params[step - 1][i] if step else right[0][i], rtol=1e-10)
        what = "has still what it had before the step" if stale else "has something else"
        return f"""gather: Rank {owner}, which owns it, has updated it rightly; rank {r} {what}. Each rank has
            updated its own chunk of params: gather params, not the gradient."""
    return "value: "


def _why_gradient(call: _Update, grads: list[np.ndarray], owner: int) -> Reason:
    """Return what is wrong with the gradient by which rank `owner` has updated its chunk; "" if it is the mean."""
    p, part = len(grads), slice(call.first, call.first + call.n)
    mean = np.sum(grads, axis=0)[part] / p
    if call.grad.shape != mean.shape or np.allclose(call.grad, mean, rtol=1e-10, atol=1e-12):
        return ""
    mine = grads[owner][part]
    rows = (
        (mine, f"""early: Rank {owner} has updated with the gradient of its own examples alone: nothing had been added
            when update was called. A reduce-scatter in the background has ended when its wait() returns."""),
        (mine / p, f"""early: Rank {owner} has updated with its own gradient, divided by {p}: nothing had been added
            when update was called."""),
        (p * mean, f"mean: update was given the sum of the gradients of {p} ranks, not their mean."),
        (mean / p, f"mean: update was given the mean, divided by {p} once more: divide once."),
    )  # fmt: skip
    return reason(call.grad, rows, exactly) or "gradient: "


def _check_bytes(run: Results, where: str, n: int) -> None:
    """Raise Broken if a rank sends more in a step than a ring's all-reduce does."""
    p = len(run)
    sent = {r: nbytes / STEPS for r, nbytes in bytes_sent(run.events).items()}
    most = 2 * (p - 1) * -(-n // p) * ITEM  # of a rank whose chunks are all the longer ones
    worst = max(sent, key=lambda r: sent[r], default=0)
    if not sent or sent[worst] <= most:
        return
    total, best = sum(sent.values()), 2 * (p - 1) * n * ITEM
    why = f"that is {number(total / best)} times as much."
    if max([0.0, *(nbytes for r, nbytes in sent.items() if r != worst)]) < sent[worst] / 2:
        why = f"everything passes through rank {worst}: reduce_scatter and all_gather of 04 go around the ring."
    elif total == 1.5 * best:
        why = """an all-reduce is a reduce-scatter and an all-gather already, of the gradient. The gradient of other
            chunks is of no use here: leave out its all-gather."""
    raise Broken(f"""bytes: {where}, parameters and state are right, but all ranks together send {number(total)} bytes
        per step, where 2(p - 1)N = {number(best)} are enough: {why}""")


SIZES = (5, 4, 6, 3, 2)  # of the layers: 24, 30, 21 and 8 parameters
LAYERS = len(SIZES) - 1
EXAMPLES = 3  # per rank
PASSES = ((3, LAYERS), (2, LAYERS), (4, LAYERS), (1, LAYERS), (3, 1))  # ranks, layers
USE, GATHER = 1.0, 0.2  # s of virtual time: of using a layer, and of gathering the largest, about
NETWORK = Switch(alpha=1e-3, beta=GATHER / (30 * ITEM))
IDLE = 0.02  # s from one use to the next that count as none


class _Note(NamedTuple):
    """A note of a rank: "allocate", "begin", "end" (of use) or "release" of layer i, at t s."""

    what: str
    i: int
    t: float


class _WatchedLayer(ShardedLayer):
    """A layer that notes when memory is taken and given back, and says why it is not what it should be."""

    def __init__(self, comm: Comm, i: int, notes: list[_Note]) -> None:
        super().__init__(comm, _layer_of(i))
        self.i, self.notes, self.clock, self.released = i, notes, comm.trace.clock, False

    def note(self, what: str) -> None:
        self.notes.append(_Note(what, self.i, self.clock() / 1e9))

    def allocate(self) -> Tensor:
        self.note("allocate")
        return super().allocate()

    def release(self) -> None:
        self.note("release")
        self.released = True
        super().release()

    def ready(self, due: int) -> Tensor:
        """Return the whole parameters, if layer `due` comes next. Raises Broken."""
        self.note("begin")
        if self.i != due:
            raise Broken(f"""order: use was called for layer {self.i}, and layer {due} comes next. Use each layer of
                `layers` once, in the order in which they are given: backward gives the last layer first.""")
        if self.whole is None and self.released:
            raise Broken(f"""early: layer {self.i} was released before use was called for it: its parameters are gone
                by then. Release a layer after its use.""")
        if self.whole is None:
            raise Broken(f"allocate: use was called for layer {self.i}, but only this rank's chunk of it is there.")
        right = _layer_of(self.i)
        wrong = self.whole != right
        if self.whole.isnan().any():
            raise Broken(f"""wait: when use was called for layer {self.i}, {int(wrong.sum())} of its {self.n} elements
                were not there: all_gather brings them, and has ended when wait() of its Work has returned.""")
        if wrong.any():
            k = int(wrong.nonzero()[0])
            raise Broken(f"""axis: layer {self.i} was gathered in a wrong order: whole[{k}] should be
                {number(right[k].item())} and is {number(self.whole[k].item())}. Put it where `chunk` cut it.""")
        return self.whole.detach()


class _Passes(NamedTuple):
    """Forward and backward of one rank: output, its chunk of each layer's gradient, and the Notes of either pass."""

    y: np.ndarray
    grads: list[np.ndarray]
    notes: dict[str, list[_Note]]


def _layer_of(i: int) -> Tensor:
    """Return the flat parameters of layer i: the weight (out, in), then the bias."""
    return drawn(i, SIZES[i] * SIZES[i + 1] + SIZES[i + 1]) / 2


def _output(i: int, flat: Tensor, x: Tensor) -> Tensor:
    """Return (b, out) of layer i for x, (b, in)."""
    weight, bias = flat.split([SIZES[i] * SIZES[i + 1], SIZES[i + 1]])
    return torch.tanh(x @ weight.view(SIZES[i + 1], SIZES[i]).T + bias)


def _pass_through(comm: Comm, fn: Answer, count: int) -> _Passes:
    """Run the first `count` layers forward and backward on one rank, each through the answer; the loss is y.sum()."""
    notes: dict[str, list[_Note]] = {"forward": [], "backward": []}
    inputs, grads = [drawn(50 + comm.rank, EXAMPLES, SIZES[0])], []
    outer = torch.ones(EXAMPLES, SIZES[count], dtype=torch.float64)

    def forward(layer: _WatchedLayer) -> None:
        flat = layer.ready(due=len(inputs) - 1)
        inputs.append(_output(layer.i, flat, inputs[-1]))
        comm.compute(USE)
        layer.note("end")

    def backward(layer: _WatchedLayer) -> None:
        nonlocal outer
        flat = layer.ready(due=count - 1 - len(grads)).requires_grad_()
        x = inputs[layer.i].detach().requires_grad_()
        grad, outer = torch.autograd.grad(_output(layer.i, flat, x), (flat, x), outer)
        comm.compute(USE)
        grads.append(reduce_scatter(comm, grad).numpy().copy())
        layer.note("end")

    for phase, use in (("forward", forward), ("backward", backward)):
        layers = [_WatchedLayer(comm, i, notes[phase]) for i in range(count)]
        comm.barrier()
        fn(comm, layers if phase == "forward" else layers[::-1], use)
        used = [note.i for note in notes[phase] if note.what == "end"]
        if len(used) < count:
            raise Broken(f"order: in {phase}, use was called for {len(used)} of {counted(count, 'layer')}.")
    return _Passes(inputs[-1].detach().numpy(), grads[::-1], notes)


def _check_gather_and_release(fn: Answer, runner: Runner = None) -> Passed:
    def judge(run: Results, where: str, count: int) -> None:
        best = partial(simulate, len(run), _pass_through, gather_and_release, count, network=NETWORK, evidence=False)
        with compared_with(best, run):
            _check_memory(run, where, count)
            check_waits(run.events, len(run))
            _check_gathered_bytes(run, where, count)
            _check_prefetch(run, where)

    with_layers = partial(case, noun="layer")
    runs = [in_all_cases(fn, _pass_through, [c], with_layers, judge, network=NETWORK) for c in PASSES]
    run, p = runs[0], len(runs[0])
    whole, most = sum(map(_nbytes_of, range(LAYERS))), max(nbytes for nbytes, _ in _held(run[0].notes["forward"]))
    facts = [
        "output and gradients of a single rank, in forward and backward on 1, 2, 3 and 4 simulated ranks",
        f"memory: {most} bytes of whole layers at most, two of {LAYERS} layers; all of them are {whole}",
        f"prefetch: with {p} ranks no rank waits between two layers, after the first has come",
        f"bytes: with {p} ranks all send {sum(bytes_sent(run.events).values()):,} together in forward and backward; "
        f"3(p - 1)N = {3 * (p - 1) * whole:,} are the least, of two gathers and a reduce-scatter of the gradient",
    ]
    facts += engine_facts(runner, _check_memory, _pass_through, fn, LAYERS)
    return Passed(*facts, run=run)


def _nbytes_of(i: int) -> int:
    return ITEM * len(_layer_of(i))


def _held(notes: list[_Note]) -> list[tuple[int, list[int]]]:
    """Return (bytes, layers) that are whole after each note."""
    whole: dict[int, int] = {}
    course = []
    for note in notes:
        if note.what == "allocate":
            whole[note.i] = _nbytes_of(note.i)
        elif note.what == "release":
            whole.pop(note.i, None)
        course.append((sum(whole.values()), sorted(whole)))
    return course


def _check_memory(run: Results, where: str, count: int) -> None:
    """Raise Broken unless results are as on one rank, and two layers at most were whole at once, none at the end."""
    flats = [_layer_of(i).requires_grad_() for i in range(count)]
    ys = [drawn(50 + r, EXAMPLES, SIZES[0]) for r in range(len(run))]
    for i, flat in enumerate(flats):
        ys = [_output(i, flat, y) for y in ys]
    grads = torch.autograd.grad(sum((y.sum() for y in ys), torch.zeros(())), flats)
    ys, grads = [y.detach().numpy() for y in ys], [grad.numpy() for grad in grads]
    pairs = [_nbytes_of(i) + (_nbytes_of(i + 1) if i + 1 < count else 0) for i in range(count)]
    for r, passes in enumerate(run):
        rights = [np.array_split(grad, len(run))[r] for grad in grads]
        for got, right in zip([passes.y, *passes.grads], [ys[r], *rights], strict=True):
            if not np.allclose(got, right, rtol=1e-10, atol=1e-12):
                raise Broken(f"value: {where}, output or gradients of rank {r} differ from a single rank's.")
        for phase, notes in passes.notes.items():
            course = _held(notes)
            nbytes, whole = max(course)
            if nbytes > max(pairs):
                much = f"{counted(len(whole), 'layer')} at once" if len(whole) < count else "all layers at once"
                raise Broken(f"""memory: {where}, the results are right, but in {phase} rank {r} holds {much}, {nbytes}
                    bytes; two of them are {max(pairs)}. While a layer is in use, only the next may be whole, too.""")
            if course[-1][1]:
                left = ", ".join(map(str, course[-1][1]))
                raise Broken(f"""kept: {where}, the results are right, but after {phase} layer {left} of rank {r} is
                    still whole: release each layer when it has been used, the last one too.""")
            taken = [note.i for note in notes if note.what == "allocate"]
            if (again := next((i for i in taken if taken.count(i) > 1), None)) is not None:
                raise Broken(f"""twice: {where}, the results are right, but in {phase} rank {r} gathers layer {again}
                    {taken.count(again)} times.""")


def _check_gathered_bytes(run: Results, where: str, count: int) -> None:
    """Raise Broken if more travels than two gathers and a reduce-scatter of each layer."""
    p, n = len(run), sum(map(_nbytes_of, range(count)))
    total, best = sum(bytes_sent(run.events).values()), 3 * (p - 1) * n
    if total > best + 2 * (p - 1) * n / p + 2 * p * p * count * ITEM:  # by comm.all_gather, of rows of one length
        raise Broken(f"""bytes: {where}, the results are right, but all ranks together send {number(total)} bytes in
            forward and backward; {number(best)} are enough: each chunk goes to each other rank once per pass, and the
            gradient as often.""")


def _check_prefetch(run: Results, where: str) -> None:
    """Raise Broken if a rank waits from the end of one layer to the beginning of the next."""
    for r, passes in enumerate(run):
        for phase, notes in passes.notes.items():
            at = {(note.what, note.i): note.t for note in notes}
            order = [note.i for note in notes if note.what == "begin"]
            for i, following in zip(order, order[1:], strict=False):
                idle = at["begin", following] - at["end", i]
                if idle <= IDLE:
                    continue
                text = f"""prefetch: {where}, results and memory are right, but in {phase} rank {r} computes nothing for
                    {number(round(idle, 3))} s between layer {i} and layer {following}:"""
                if at["allocate", following] >= at["end", i]:
                    raise Broken(f"""{text} the gather of layer {following} begins after layer {i} was used. Begin it
                        before, in the background.""")
                raise Broken(f"""{text} it waits there for a gather. comm.background begins one and returns at once:
                    wait for it right before its layer is used.""")


EXERCISES = (
    Exercise(
        "8.3",
        "a step with sharded optimizer state",
        sharded_step,
        2,
        _check_sharded_step,
        picture=Drawing("traffic", "Your three steps: the bytes of three all-reduces"),
    ),
    Exercise(
        "8.4",
        "gather a layer, use it, release it",
        gather_and_release,
        3,
        _check_gather_and_release,
        picture=Drawing("timeline", "Your gathers behind forward and backward, in virtual time"),
    ),
)
