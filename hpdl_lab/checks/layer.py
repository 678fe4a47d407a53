"""An attendee's part of a layer on one rank: forward, backward, and what each of them left and sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..comm import Results
from ..comm.base import Comm
from ..comm.calls import Call, Calls
from ..units import counted
from .checkers import because, engine_facts, first_wrong, in_all_cases, nearly, with_ranks
from .ranks import full_stop, number, times, type_text
from .record import Answer, Broken, Passed, Reason, Rows, Runner
from .traffic import check_waits


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


class _Ran(NamedTuple):
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


class CallLog(Calls):
    """The calls of a communicator, and what its rank sends, phase by phase."""

    def __init__(self, comm: Comm) -> None:
        self.counts, self.calls, self.trace = comm.calls.counts, comm.calls, comm.trace
        self.made, self.begun = list[Call](), len(comm.trace.log)
        comm.calls = self

    def note(self, call: Call | tuple[str, str]) -> None:
        self.calls.note(call)
        if isinstance(call, Call):
            self.made.append(call)

    def phase(self) -> Sent:
        """Return Sent since the last phase ended."""
        events, barriers = self.trace.events[self.begun :], sum(call.op == "barrier" for call in self.made)
        calls = [(call.op, call.count) for call in self.made if call.count >= 0]
        self.made, self.begun = [], self.begun + len(events)
        return Sent(calls, sum(e.nbytes for e in events if e.op == "send"), barriers)


def _run_layer(
    comm: Comm, fn: Answer, inputs: dict[str, Tensor], weight: Tensor, given: tuple[object, ...] = ()
) -> _Ran:
    """Call fn(comm, *inputs, *given) and go back through it; returns Ran.

    inputs: {name: tensor} in the order of the arguments, on this rank; each of them gets a gradient.
    weight: the gradient of the loss for y; if y has another shape, there is no backward.
    """
    leaves = {name: x.detach().clone().requires_grad_(True) for name, x in inputs.items()}
    kept, log = [0], CallLog(comm)
    x = leaves["x"].view_as(leaves["x"])  # as it comes out of another layer

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = fn(comm, *(leaves | {"x": x}).values(), *given)
    kind, forward = type(y).__name__, log.phase()
    y = y if isinstance(y, torch.Tensor) else None
    value = None if y is None else y.detach().cpu().numpy().copy()
    if y is not None and y.requires_grad and y.shape == weight.shape:
        torch.autograd.backward(y, weight)
    backward = log.phase()
    changed = [name for name, x in leaves.items() if not torch.equal(x, inputs[name])]
    grads = {name: None if x.grad is None else x.grad.cpu().numpy().copy() for name, x in leaves.items()}
    (others,) = torch.autograd.grad(x, leaves["x"], torch.ones_like(x))  # what a residual connection says about x
    hooked = not bool((others == 1).all())
    return _Ran(value, kind, grads, forward, backward, max(kept), changed, hooked)


RANKS = (2, 3, 4, 1)
TOLERANCE = 1e-10


class LayerCase(NamedTuple):
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
    """case: case(p) -> LayerCase; promise: what is returned, in words; why: {phase: why no more has to be sent}.

    adapt: adapt(fn) -> f(comm, *inputs, *given), if the answer itself takes other arguments.
    """

    case: Callable[[int], LayerCase]
    promise: str
    why: dict[str, str]
    adapt: Callable[[Answer], Answer] = lambda fn: fn


def _run_part(comm: Comm, fn: Answer, part: Part) -> _Ran:
    """Run fn forward and backward on one rank, in the case for as many ranks as there are; returns Ran."""
    case = part.case(comm.size)
    return _run_layer(comm, part.adapt(fn), case.inputs[comm.rank], case.weights[comm.rank], case.given)


def _check_part(part: Part, fn: Answer, runner: Runner, more: str = "") -> tuple[list[str], Results]:
    """Return facts about a right answer and the Results of most ranks; raise Broken for the first invariant it breaks.

    more: what is special about this case, in words.
    """
    runs = {}

    def judge_all(run: Results, where: str, part: Part) -> None:
        _judge(run, where, part)
        check_waits(run.events, len(run))
        _check_sent(run, where, part)
        for r, ran in enumerate(run):
            if ran.changed:
                raise Broken(f"""input: {where} all numbers are right, but rank {r} has written into
                    {ran.changed[0]}, which its caller still needs: write into a tensor of your own.""")
            if ran.hooked:
                raise Broken(f"""input: {where} all numbers are right, but what you have put on x of rank {r} acts
                    on its caller, too, as by a residual connection. Put it on a view of your own: x.view_as(x).""")
        runs[len(run)] = run

    cases = [(p, part) for p in RANKS]
    in_all_cases(
        fn, _run_part, cases, lambda p, part: f"{with_ranks(p)} {more}".rstrip(), judge_all, _in_backward, threads=True
    )
    run = runs[max(RANKS)]
    facts = ["output and gradients of one rank with the whole layer, to 1e-10, on 1, 2, 3 and 4 simulated ranks"]
    facts += [
        f"{phase}: rank 0 of {len(run)} {getattr(run[0], phase).described()}" for phase in ("forward", "backward")
    ]
    return [*facts, *engine_facts(runner, _judge, _run_part, fn, part)], run


def check_layer(
    fn: Answer,
    runner: Runner = None,
    *,
    part: Part,
    fact: Callable[[int], str],
    variant: Part | None = None,
    more: str = "",
) -> Passed:
    """Check a part, and a variant that `more` describes, by `_check_part`; fact(p): what else is true of p ranks."""
    facts, run = _check_part(part, fn, runner)
    if variant:
        _check_part(variant, fn, None, more)
    return Passed(*facts, fact(len(run)), run=run)


def _in_backward(broken: Broken, where: str, part: Part) -> Reason | None:
    """Return the reason behind an error of autograd: a gradient of another shape than its tensor."""
    if broken.failed == "raises" and "invalid gradient" in broken.message:
        return f"""transposed: {full_stop(broken.message)} What is done in backward has to undo the shape that forward
            made: the transposed of putting parts together is cutting them."""
    return None


def _judge(run: Results, where: str, part: Part) -> None:
    """Raise Broken unless outputs and gradients are right, and no rank keeps a whole layer."""
    case = part.case(len(run))
    for r, (ran, right) in enumerate(zip(run, case.y, strict=True)):
        if ran.y is None:
            raise Broken(f"returns: {where} rank {r} returned {type_text(ran.kind)}: return {part.promise}.")
        if ran.y.shape != right.shape:
            text = f"rank {r} returned shape {ran.y.shape}, where {right.shape} is right: {part.promise}."
            raise because(why_wrong(ran.y, right, case.explain(r), "shape"), f"{where} {text}")
        if not equal(ran.y, right):
            text = f"{where} {difference('y', ran.y, right)} on rank {r}."
            raise because(why_wrong(ran.y, right, case.explain(r), "value"), text)
    _check_gradients(run, case, where)
    for r, ran in enumerate(run):
        if len(run) > 1 and ran.kept >= case.whole:
            raise Broken(f"""memory: {where} all numbers are right, but rank {r} keeps a tensor of {ran.kept:,}
                numbers for backward: that is a whole layer, which has no room on a rank.""")


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
        return "value: NaN is no number: a division by zero, or memory that was never written?"
    found = nearly(got, right) or next((why for value, why in candidates if equal(np.asarray(value), got)), None)
    share = times(got, right)
    return found or f"{otherwise}: " + ("" if share is None else f"That is {number(share)} times as much.")


def _check_gradients(run: Results, case: LayerCase, where: str) -> None:
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


def _check_sent(run: Results, where: str, part: Part) -> None:
    """Raise Broken if ranks wait in a barrier, or together send more bytes than by a ring or through rank 0."""
    case = part.case(len(run))
    for phase, most in case.most.items():
        sent = [getattr(ran, phase) for ran in run]
        total = sum(s.nbytes for s in sent)
        for r, waited in enumerate(s.barriers for s in sent):
            if waited:
                raise Broken(f"""messages: {where} all numbers are right, but in {phase} rank {r} waits in
                    {counted(waited, "barrier")}, where none is needed. {part.why[phase]}""")
        if total <= most:
            continue
        allowed = f"{most:,.0f} are enough" if most else "nothing has to be sent"
        raise Broken(f"""messages: {where} all numbers are right, but in {phase} the ranks send {total:,}
            bytes, where {allowed}; rank 0 {sent[0].described()}. {part.why[phase]}""")


def drawn(seed: int, *shape: int) -> Tensor:
    """Return random numbers of a seed, the same wherever they are drawn; float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small_integers(seed: int, *shape: int) -> Tensor:
    """Return random whole numbers, -4 to 4, which are read easily in a message."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double()


def nearly_whole(seed: int, *shape: int) -> Tensor:
    """Return numbers like `small_integers` at six digits, but no float32 holds them: they differ by some 1e-9."""
    return small_integers(seed, *shape) + 1e-9 * drawn(seed, *shape)


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
