"""Notebook 03, the zoo: three programs to repair. The broken text stands in the attendee's cell."""

from functools import partial

from .. import zoo
from . import answers_03_zoo as answers
from .ranks import ALONE, capital, count, in_company, number, on_engines, simulate
from .record import Broken, Exercise, Passed, WrongAnswer
from .traffic import check_waits

RANKS = (4, 2, 3, 5, 8)


def check_repair(name, fn, runner=None):
    """Every rank returns what the repaired specimen returns there, and the ranks have talked to each other."""
    repaired = zoo.find(name).repaired
    for p in RANKS:
        where = f"with {count(p, 'rank')}"
        run = simulate(p, fn, where=where)
        check_values(run, simulate(p, repaired), capital(where))
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
    check_values(run, simulate(len(run), repaired), f"on {count(len(run), 'engine')}")
    return f"engines: right on {count(len(run), 'MPI rank')}"


def check_values(run, expected, where):
    for r, (got, wanted) in enumerate(zip(run, expected, strict=True)):
        if got is None:
            message = f"{where}, rank {r} returned nothing: every rank returns a float, here {number(wanted)}."
            raise Broken("returns", message, events=run.events, size=len(run))
        try:
            value = float(got)
        except (TypeError, ValueError):
            message = f"{where}, rank {r} returned {got!r}: every rank returns a float, here {number(wanted)}."
            raise Broken("returns", message, events=run.events, size=len(run)) from None
        if abs(value - wanted) > 1e-9 * max(1.0, abs(wanted)):
            message = (
                f"{where}, nobody is stuck any more, but rank {r} returned {number(value)} and should return "
                f"{number(wanted)}. {whose(run, expected)}"
            )
            raise Broken("value", message.rstrip(), events=run.events, size=len(run))


def whose(run, expected):
    """What the values of all ranks say together, or ""."""
    alike = len(set(expected)) == 1 and len(set(map(float, run))) > 1
    return "The ranks do not even agree: what one returns is not of all." if alike else ""


COMMON = {
    "messages": (
        "Each rank knows only its own number. How does it learn those of the others?",
        "Keep the messages of the broken program: mend their order, not their purpose.",
        "lab.solution shows how few lines have to change.",
    ),
    "value": (
        "Nobody waits for ever: that is half of it. Read in the docstring what every rank is to return.",
        "Run the program in your head for two ranks: what does each of them hold after every line?",
        "Compare with the program as it was: what did it compute, besides getting stuck?",
    ),
}

EXERCISES = (
    Exercise(
        id="3.5",
        title="repair: a ring in which all are alike",
        reference=zoo.find("ring_even_odd").repaired,
        scaffold=zoo.find("ring_even_odd").broken,
        stars=2,
        check=partial(check_repair, "ring_even_odd"),
        hints={
            **COMMON,
            "": (
                "Read the table: with whom does every rank want to exchange first? Is that one free?",
                "An exchange ends when both partners have come to it. Let every other rank begin on its left side.",
                "comm.rank % 2 tells one half of the ranks from the other: `for step in (1, -1) if comm.rank % 2 == 0 "
                "else (-1, 1):`",
            ),
        },
        wrong_answers=(
            WrongAnswer(zoo.find("ring_even_odd").broken, "deadlock", "all exchange with one who exchanges"),
            WrongAnswer(answers.receives_from_both_first, "deadlock", "all receive first"),
            WrongAnswer(answers.asks_for_the_size, "deadlock", "all exchange with one who exchanges"),
            WrongAnswer(answers.only_one_neighbor, "value", "rank 0 returned 3 and should return 4"),
            WrongAnswer(answers.into_one_place, "value", "rank 0 returned 6 and should return 4"),
            WrongAnswer(answers.adds_its_own_too, "value", "rank 1 returned 3 and should return 2"),
            WrongAnswer(answers.knows_the_neighbors, "messages", "not out of a formula"),
            WrongAnswer(answers.adds_and_forgets, "returns", "rank 0 returned nothing"),
        ),
        right_answers=(answers.rightly, answers.one_is_different),
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
        check=partial(check_repair, "branch_around_collective"),
        hints={
            **COMMON,
            "": (
                "The table shows where rank 0 waits. For whom, and why will they never come?",
                "A collective is called by all ranks, or by none. Printing may be left to one.",
                "Move comm.all_reduce(loss) and the division in front of the if.",
            ),
        },
        wrong_answers=(
            WrongAnswer(zoo.find("branch_around_collective").broken, "deadlock", "there is a deadlock"),
            WrongAnswer(answers.nobody_adds, "value", "should return 2.5"),
            WrongAnswer(answers.only_rank_0_knows, "value", "rank 1 returned 2"),
            WrongAnswer(answers.adds_and_does_not_divide, "value", "returned 10 and should return 2.5"),
            WrongAnswer(answers.the_others_call_something_else, "deadlock", "barrier"),
            WrongAnswer(answers.knows_the_mean, "messages", "not out of a formula"),
            WrongAnswer(answers.logs_and_returns_nothing, "returns", "rank 0 returned nothing"),
        ),
        right_answers=(answers.by_gathering,),
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
        check=partial(check_repair, "unequal_loops"),
        hints={
            **COMMON,
            "": (
                "How many steps does each rank make, with 4 ranks? Count them.",
                "All ranks must make as many steps as the rank that has most. Who has nothing left adds 0.",
                "for begin in range(0, 11, comm.size): the number of this rank is begin + comm.rank, if that is below "
                "11.",
            ),
        },
        wrong_answers=(
            WrongAnswer(zoo.find("unequal_loops").broken, "deadlock", "there is a deadlock"),
            WrongAnswer(answers.as_many_as_the_shortest, "value", "returned 28 and should return 55"),
            WrongAnswer(answers.numbers_that_are_not_there, "value", "returned 66 and should return 55"),
            WrongAnswer(answers.three_steps_for_ever, "value", "With 2 ranks"),
            WrongAnswer(answers.one_more_for_the_last, "deadlock", "With 5 ranks there is a deadlock"),
            WrongAnswer(answers.adds_its_own_only, "value", "The ranks do not even agree"),
            WrongAnswer(answers.knows_55, "messages", "not out of a formula"),
        ),
        right_answers=(answers.adds_its_own_first, answers.fills_up_with_zeros),
        explanation=(
            "Real data rarely divide by the number of ranks, and a rank that has run out still owes its neighbors "
            "every collective. PyTorch calls the remedy Join, or drops the last batch on all ranks."
        ),
    ),
)
