"""Notebook 03: a ping-pong and the line through its times, collectives, and programs with a fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ... import zoo
from ...collectives import cost, jobs
from ...comm import CommError, Results, sim
from ...comm.base import Comm
from ...comm.buffers import to_numpy
from ...comm.network import Switch
from ...parallel import messages
from ...trace import seconds_text
from ...units import counted
from ..checkers import because, engine_facts, first_wrong, in_all_cases, reason, with_ranks
from ..ranks import alone, capital, case, number, numbers_of, real, simulate, unlike
from ..record import Answer, Broken, Exercise, Passed, Reason, Rows, Runner
from ..traffic import additions, check_waits, messages_sent

if TYPE_CHECKING:
    from ...comm.buffers import Array


# -- 3.1 ---------------------------------------------------------------------------------------------------------------

CASES = [(p, n, uint8) for p, n in ((2, 1000), (4, 1000), (3, 1), (8, 1001), (5, 0)) for uint8 in (False, True)]
ALPHA = Switch(alpha=1.0, beta=0.0)  # on which a message takes 1 s, whatever its size


def _ball(r: int, n: int, uint8: bool) -> Array:
    """Return (n,) whole numbers that fit into a byte, different on every rank."""
    import torch

    values = np.random.default_rng([r, n]).integers(0, 256, n).astype(float)
    return torch.from_numpy(values).to(torch.uint8) if uint8 else values


def _play_round(comm: Comm, fn: Answer, n: int, uint8: bool) -> tuple[object, Array]:
    """Return (what fn returned, what it left in x)."""
    x = _ball(comm.rank, n, uint8)
    return fn(comm, x), x


def _check_ping_pong(fn: Answer, runner: Runner = None) -> Passed:
    run = in_all_cases(fn, _play_round, CASES, _ping_pong_case, _check_round, network=ALPHA)
    facts = [
        f"one round is 2 messages one after another, in {len(CASES) // 2} cases on 2, 3, 4, 5 and 8 simulated ranks"
    ]
    return Passed(*facts, *engine_facts(runner, _check_balls, _play_round, fn, 1001, False, company=True), run=run)


def _ping_pong_case(p: int, n: int, uint8: bool) -> str:
    return case(p, n) + (" in a uint8 tensor (lab.ping_pong sends those)" if uint8 else "")


def _check_balls(run: Results, where: str, n: int, uint8: bool) -> None:
    """Raise Broken unless ranks 0 and 1 hold x of rank 0, the others their own, and all return x."""
    for r, (out, held) in enumerate(run):
        expected, got = to_numpy(_ball(0 if r < 2 else r, n, uint8)), to_numpy(held)
        if not np.array_equal(got, expected):
            why = (
                "What comes back to rank 0 is not what it sent: rank 1 sends back what it got.",
                "Rank 1 does not hold what rank 0 sent: receive into x itself.",
                f"x changed on rank {r}, which only looks on.",
            )[min(r, 2)]
            raise Broken(f"ball: {where}, {first_wrong(f'x{{}} on rank {r}', got, expected, got == expected)}. {why}")
        if unlike(out, held) or not np.array_equal(to_numpy(out), got):
            what = unlike(out, held) or "other values"
            raise Broken(f"""returns: {where}, x is right on rank {r}, but your function returned {what}: return x, on
                every rank.""")


def _check_round(run: Results, where: str, n: int, uint8: bool) -> None:
    """Raise Broken unless the whole ball went from 0 to 1 and back, once, one way after the other, and that is all."""
    _check_balls(run, where, n, uint8)
    check_waits(run.events, len(run))
    more = next((e for e in run.events if e.op not in ("send", "recv")), None)
    if more:
        raise Broken(f"""round: {where}, rank {more.rank} also calls {more.op}, which takes time of its own: one message
            each way.""")
    sent = [(e.rank, e.peer) for e in run.events if e.op == "send"]
    for a, b in sent:
        if {a, b} != {0, 1}:
            raise Broken(f"peers: {where}, rank {a} sends to rank {b}: only ranks 0 and 1 play, the others look on.")
    there, back = sent.count((0, 1)), sent.count((1, 0))
    if (there, back) != (1, 1):
        raise Broken(f"""round: {where}, rank 0 sent {counted(there, "message")} to rank 1, and rank 1 sent
            {counted(back, "message")} back: one round is one each way.""")
    nbytes = n if uint8 else 8 * n
    small = [e.nbytes for e in run.events if e.op == "send" and e.nbytes != nbytes]
    if small:
        raise Broken(f"""bytes: {where}, a message has {small[0]:,} bytes, but x has {nbytes:,}: the whole of x is the
            ball.""")
    if run.seconds < 1.5:
        raise Broken(f"""round: {where}, both messages are under way at the same time: rank 1 sends back what it got, so
            it can send only after it has received.""")


# -- 3.2 ---------------------------------------------------------------------------------------------------------------

LINES = ((1e-6, 1e-10), (2e-5, 8e-9), (5e-5, 1e-9), (3e-7, 2e-11))  # (alpha s, beta s/byte)
SIZES = (8, 64, 1024, 16 * 1024, 128 * 1024, 2**20, 2**23)
SLOWER = 1.3  # the first and the last message are slower by this factor: a line through single messages is wrong
EXACT, WITHIN = 0.03, 0.05  # of the line: if the times are exact, if they are not


def _check_fit(fn: Answer) -> Passed:
    for k, (alpha, beta) in enumerate(LINES):
        exact = np.array([alpha + beta * n for n in SIZES])
        noise = np.random.default_rng(k).uniform(0.97, 1.03, len(SIZES))
        noise[[0, -1]] *= SLOWER
        _check_line(fn, exact.tolist(), EXACT, "For exact times")
        _check_line(fn, (exact * noise).tolist(), WITHIN, "For times with errors, as measured ones have them")
    fact = f"""within {EXACT:.0%} for exact times, and within {WITHIN:.0%} of the least squares for times with errors,
        on {len(LINES)} networks"""
    return Passed(fact)


def _check_line(fn: Answer, seconds: list[float], within: float, where: str) -> None:
    """Raise Broken unless fn(sizes, seconds) is the line of the docstring."""
    alpha, beta = cost.fit_alpha_beta(SIZES, seconds)
    out = alone(fn, list(SIZES), seconds, where=where.lower(), keep="sizes seconds")
    a, b = numbers_of(out, 2, where, "two numbers, alpha and beta")
    off = {"alpha": abs(a / alpha - 1), "beta": abs(b / beta - 1)}
    if not all(error <= within for error in off.values()):
        why = _why_line(a, b, alpha, beta, "alpha" if off["alpha"] >= off["beta"] else "beta", np.array(seconds))
        right, said = (f"alpha = {x:.3g} s, beta = {y:.3g} s/byte" for x, y in ((alpha, beta), (a, b)))
        raise because(why, f"{where}, the line of least squares has {right}; you say {said}.")


def _why_line(a: float, b: float, alpha: float, beta: float, name: str, seconds: np.ndarray) -> Reason:
    """Return the Reason for a line (a, b) that is not (alpha, beta), the line of these seconds."""
    any_ = None
    if not np.isfinite([a, b]).all():
        return "value: Is there a division by zero, or a logarithm of it?"
    rows = (
        ((beta, alpha), "order: You return beta first: alpha, beta is the order."),
        ((alpha, 1 / beta), "unit: That is a bandwidth in bytes/s: beta is 1 / bandwidth, s for one more byte."),
        ((alpha, beta / 8), "unit: Those are seconds per bit: the sizes are in bytes."),
        *(
            ((factor * alpha, any_), f"unit: Those are {unit}: the times are in s, and so are alpha and beta.")
            for factor, unit in ((1e3, "milliseconds"), (1e6, "microseconds"), (1e9, "nanoseconds"))
        ),
        ((2 * alpha, 2 * beta), "factor: Both are twice as large: each time is the time of one way already."),
        ((alpha / 2, beta / 2), "factor: Both are half as large: each time is the time of one way already."),
    )

    def near(got: Sequence[float], line: Sequence[float | None]) -> bool:
        return all(y is any_ or abs(x - y) <= 0.2 * abs(y) for x, y in zip(got, line, strict=True))

    def equal(got: Sequence[float], line: Sequence[float]) -> bool:
        return np.allclose(got, line, rtol=1e-6, atol=0)

    if found := reason((a, b), rows, near) or reason((a, b), _other_lines(np.array(SIZES), seconds), equal):
        return found
    if np.isclose(a, seconds, rtol=1e-6, atol=0).any():
        return "alpha: That alpha is the time of one message, with its error. A fit uses all messages."
    if a == 0:
        return "alpha: Without alpha an empty message would cost nothing. What does the smallest message take?"
    if name == "alpha" and abs(a - alpha) > alpha:
        took = seconds_text(alpha + SIZES[0] * beta)
        return f"alpha: The message of {SIZES[0]} bytes took {took}: nearly all alpha."
    return "beta: Which messages show what one more byte costs? The large ones, because alpha hardly counts there."


ALIKE = """If all seconds count alike, a small error in the time of the largest message outweighs the small messages,
    and only these show alpha. Give each point the weight 1 / seconds."""


def _other_lines(n: np.ndarray, t: np.ndarray) -> Rows:
    """Return ((alpha, beta), invariant, sentence) of lines that may be meant to be the line of sizes n, seconds t."""

    def fitted(part: slice, weights: np.ndarray) -> np.ndarray:
        return np.polyfit(n[part], t[part], 1, w=weights[part])[::-1]

    whole, slope = slice(None), (t[-1] - t[0]) / (n[-1] - n[0])
    squares = "polyfit squares its weights together with the errors, so relative errors need the weights 1 / seconds."
    relative = "The weights are 1 / sizes: relative errors are errors / seconds."
    return (
        (fitted(whole, t**0), f"weights: {ALIKE}"),
        (fitted(whole, t**-2), f"weights: {squares}"),
        (fitted(whole, t**-0.5), f"weights: {squares}"),
        (fitted(whole, 1.0 / n), f"weights: {relative}"),
        (fitted(whole, n**-0.5), f"weights: {relative}"),
        (fitted(slice(1, None), 1 / t), "loop: The first message is missing: begin at index 0."),
        (fitted(slice(-1), 1 / t), "loop: The last message is missing: the range ends one too early."),
        ((t[0] - slope * n[0], slope), "ends: That is the line through two messages. A fit uses all messages."),
    )


# -- 3.3 and 3.4: a name for every letter ------------------------------------------------------------------------------


def _check_names(
    fn: Answer,
    right: dict[str, str],
    noun: str,
    missing: Callable[[str], str],
    wanted: str,
    read: Callable[[object], str],
    known: Iterable[str],
    no: Callable[[str, object], str],
    contradiction: Callable[[str, str, str], Broken],
) -> None:
    """Raise Broken unless fn() is {letter: name} as in `right`.

    noun: "job"; missing: "Job {} has no answer", and more; wanted: "name" or "diagnosis"; read(said) -> a name;
    known: all of them; no: what to say of another; contradiction(letter, said, right) -> Broken.
    """
    named = alone(fn, where="here")
    if not isinstance(named, dict):
        what = "nothing" if named is None else f"a {type(named).__name__}"
        raise Broken(f"returns: Your function returned {what}: return a dict, letter to {wanted}.")
    named = {str(letter).upper(): said for letter, said in named.items()}
    for letter, name in right.items():
        if letter not in named:
            raise Broken(f"missing: {missing(letter)}")
        said = read(named[letter])
        if said not in known:
            raise Broken(f"name: {no(letter, named[letter])} {', '.join(known)}.")
        if said != name:
            raise contradiction(letter, said, name)
    for letter in named:
        if letter not in right:
            raise Broken(f"missing: There is no {noun} {letter!r}: they are called {', '.join(right)}.")


RIGHT = jobs.which_collective()
JOBS = {job.letter: job for job in jobs.JOBS}
LETTERS = {name.replace("_", ""): name for name in jobs.DOES} | {"bcast": "broadcast"}
TOO_MUCH = {  # (right, named): what the named one does beyond the job
    ("reduce", "all_reduce"): "all_reduce would do it, and send the sum to ranks that do not need it",
    ("gather", "all_gather"): "all_gather would do it, and send the lists to ranks that do not need them",
    ("scatter", "broadcast"): "broadcast would do it, but every rank would get the rows of all the others too",
    ("reduce_scatter", "all_reduce"): "all_reduce would do it, but every rank would get the other rows of the sum too",
    ("all_to_all", "all_gather"): "all_gather would do it, but every rank would get what is meant for others too",
    ("all_reduce", "all_gather"): "all_gather would do it, if every rank then added: about p vectors for each, not two",
}


def _check_which_collective(fn: Answer) -> Passed:
    no = "Job {}: no collective is called {!r}. The eight are".format
    _check_names(fn, RIGHT, "job", _without_answer, "name", _spelled, jobs.DOES, no, _another_job)
    return Passed("8 of 8 jobs, each with the collective that sends no more than is needed")


def _spelled(said: object) -> str:
    """Return this lesson's name of what MPI, mpi4py, NCCL or torch call otherwise: "Allreduce" -> "all_reduce"."""
    letters = re.sub("[^a-z]", "", said.lower().rpartition(".")[2]) if isinstance(said, str) else ""
    letters = re.sub("^(mpi|nccl)?i?|(block|intotensor|tensor|single|v|w)$", "", letters)
    return LETTERS.get(letters, str(said))


def _without_answer(letter: str) -> str:
    return f"Job {letter} has no answer. {JOBS[letter].text}"


def _another_job(letter: str, said: str, right: str) -> Broken:
    needs = JOBS[letter].needs
    if (right, said) in TOO_MUCH:
        return Broken(f"too much: Job {letter}: {TOO_MUCH[right, said]}. Here {needs}.")
    return Broken(f"job: Job {letter}: {said} {jobs.DOES[said]}. {capital(needs)}.")


DEADLINE = 1.0  # s of real time for a program of the zoo on simulated ranks
AGAINST = {  # (diagnosis, the right one): what in the table speaks against it
    ("circle", "absent"): "The table shows ranks that wait, but no circle: the rank that they wait for does not wait.",
    ("circle", "order"): "They wait in a circle, but not in the same call.",
    ("absent", "order"): "No rank leaves out a call: look in which order each rank makes its calls.",
    ("absent", "error"): "It is true that a rank is absent, but why?",
    ("slow", "circle"): "However long you wait, nothing changes: no rank computes.",
    ("slow", "absent"): "However long you wait, nothing changes: the missing rank has finished.",
    ("order", "circle"): "Both ranks make the same calls, and in the same order.",
    ("absent", "slow"): "The rank does make the call, only late.",
    (
        "error",
        "mismatch",
    ): "The program raises no exception: the lab stops it, because two ranks contradict each other.",
}
QUESTION = {  # what to look at, by the right diagnosis
    "circle": "What is the first call of each rank, and what must happen before it returns?",
    "mismatch": "Compare send and receive: how many elements, and of what type?",
    "absent": "Count for every rank how often it makes the call in which the others wait.",
    "order": "Write the calls of two ranks side by side.",
    "error": "Does every rank get through its own lines?",
    "slow": "Is there a rank that waits for nothing?",
}


def _check_diagnose(fn: Answer) -> Passed:
    right = zoo.diagnose()
    missing, no = "Program {} has no diagnosis.".format, "Program {}: there is no diagnosis {!r}. There are".format
    _check_names(fn, right, "program", missing, "diagnosis", _plain, zoo.DIAGNOSES, no, _another_diagnosis)
    return Passed(f"{len(right)} of {len(right)} programs")


def _plain(said: object) -> str:
    return said.strip().lower() if isinstance(said, str) else str(said)


def _another_diagnosis(letter: str, said: str, right: str) -> Broken:
    """Return Broken for a wrong diagnosis, with the table of a run."""
    against = AGAINST.get((said, right), f"{said!r} means: {zoo.DIAGNOSES[said]}. That is not so here.")
    message = f"Program {letter}: you say {said!r}. {against} {QUESTION[right]}"
    return Broken(f"diagnosis: {message}", _table_of(zoo.find(zoo.LABELS[letter])))


def _table_of(program: zoo.Program) -> str:
    """Return the table of what the ranks did when the program was stopped, without the reason."""
    try:
        sim.run(program.ranks, program.broken, deadline=DEADLINE)
    except CommError as error:
        return "\n".join(str(error).split("\n")[1:])
    except Exception as error:  # what the ranks themselves raised
        return f"It ends with {type(error).__name__}: {error}"
    return ""


# -- 3.5 and 3.6: programs to repair -----------------------------------------------------------------------------------

RANKS = (4, 2, 3, 5, 8)


def _check_repair(
    name: str,
    fn: Answer,
    runner: Runner = None,
    *,
    explain: Callable[[float], str] | None = None,
    also: Callable[[Answer, Results, str], None] | None = None,
) -> Passed:
    """Check that every rank returns what the repaired program returns there, and that the ranks exchange messages.

    explain: explain(value) -> a sentence about a value that is wrong, or ""; also: also(fn, run, where), more to check.
    """
    repaired = zoo.find(name).repaired

    def check_values(run: Results, where: str) -> None:
        expected = simulate(len(run), repaired, evidence=False)
        for r, (got, wanted) in enumerate(zip(run, expected, strict=True)):
            _check_value(got, wanted, r, where, explain or (lambda value: ""), run, expected)

    def judge(run: Results, where: str) -> None:
        check_values(run, where)
        if also:
            also(fn, run, where)
        if not run.events:
            raise Broken(f"""messages: The number is right, but {where[0].lower()}{where[1:]} no rank sent or received
                anything: the number must come from messages, not from a formula.""")
        check_waits(run.events, len(run))

    run = in_all_cases(fn, lambda comm, fn: fn(comm), [(p,) for p in RANKS], with_ranks, judge)
    facts = [f"ends, and every rank returns what it should, with {', '.join(map(str, sorted(RANKS)))} simulated ranks"]
    return Passed(*facts, *engine_facts(runner, check_values, fn, company=True), run=run)


def _check_value(
    got: object, wanted: float, r: int, where: str, explain: Callable[[float], str], run: Results, expected: Results
) -> None:
    try:
        value = real(got)
    except (TypeError, ValueError):
        what = "nothing" if got is None else repr(got)
        raise Broken(f"""returns: {where}, rank {r} returned {what}: every rank returns a float, here
            {number(wanted)}.""") from None
    if abs(value - wanted) > 1e-9 * max(1.0, abs(wanted)):
        raise Broken(f"""value: {where}, there is no deadlock any more, but rank {r} returned {number(value)} and
            should return {number(wanted)}. {explain(value) or _of_all(run, expected)}""")


def _of_all(run: Results, expected: Results) -> str:
    """Compare messages and values of all ranks with the repaired program: return a sentence or ""."""
    sent, needed = (set(messages_sent(events, len(run))) for events in (run.events, expected.events))
    off = min(sent) - min(needed)
    if len(sent) == len(needed) == abs(off) == 1 and sent != {0}:
        return f"Every rank sent {counted(min(sent), 'message')}: one step too {'many' if off == 1 else 'few'}."
    alike = len(set(expected)) == 1 and len(set(map(repr, run))) > 1
    return "The ranks do not even agree: each rank should return the sum over all ranks." if alike else ""


LAST = 10  # of the numbers that sum_of_steps adds up


def _which_numbers(total: float) -> str:
    """Say what is in a wrong sum, if it is the sum of other numbers in a row than 0 to LAST; or ""."""
    fewer, more = "the last step is missing, or the last number", "one step too many, or a number too many"
    last = next((last for last in range(3 * LAST) if total == sum(range(last + 1)) and last != LAST), None)
    return "" if last is None else f"That is the sum of 0 to {last}: {more if last > LAST else fewer}."


def _check_steps(fn: Answer, run: Results, where: str) -> None:
    """Raise Broken if ranks go through the loop more often than the longest of them needs to."""
    p = len(run)
    needed, made = -(-(LAST + 1) // p), simulate(p, additions, fn)[0]
    if made > needed:
        raise Broken(f"""steps: {where}, the sum is right, but every rank adds {made} times together with the others,
            and {needed} are enough: {"one step" if made == needed + 1 else f"{made - needed} steps"} too many.""")


def _repair(id: str, title: str, name: str, **more: Callable[..., str | None]) -> Exercise:
    """Return an Exercise for which the attendee gets the broken program."""
    program = zoo.find(name)
    return Exercise(id, title, program.repaired, 2, partial(_check_repair, name, **more), scaffold=program.broken)


EXERCISES = (
    Exercise("3.1", "ping-pong", messages.ping_pong, 1, _check_ping_pong),
    Exercise("3.2", "fit alpha and beta", cost.fit_alpha_beta, 1, _check_fit),
    Exercise("3.3", "which collective is it", jobs.which_collective, 1, _check_which_collective),
    Exercise("3.4", "diagnose seven programs", zoo.diagnose, 2, _check_diagnose),
    _repair("3.5", "repair: a ring that deadlocks", "ring_even_odd"),
    _repair("3.6", "repair: loops of different length", "unequal_loops", explain=_which_numbers, also=_check_steps),
)
