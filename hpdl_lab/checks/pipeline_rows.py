"""The rows of a schedule as an attendee's function makes them: what they say, and whether they can be carried out."""

from ..schedules import KINDS, Action, Schedule, evaluate, over_time
from ..schedules.validation import in_order
from .ranks import alone, capital, count, off_by
from .record import Broken

CASES = ((3, 4), (4, 8), (2, 5), (1, 3), (4, 4), (4, 2), (3, 1), (8, 16), (5, 7))  # (ranks, micro-batches)
SHOW = (4, 8)  # of the facts
SHOWN_UNITS = 40  # of time: a schedule that takes longer is not shown as text
WHY_LOST = {
    "F": "its examples would never reach the loss",
    "B": "its examples would be missing in every gradient of that stage",
    "I": "the stage before would wait for ever",
    "W": "the weights of that stage would miss its examples",
}


def case_of(ranks, micro_batches):
    """How a case is named in messages."""
    several = "es" if micro_batches > 1 else ""
    return f"with {count(ranks, 'rank')} and {micro_batches} micro-batch{several}"


def beginning(schedule):
    """How a sentence about `schedule` begins."""
    return capital(case_of(schedule.ranks, schedule.micro_batches))


def schedule_of(fn, ranks, micro_batches, kinds):
    """The Schedule whose rows `fn` makes, every action in it once, and no rank ahead of itself; raises Broken.

    Args:    kinds: of the actions that each micro-batch needs, such as "FB".
    """
    where, rows = case_of(ranks, micro_batches), []
    for rank in range(ranks):
        row = alone(fn, rank, ranks, micro_batches, where=f"{where}, for rank {rank},")
        rows.append(formed(row, f"{capital(where)} rank {rank}"))
    schedule = Schedule(fn.__name__, ranks, ranks, micro_batches, 1, tuple(rows))
    for rank, row in enumerate(rows):
        check_actions(rank, row, schedule, kinds, f"{capital(where)} rank {rank}")
    try:
        in_order(schedule)
    except ValueError as error:
        message = f"{capital(where)} {told(error)}: it would work on what is not there yet."
        raise Broken("order", message, shown_rows(schedule)) from None
    return schedule


def formed(row, who):
    """`row` as a tuple of Actions."""
    if row is None:
        raise Broken("returns", f"{who} gets nothing: return the list of its actions.")
    if not isinstance(row, (list, tuple)):
        raise Broken("returns", f"{who} gets {type(row).__name__}: return a list of Action.")
    wrong = next((item for item in row if not isinstance(item, tuple) or len(item) != len(Action._fields)), None)
    if wrong is not None:
        message = f'{who} gets a list with {wrong!r} in it: each item is an Action, such as Action(2, "F", 5).'
        raise Broken("returns", message)
    return tuple(Action(*item) for item in row)


def check_actions(rank, row, schedule, kinds, who):
    """Raise Broken unless `row` has each micro-batch's actions of this rank's stage, once."""
    m, several = schedule.micro_batches, "F, I and W" if len(kinds) == 3 else "F and B"
    for action in row:
        if action.kind not in tuple(kinds):
            word = KINDS.get(action.kind, "nothing that a stage does")
            message = f"{who} does {action}, {word}: in this schedule every micro-batch has one each of {several}."
            raise Broken("kind", message)
        if action.stage != rank:
            message = (
                f"{who} does {action}, which is of stage {action.stage}: rank {rank} holds stage {rank} and no other. "
                "An Action is (stage, kind, micro-batch), in this order."
            )
            raise Broken("stage", message)
        if not isinstance(action.micro_batch, int) or not 0 <= action.micro_batch < m:
            many = sum(other.kind == action.kind for other in row)
            message = f"{who} does {action}: there is no micro-batch {action.micro_batch}, they go from 0 to {m - 1}."
            if many > m:
                word = KINDS[action.kind]
                message += f" It does {count(many, word)}, where {m} are needed: {off_by(many, m, word)}."
            raise Broken("micro-batch", message)
    for kind in kinds:
        done = [action.micro_batch for action in row if action.kind == kind]
        twice = next((i for i in done if done.count(i) > 1), None)
        if twice is not None:
            raise Broken("twice", f"{who} does {rank}{kind}{twice} {done.count(twice)} times: once is enough.")
    for kind in kinds:
        lost = sorted(set(range(m)) - {action.micro_batch for action in row if action.kind == kind})
        if lost:
            raise Broken("lost", f"{who} {lost_text(rank, kind, lost, m)}")


def lost_text(rank, kind, lost, m):
    """The sentence about micro-batches whose action of `kind` is in no row."""
    if len(lost) == m:
        return f"has no {KINDS[kind]} at all: {WHY_LOST[kind]}."
    which = f"the last micro-batch, {m - 1}" if lost == [m - 1] else f"micro-batch {lost[0]}"
    if len(lost) > 1:
        which = f"micro-batches {', '.join(map(str, lost[:5]))}{' ...' if len(lost) > 5 else ''}"
    each = "its" if len(lost) == 1 else "their"
    return f"never does the {KINDS[kind]} of {which}: {WHY_LOST[kind].replace('its', each)}."


def times_of(schedule, **costs):
    """The Evaluation of `schedule`; raises Broken with the cycle where it deadlocks."""
    try:
        return evaluate(schedule, **costs)
    except ValueError as error:
        message = f"{beginning(schedule)} there is a deadlock: {told(error).removeprefix('deadlocks: ')}."
        raise Broken("deadlock", message, shown_rows(schedule)) from None


def told(error):
    """The sentence of validation or evaluation without the name of the schedule."""
    text = str(error)
    return text.partition(": ")[2] if ": rank" in text.partition(" deadlocks")[0] else text.partition(" ")[2]


def shown_rows(schedule):
    """The rows of a schedule that cannot be carried out, for the detail of a message."""
    return "\n".join(
        f"rank {rank}  {' '.join(f'{a.kind}{a.micro_batch}' for a in row)}" for rank, row in enumerate(schedule.rows)
    )


def shown(schedule, times):
    """`schedule` over time, for the detail of a message; "" where it is too long to read."""
    return over_time(schedule, times) if times.makespan <= SHOWN_UNITS else ""


def facts_of(fn, cases, kinds, memory):
    """What a right answer has reached, with the number against its target."""
    p, m = SHOW
    times = times_of(schedule_of(fn, p, m, kinds))
    return (
        f"right for {len(cases)} pairs of ranks and micro-batches",
        f"{case_of(p, m)}: {times.makespan} units of time, {times.bubble:.1%} of them bubble",
        memory,
    )
