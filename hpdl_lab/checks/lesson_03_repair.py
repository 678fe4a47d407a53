"""Notebook 03, the zoo: three programs to repair. The broken text stands in the attendee's cell."""

from functools import partial

from .. import zoo
from .ranks import ALONE, capital, count, in_company, number, on_engines, real, simulate
from .record import Broken, Exercise, Passed
from .traffic import additions, check_waits, messages_sent

RANKS = (4, 2, 3, 5, 8)


def check_repair(name, fn, runner=None, *, explain=None, also=None):
    """Every rank returns what the repaired program returns there, and the ranks have talked to each other.

    explain: explain(value) -> a sentence about a value that is wrong, or ""; also: also(fn, run, where), more to check.
    """
    repaired = zoo.find(name).repaired
    for p in RANKS:
        where = f"with {count(p, 'rank')}"
        run = simulate(p, fn, where=where)
        check_values(run, simulate(p, repaired, evidence=False), capital(where), explain)
        if also:
            also(fn, run, capital(where))
        if not run.events:
            message = (
                f"The number is right, but with {p} ranks none of them sent or received anything: it is to come from "
                "all ranks, not out of a formula."
            )
            raise Broken("messages", message)
        check_waits(run.events, p)
    facts = [f"ends, and every rank returns what it should, with {', '.join(map(str, sorted(RANKS)))} simulated ranks"]
    if runner is not None:
        facts.append(check_on_engines(repaired, fn, runner))
    return Passed(tuple(facts), run.events)


def check_on_engines(repaired, fn, runner):
    """The same on real ranks. Returns a fact."""
    run = on_engines(runner, in_company, fn)
    if run == [None]:
        return ALONE
    check_values(run, simulate(len(run), repaired, evidence=False), f"on {count(len(run), 'engine')}")
    return f"engines: right on {count(len(run), 'MPI rank')}"


def check_values(run, expected, where, explain=None):
    for r, (got, wanted) in enumerate(zip(run, expected, strict=True)):
        if got is None:
            message = f"{where}, rank {r} returned nothing: every rank returns a float, here {number(wanted)}."
            raise Broken("returns", message)
        try:
            value = real(got)
        except (TypeError, ValueError):
            message = f"{where}, rank {r} returned {got!r}: every rank returns a float, here {number(wanted)}."
            raise Broken("returns", message) from None
        if abs(value - wanted) > 1e-9 * max(1.0, abs(wanted)):
            why = (explain and explain(value)) or steps_off(run, expected) or whose(run, expected)
            message = (
                f"{where}, nobody is stuck any more, but rank {r} returned {number(value)} and should return "
                f"{number(wanted)}. {why}"
            )
            raise Broken("value", message.rstrip())


def whose(run, expected):
    """What the values of all ranks say together, or ""."""
    alike = len(set(expected)) == 1 and len(set(map(repr, run))) > 1
    return "The ranks do not even agree: what one returns is not of all." if alike else ""


def steps_off(run, expected):
    """What the messages say, where every rank sent one more or one less than in the repaired program, or ""."""
    sent, needed = (set(messages_sent(events, len(run))) for events in (run.events, expected.events))
    if len(sent) > 1 or len(needed) > 1 or sent == {0}:
        return ""
    off = sent.pop() - min(needed)
    many = {1: "many", -1: "few"}.get(off)
    return f"Every rank sent {count(min(needed) + off, 'message')}: one step too {many}." if many else ""


LAST = 10  # of the numbers that sum_of_steps adds up


def which_numbers(total):
    """Say what is in a wrong sum, where it is that of other numbers in a row than 0 to LAST; or ""."""
    for last in range(3 * LAST):
        if total == sum(range(last + 1)) and last != LAST:
            if last > LAST:
                return f"That is the sum of 0 to {last}: one step too many, or numbers that are not to be added."
            return f"That is the sum of 0 to {last}: the last step is missing, or the last number."
    return ""


def check_steps(fn, run, where):
    """Raise Broken where ranks go through the loop more often than the longest of them needs to."""
    p = len(run)
    needed = -(-(LAST + 1) // p)
    made = simulate(p, additions, fn)
    if made[0] > needed:
        too_many = "one step" if made[0] == needed + 1 else f"{made[0] - needed} steps"
        message = (
            f"{where}, the sum is right, but every rank adds {made[0]} times together with the others, where {needed} "
            f"are enough: {too_many} too many."
        )
        raise Broken("steps", message)


def check_log(fn, run, where):
    """Raise Broken where the mean loss is printed more than once."""
    times = run.printed.count("mean loss")
    if times > 1:
        message = f"{where}, the number is right, but it is printed {times} times: rank 0 alone writes the log."
        raise Broken("log", message)


EXERCISES = (
    Exercise(
        id="3.5",
        title="repair: a ring in which all are alike",
        reference=zoo.find("ring_even_odd").repaired,
        scaffold=zoo.find("ring_even_odd").broken,
        stars=2,
        check=partial(check_repair, "ring_even_odd"),
        explanation=(
            "In a circle in which all are alike, everybody waits for somebody who waits. Somebody must be different: "
            "every other rank, or just one. Or all send to the right while they receive from the left, which is how "
            "rings are written: comm.sendrecv with two different neighbors."
        ),
    ),
    Exercise(
        id="3.6",
        title="repair: a collective that only one rank calls",
        reference=zoo.find("branch_around_collective").repaired,
        scaffold=zoo.find("branch_around_collective").broken,
        stars=2,
        check=partial(check_repair, "branch_around_collective", also=check_log),
        explanation=(
            "The commonest deadlock of training programs: a metric, a checkpoint or a log line inside `if rank == 0`, "
            "with a collective hidden in it. What all must do stands outside; what one does stands inside."
        ),
    ),
    Exercise(
        id="3.7",
        title="repair: loops of different length",
        reference=zoo.find("unequal_loops").repaired,
        scaffold=zoo.find("unequal_loops").broken,
        stars=2,
        check=partial(check_repair, "unequal_loops", explain=which_numbers, also=check_steps),
        explanation=(
            "Real data rarely divide by the number of ranks, and a rank that has run out still owes its neighbors "
            "every collective. PyTorch calls the remedy Join, or drops the last batch on all ranks."
        ),
    ),
)
