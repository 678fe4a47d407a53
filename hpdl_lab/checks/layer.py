"""An attendee's part of a layer on one rank: forward, backward, and what each of them left and sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..comm import Results
from ..comm.base import Comm
from ..units import counted
from .checkers import because, engine_facts, first_wrong, in_all_cases, nearly, with_ranks
from .ranks import full_stop, number, times, type_text
from .record import Answer, Broken, Passed, Reason, Rows, Runner
from .traffic import check_waits

if TYPE_CHECKING:
    from ..comm.buffers import Array


P = ParamSpec("P")
T = TypeVar("T")

BARRIER = "barrier"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all")


class Sent(NamedTuple):
    """Calls and messages of one rank in one phase. calls: [(collective, elements)] in order; nbytes: of all it sent.

    barriers: how often it stood in a barrier, which sends no elements and is no call of `calls`.
    """

    calls: list[tuple[str, int]]
    nbytes: int
    barriers: int

    def described(self) -> str:
        """Return in words what this rank did: "calls all_reduce of 24 numbers, 2 times", "sends nothing"."""
        if not self.calls:
            return f"sends {self.nbytes:,} bytes" if self.nbytes else "sends nothing"
        same = len(set(self.calls)) == 1
        parts = [f"{name} of {n:,} numbers" for name, n in (self.calls[:1] if same else self.calls)]
        return "calls " + ", ".join(parts) + (f", {len(self.calls)} times" if same and len(self.calls) > 1 else "")


class Ran(NamedTuple):
    """A rank after forward and backward.

    y:       what the answer returned, as an array, or None if it is no tensor; kind: its type.
    grads:   {name of an input: its gradient as an array, or None}.
    forward, backward: Sent; kept: elements of the largest tensor that autograd kept for backward.
    changed: names of the inputs that the answer wrote into; hooked: whether it changes what others say about x.
    """

    y: np.ndarray | None
    kind: str
    grads: dict[str, np.ndarray | None]
    forward: Sent
    backward: Sent
    kept: int
    changed: list[str]
    hooked: bool


class Watch:
    """Notes which collectives are called on a communicator, and how many bytes its rank sends, phase by phase."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.calls, self.inside, self.begun = comm, [], False, len(comm.trace.log)
        for name in (*COLLECTIVES, BARRIER):
            setattr(comm, name, self.noting(name, getattr(comm, name)))

    def noting(self, name: str, method: Callable[P, T]) -> Callable[P, T]:
        def noted(*args: P.args, **kwargs: P.kwargs) -> T:
            if self.inside:  # a part of another collective
                return method(*args, **kwargs)
            self.calls.append((name, elements(*args, **kwargs)))  # pyrefly: ignore[bad-argument-type]
            self.inside = True
            try:
                return method(*args, **kwargs)
            finally:
                self.inside = False

        return noted

    def phase(self) -> Sent:
        """Return Sent since the last phase ended."""
        events = self.comm.trace.events[self.begun :]
        calls = [call for call in self.calls if call[0] != BARRIER]
        nbytes = sum(e.nbytes for e in events if e.op == "send")
        sent = Sent(calls, nbytes, len(self.calls) - len(calls))
        self.calls, self.begun = [], self.begun + len(events)
        return sent


def elements(x: Array | None = None, *args: object, **kwargs: object) -> int:
    """Return the number of elements that a collective is called with: none for a barrier."""
    return 0 if x is None else x.numel() if isinstance(x, torch.Tensor) else x.size


def run_layer(comm: Comm, fn: Answer, inputs: dict[str, Tensor], weight: Tensor, given: tuple[object, ...] = ()) -> Ran:
    """Call fn(comm, *inputs, *given) and go back through it; returns Ran.

    inputs: {name: tensor} in the order of the arguments, on this rank; each of them gets a gradient.
    weight: the gradient of the loss for y; if y has another shape, there is no backward.
    """
    leaves = {name: x.detach().clone().requires_grad_(True) for name, x in inputs.items()}
    kept, watch = [0], Watch(comm)
    x = leaves["x"].view_as(leaves["x"])  # as it comes out of another layer

    def keep(tensor: Tensor) -> Tensor:
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


RANKS = (2, 3, 4, 1)
TOLERANCE = 1e-10


class Case(NamedTuple):
    """A layer on p ranks, and everything that is right about it.

    inputs:  [{name: tensor} of each rank]; weights: [gradient of the loss for y of each rank]; given: more arguments.
    y:       [what each rank returns, as an array]; grads: {name: [its gradient on each rank]}.
    whole:   elements of what no rank may hold whole; most: {"forward": bytes, "backward": bytes} of all ranks together.
    explain: explain(r) -> [(array, reason)]: outputs of known mistakes; explain_grad(name, r) likewise.
    """

    inputs: list[dict[str, Tensor]]
    weights: list[Tensor]
    y: list[np.ndarray]
    grads: dict[str, list[np.ndarray]]
    whole: int
    most: dict[str, float]
    explain: Callable[[int], Rows]
    explain_grad: Callable[[str, int], Rows]
    given: tuple[object, ...] = ()


@dataclass(frozen=True)
class Part:
    """case: case(p) -> Case; promise: what is returned, in words; why: {phase: why nothing more has to be sent}.

    adapt: adapt(fn) -> f(comm, *inputs, *given), if the answer itself takes other arguments.
    """

    case: Callable[[int], Case]
    promise: str
    why: dict[str, str]
    adapt: Callable[[Answer], Answer] = lambda fn: fn


def run_part(comm: Comm, fn: Answer, part: Part) -> Ran:
    """Run fn forward and backward on one rank, in the case for as many ranks as there are; returns Ran."""
    case = part.case(comm.size)
    return run_layer(comm, part.adapt(fn), case.inputs[comm.rank], case.weights[comm.rank], case.given)


def check_part(part: Part, fn: Answer, runner: Runner, more: str = "") -> tuple[list[str], Results]:
    """Return facts about a right answer and the Results of most ranks; raise Broken for the first invariant it breaks.

    more: what is special about this case, in words.
    """
    runs = {}

    def judge_all(run: Results, where: str, part: Part) -> None:
        judge(run, where, part)
        check_waits(run.events, len(run))
        check_sent(run, where, part)
        check_inputs(run, where)
        runs[len(run)] = run

    cases = [(p, part) for p in RANKS]
    in_all_cases(
        fn, run_part, cases, lambda p, part: f"{with_ranks(p)} {more}".rstrip(), judge_all, in_backward, threads=True
    )
    run = runs[max(RANKS)]
    facts = ["output and gradients of one rank with the whole layer, to 1e-10, on 1, 2, 3 and 4 simulated ranks"]
    facts += [
        f"{phase}: rank 0 of {len(run)} {getattr(run[0], phase).described()}" for phase in ("forward", "backward")
    ]
    return [*facts, *engine_facts(runner, judge, run_part, fn, part)], run


def check_layer(
    fn: Answer,
    runner: Runner = None,
    *,
    part: Part,
    fact: Callable[[int], str],
    variant: Part | None = None,
    more: str = "",
) -> Passed:
    """Check a part, and a variant that `more` describes, by `check_part`; fact(p): what else is true of p ranks."""
    facts, run = check_part(part, fn, runner)
    if variant:
        check_part(variant, fn, None, more)
    return Passed(*facts, fact(len(run)), run=run)


def in_backward(broken: Broken, where: str, part: Part) -> Reason | None:
    """Return the reason behind an error of autograd: a gradient of another shape than its tensor."""
    if broken.failed == "raises" and "invalid gradient" in broken.message:
        return f"""transposed: {full_stop(broken.message)} What is done in backward has to undo the shape that forward
            made: the transposed of putting parts together is cutting them."""
    return None


def judge(run: Results, where: str, part: Part) -> None:
    """Raise Broken unless outputs and gradients are right, and no rank keeps a whole layer."""
    case = part.case(len(run))
    check_output(run, case, part.promise, where)
    check_gradients(run, case, where)
    for r, ran in enumerate(run):
        if len(run) > 1 and ran.kept >= case.whole:
            raise Broken(f"""memory: {where} all numbers are right, but rank {r} keeps a tensor of {ran.kept:,}
                numbers for backward: that is a whole layer, and a layer is cut because no rank has room for it. Compute
                with what this rank holds.""")


def equal(a: np.ndarray | None, b: np.ndarray) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def difference(name: str, got: np.ndarray, expected: np.ndarray) -> str:
    """Return "y[1, 2] should be 3 and is 4": the first element that is wrong, by more than rounding if there is one."""
    fits = np.isclose(got, expected, rtol=1e-4, atol=1e-4)
    fits = fits if not fits.all() else np.isclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE)
    found = first_wrong(name + "{}", got, expected, fits if not fits.all() else np.zeros(got.shape, bool))
    return found if got.dtype == expected.dtype else f"{found}, a {got.dtype}"


def why_wrong(got: np.ndarray, right: np.ndarray, candidates: Rows, otherwise: str) -> Reason:
    """Return the reason of the first of [(array, reason)] that was got; a Reason of `otherwise` if none."""
    if np.isnan(got).any():
        return "value: NaN is no number: a division by zero, or memory that nobody has written to?"
    found = nearly(got, right) or next((why for value, why in candidates if equal(np.asarray(value), got)), None)
    share = times(got, right)
    return found or f"{otherwise}: " + ("" if share is None else f"That is {number(share)} times as much.")


def check_output(run: Results, case: Case, promise: str, where: str) -> None:
    for r, (ran, right) in enumerate(zip(run, case.y, strict=True)):
        if ran.y is None:
            raise Broken(f"returns: {where} rank {r} returned {type_text(ran.kind)}: return {promise}.")
        if ran.y.shape != right.shape:
            text = f"rank {r} returned shape {ran.y.shape}, where {right.shape} is right: {promise}."
            raise because(why_wrong(ran.y, right, case.explain(r), "shape"), f"{where} {text}")
        if not equal(ran.y, right):
            text = f"{where} {difference('y', ran.y, right)} on rank {r}."
            raise because(why_wrong(ran.y, right, case.explain(r), "value"), text)


def check_gradients(run: Results, case: Case, where: str) -> None:
    for name, rights in case.grads.items():
        for r, (ran, right) in enumerate(zip(run, rights, strict=True)):
            grad = ran.grads[name]
            if equal(grad, right):
                continue
            got = np.zeros_like(right) if grad is None else grad
            why = why_wrong(got, right, case.explain_grad(name, r), "gradient")
            if grad is not None:
                text = f"the gradient of {difference(name, grad, right)} on rank {r}."
                raise because(why, f"{where} y is right, but backward is not: {text}")
            if why == "gradient: ":
                why += """What was computed from it is invisible to autograd (detach, .data, a new tensor), or has
                    no part in y."""
            raise because(why, f"{where} y is right, but after backward {name} of rank {r} has no gradient.")


def check_sent(run: Results, where: str, part: Part) -> None:
    """Raise Broken if ranks wait in a barrier, or together send more bytes than by a ring or through rank 0."""
    case = part.case(len(run))
    for phase, most in case.most.items():
        sent = [getattr(ran, phase) for ran in run]
        total = sum(s.nbytes for s in sent)
        for r, waited in enumerate(s.barriers for s in sent):
            if waited:
                raise Broken(f"""messages: {where} all numbers are right, but in {phase} rank {r} waits in
                    {counted(waited, "barrier")}, where none is needed: there all ranks stand still for the slowest, and
                    what they need from each other comes with its message. {part.why[phase]}""")
        if total <= most:
            continue
        allowed = f"{most:,.0f} are enough" if most else "nothing has to be sent"
        raise Broken(f"""messages: {where} all numbers are right, but in {phase} the ranks send {total:,}
            bytes, where {allowed}; rank 0 {sent[0].described()}. {part.why[phase]}""")


def check_inputs(run: Results, where: str) -> None:
    for r, ran in enumerate(run):
        if ran.changed:
            raise Broken(f"""input: {where} all numbers are right, but rank {r} has written into
                {ran.changed[0]}, which its caller still needs: write into a tensor of your own.""")
        if ran.hooked:
            raise Broken(f"""input: {where} all numbers are right, but what you have put on x of rank {r} acts
                on its caller as well: if x is also used elsewhere, as by a residual connection, that gradient
                is changed, too. Put it on a view of your own: x.view_as(x).""")


def drawn(seed: int, *shape: int) -> Tensor:
    """Return random numbers of a seed, the same wherever they are drawn; float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole_numbers(seed: int, *shape: int) -> Tensor:
    """Return random whole numbers, -4 to 4, which are read easily in a message."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double()


def nearly_whole(seed: int, *shape: int) -> Tensor:
    """Return numbers like `whole_numbers` at six digits, but no float32 holds them: they differ by some 1e-9."""
    return whole_numbers(seed, *shape) + 1e-9 * drawn(seed, *shape)


def width_for(p: int, least: int = 12) -> int:
    """Return the least multiple of p that is not below `least`: a width that p ranks can share."""
    return p * -(-least // p)


def cut(x: Tensor, p: int, dim: int) -> list[Tensor]:
    """Return the p equal parts of a tensor along one dimension."""
    return list(x.chunk(p, dim))


def arrays(tensors: list[Tensor]) -> list[np.ndarray]:
    return [x.detach().numpy() for x in tensors]


def ring_bytes(p: int, nbytes: int, times: int = 1) -> int:
    """Return the bytes that p ranks send in `times` all-reduces of `nbytes`: 2(p-1) n, on a ring as through a hub."""
    return times * 2 * (p - 1) * nbytes
