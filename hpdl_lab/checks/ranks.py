"""Run an attendee's function on simulated ranks and turn whatever goes wrong into one clear sentence."""

from __future__ import annotations

import contextlib
import copy
import io
import re
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..comm import CommError, CommTimeout, Deadlock, Results, sim
from ..comm.base import Comm
from ..comm.buffers import dtype_name, is_tensor
from ..comm.errors import explainers
from ..comm.network import Network
from ..spelling import explain_spelling
from ..units import counted
from .record import AnswerFailed, Broken

if TYPE_CHECKING:
    from ..comm.buffers import Array

T = TypeVar("T")

explainers.add(explain_spelling)

DEADLINE = 5.0  # s of real time for one run on simulated ranks; the longest of a right answer takes about 0.05 s
SENTINEL = -777.0  # what memory holds that an answer must not touch, or must not read
# Results of the answer's latest run, None if it has failed
judged: ContextVar[Results | None] = ContextVar("judged", default=None)

PRINTED_LINES = 10  # of the attendee's own prints that are shown with a failure


def simulate(
    p: int,
    fn: Callable[..., object],
    *args: object,
    network: Network | None = None,
    where: str = "",
    threads: bool = False,
    evidence: bool = True,
) -> Results:
    """Call sim.run for a check: returns Results; raises Broken, or NotImplementedError for a stub.

    `where` says in which case this is, such as "with 3 ranks and 1,000 elements"; `threads`: see sim.run.
    evidence: whether this is the run that is judged, whose events go with a Broken that is raised about it.
    """
    printed = io.StringIO()
    if evidence:
        judged.set(None)
    try:
        with contextlib.redirect_stdout(printed):
            run = sim.run(p, fn, *args, network=network, deadline=DEADLINE, threads=threads)
        if evidence:
            judged.set(run)
        return run
    except NotImplementedError:
        raise  # not wrong: not written yet
    except Broken as broken:
        at = f"{capital(where)}{'' if where.endswith(',') else ','}"
        raise broken.restate(f"{broken.failed}: {at} {broken.message}") from None
    except Deadlock as error:
        first, *table = str(error).split("\n")
        message = f"{capital(where)} there is a deadlock: {full_stop(first.removeprefix('deadlock: '))}"
        raise Broken(f"deadlock: {message}", "\n".join(table) + _tail(printed)) from error
    except CommTimeout as error:
        first, *table = str(error).split("\n")
        place = first.partition(" of real time")[2]  # ", in cell:4"
        message = (
            f"{capital(where)} your function was still running after {DEADLINE:g} s{place}. Is there a loop that never "
            "ends?"
        )
        raise Broken(f"timeout: {message}", "\n".join(table) + _tail(printed)) from None
    except (Exception, SystemExit) as error:
        raise Broken(f"raises: {describe_error(error, where)}", _tail(printed)) from error


class Ledger(dict):
    """{rank: what it noted}, one for all simulated ranks; it outlives a run that fails."""

    def __deepcopy__(self, memo: dict[int, object]) -> Ledger:
        return self


def with_evidence(broken: Broken) -> Broken:
    """Return the same failure with the events of the judged run, unless it has its own, or the run itself failed."""
    run = judged.get()
    if run is not None and not broken.events:
        broken.events, broken.size = list(getattr(run, "events", ())), len(run)
    return broken


@contextlib.contextmanager
def compared_with(best: Callable[[], Results], run: Results) -> Generator[None]:
    """Attach events to a Broken raised within: of `run`, and of best(), the same run of a right answer."""
    try:
        yield
    except Broken as broken:
        broken.events, broken.expected, broken.size = run.events, best().events, len(run)
        raise


def alone(fn: Callable[..., T], *args: Any, where: str = "", keep: str = "") -> T:
    """Return fn(*args) of a function without ranks, for a check: errors as by `simulate`, the arguments themselves.

    keep: names of the first arguments, which are copied, and must not change: "x y".
    """
    names = keep.split()
    given = [copy.deepcopy(arg) for arg in args[: len(names)]]
    result = simulate(1, lambda comm: fn(*given, *args[len(names) :]), where=where)[0]
    for name, before, after in zip(names, args, given, strict=False):
        if before != after if isinstance(before, list | tuple) else not np.array_equal(before, after):
            raise Broken(f"input: {capital(where)} your function changed {name}: its caller still needs it.")
    return result


def numbers_of(got: Any, n: int, where: str, ask: str) -> list[float]:
    """Return the n numbers that an answer has returned, one without a list; raise Broken that asks for `ask`."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        values = [real(value) for value in ([got] if n == 1 else got)]
        if len(values) == n:
            return values
    raise Broken(f"returns: {capital(where)} your function returned {got!r:.80}: return {ask}.")


def tried(fn: Callable[..., T], *args: object, where: str = "") -> tuple[T | None, BaseException | None]:
    """Return (fn(*args), None), or (None, what it raised), if an exercise has to refuse something; else as `alone`."""
    try:
        return alone(fn, *args, where=where), None
    except Broken as broken:
        if broken.failed != "raises":
            raise
        return None, broken.__cause__


def on_engines(runner: Callable[..., Results], fn: Callable[..., object], *args: object) -> Results:
    """Return runner(fn, *args); raise the answer's faults there as Broken. Trouble with engines themselves passes."""
    judged.set(None)
    try:
        run = runner(fn, *args)
        judged.set(run)
        return run
    except (CommError, AnswerFailed) as error:
        first, *table = str(error).split("\n")
        message = f"Right on simulated ranks, but on the engines: {full_stop(first)}"
        raise Broken(f"engines: {message}", "\n".join(table)) from None


def in_company(comm: Comm, fn: Callable[..., T], *args: object) -> T | None:
    """Return fn(comm, *args) on an engine, or None if it is the only engine and has no peer."""
    return fn(comm, *args) if comm.size > 1 else None


ALONE = "engines: only one is running, and this exercise needs two: lab.start(4)"  # the fact about [None]


def describe_error(error: BaseException | None, where: str) -> str:
    """Return a sentence for an exception of the attendee's function, with the rank and the line if they are known."""
    notes = getattr(error, "__notes__", [])
    known = notes[0].replace("on simulated rank 0 of 1, ", "").removesuffix("at ").removesuffix(", ") if notes else ""
    place = f" ({known})" if known else ""
    return f"{capital(where)} your function raised {type(error).__name__}: {error}{place}{_past_the_end(error)}"


def _past_the_end(error: BaseException | None) -> str:
    """Return the likely cause of an IndexError, one step too many; "" if it is not the first index past the end."""
    numbers = re.search(r"index (\d+) is out of bounds for .* size (\d+)", str(error))
    if not isinstance(error, IndexError) or (numbers and numbers[1] != numbers[2]):
        return ""
    return ". Indices end one before the length: does a loop go one step too far?"


def _tail(printed: io.StringIO) -> str:
    """Return the last lines that the attendee's function printed, for the detail of a message."""
    lines = printed.getvalue().splitlines()
    if not lines:
        return ""
    left_out = len(lines) - PRINTED_LINES
    head = (
        f"\nyour function printed (the last {PRINTED_LINES} of {len(lines):,} lines):"
        if left_out > 0
        else "\nyour function printed:"
    )
    return "\n".join([head, *(f"  {line}" for line in lines[-PRINTED_LINES:])])


def unlike(out: Any, like: Array) -> str:
    """Return what is wrong with `out` in the place of `like`, an array or tensor, such as "nothing"; "" if nothing."""
    if type(out) is not type(like):
        return type_text(type(out).__name__)
    if out.shape != like.shape:
        return f"something of shape {tuple(out.shape)}"
    return f"something of dtype {dtype_name(out.dtype)}" if out.dtype != like.dtype else ""


def type_text(name: str) -> str:
    """Return a wrong type by its name, in words: "nothing", "something of type list"."""
    return "nothing" if name == "NoneType" else f"something of type {name}"


def kind(x: Array) -> str:
    """Return in words what an array or tensor is: "a NumPy array of shape (2,), float64"."""
    return f"a {'torch tensor' if is_tensor(x) else 'NumPy array'} of shape {tuple(x.shape)}, {dtype_name(x.dtype)}"


def real(value: Any) -> float:
    """Return float(value), but not for a text. Raises TypeError, ValueError."""
    if isinstance(value, str):
        raise TypeError(f"{value!r} is a text, not a number")
    return float(value)


def shown(value: object) -> str:
    """Return what an answer has returned, for a message: cut if it is long."""
    text = repr(value)
    return "nothing" if value is None else f"{text[:60]}{'...' if len(text) > 60 else ''}"


def off_by(got: int, needed: int, noun: str) -> str:
    """Return how far a loop goes round too often, or not often enough: "one step too many", "2 steps too few"."""
    n = abs(got - needed)
    return f"{'one' if n == 1 else n} {noun}{'s' * (n > 1)} too {'many' if got > needed else 'few'}"


def times(got: np.ndarray, right: np.ndarray) -> float | None:
    """Return how many times `right` an array is: a number, or None if it is no multiple, or nothing at all."""
    got, right = np.ravel(got), np.ravel(right)
    if got.shape != right.shape or not right.any() or not np.isfinite(got).all():
        return None
    share = float(got @ right / (right @ right))
    return share if share and np.allclose(got, share * right, rtol=1e-10, atol=1e-12) else None


def full_stop(sentence: str) -> str:
    return sentence if sentence[-1:] in ".?!" else sentence + "."


def capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def case(p: int, n: int, noun: str = "element") -> str:
    """Return the name of a case in messages."""
    return f"with {counted(p, 'rank')} and {counted(n, noun)}"


def number(value: float) -> str:
    """Return a number as people write it: 1234.0 -> "1,234", 0.25 -> "0.25"."""
    value = float(value)
    return f"{int(value):,}" if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"
