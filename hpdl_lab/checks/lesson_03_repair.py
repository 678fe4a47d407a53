"""Notebook 03, the zoo: three programs to repair. The broken text stands in the attendee's cell."""

from functools import partial

from .. import zoo
from . import answers_03_zoo as answers
from .ranks import ALONE, capital, count, in_company, number, on_engines, real, simulate
from .record import Broken, Exercise, Passed, WrongAnswer
from .traffic import additions, check_waits, messages_sent

RANKS = (4, 2, 3, 5, 8)


def check_repair(name, fn, runner=None, *, explain=None, also=None):
    """Every rank returns what the repaired specimen returns there, and the ranks have talked to each other.

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
            WrongAnswer(answers.one_step_too_few, "value", "Every rank sent 1 message: one step too few"),
            WrongAnswer(answers.one_step_too_many, "value", "Every rank sent 3 messages: one step too many"),
            WrongAnswer(answers.in_the_other_direction, "deadlock", "all exchange with one who exchanges"),
            WrongAnswer(answers.meets_in_a_barrier_first, "deadlock", "all exchange with one who exchanges"),
            WrongAnswer(answers.sums_all, "value", "rank 0 returned 6 and should return 4"),
            WrongAnswer(answers.sums_all_but_itself, "value", "rank 0 returned 6 and should return 4"),
            WrongAnswer(answers.passes_on_what_arrived, "value", "should return 4"),
            WrongAnswer(answers.neighbors_as_a_pair, "returns", "every rank returns a float, here 4"),
            WrongAnswer(answers.neighbors_as_text, "returns", "rank 0 returned '4.0'"),
            WrongAnswer(answers.never_waits_for_its_sends, "wait", "did not wait for 1 of its sends"),
            WrongAnswer(answers.into_one_place, "value", "rank 0 returned 6 and should return 4"),
            WrongAnswer(answers.adds_its_own_too, "value", "rank 1 returned 3 and should return 2"),
            WrongAnswer(answers.knows_the_neighbors, "messages", "not out of a formula"),
            WrongAnswer(answers.adds_and_forgets, "returns", "rank 0 returned nothing"),
        ),
        right_answers=(answers.rightly, answers.one_is_different, answers.pairs_of_two),
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
        hints={
            **COMMON,
            "": (
                "The table shows where rank 0 waits. For whom, and why will they never come?",
                "A collective is called by all ranks, or by none. Printing may be left to one.",
                "Move comm.all_reduce(loss) and the division in front of the if.",
            ),
            "log": (
                "Which lines are for every rank, and which for rank 0 alone?",
                "The collective and the division are for all, the line that prints is for one.",
                "if comm.rank == 0:\n    print(...)",
            ),
        },
        wrong_answers=(
            WrongAnswer(zoo.find("branch_around_collective").broken, "deadlock", "there is a deadlock"),
            WrongAnswer(answers.nobody_adds, "value", "should return 2.5"),
            WrongAnswer(answers.only_rank_0_knows, "value", "rank 1 returned 2"),
            WrongAnswer(answers.adds_and_does_not_divide, "value", "returned 10 and should return 2.5"),
            WrongAnswer(answers.the_others_call_something_else, "deadlock", "barrier"),
            WrongAnswer(answers.all_write_the_log, "log", "it is printed 4 times"),
            WrongAnswer(answers.all_but_rank_0_add, "deadlock", "rank 0 never called all_reduce"),
            WrongAnswer(answers.only_rank_0_divides, "value", "rank 1 returned 10 and should return 2.5"),
            WrongAnswer(answers.divides_by_four, "value", "With 2 ranks"),
            WrongAnswer(answers.divides_by_one_less, "value", "rank 0 returned 3.33333"),
            WrongAnswer(answers.the_largest_loss, "value", "rank 0 returned 4"),
            WrongAnswer(answers.adds_twice, "value", "rank 0 returned 10 and should return 2.5"),
            WrongAnswer(answers.loss_of_rank_0, "value", "rank 0 returned 1"),
            WrongAnswer(answers.mean_as_text, "returns", "rank 0 returned '2.5'"),
            WrongAnswer(answers.knows_the_mean, "messages", "not out of a formula"),
            WrongAnswer(answers.logs_and_returns_nothing, "returns", "rank 0 returned nothing"),
        ),
        right_answers=(answers.by_gathering, answers.prints_while_it_searches, answers.reduces_and_broadcasts),
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
            WrongAnswer(answers.one_step_too_few_for_all, "value", "the sum of 0 to 7: the last step is missing"),
            WrongAnswer(answers.one_number_too_few, "value", "the sum of 0 to 9: the last step is missing, or"),
            WrongAnswer(answers.one_number_too_many, "value", "the sum of 0 to 11: one step too many, or"),
            WrongAnswer(answers.one_step_too_many_for_all, "steps", "one step too many"),
            WrongAnswer(answers.a_step_for_every_number, "steps", "8 steps too many"),
            WrongAnswer(answers.begins_one_step_late, "value", "returned 49 and should return 55"),
            WrongAnswer(answers.the_last_number_again, "value", "returned 65 and should return 55"),
            WrongAnswer(answers.skips_what_is_not_there, "deadlock", "rank 3 never called all_reduce once more"),
            WrongAnswer(answers.waits_in_a_barrier, "deadlock", "calls barrier where"),
            WrongAnswer(answers.sums_on_rank_0, "value", "The ranks do not even agree"),
            WrongAnswer(answers.knows_55, "messages", "not out of a formula"),
        ),
        right_answers=(answers.adds_its_own_first, answers.fills_up_with_zeros),
        explanation=(
            "Real data rarely divide by the number of ranks, and a rank that has run out still owes its neighbors "
            "every collective. PyTorch calls the remedy Join, or drops the last batch on all ranks."
        ),
    ),
)
