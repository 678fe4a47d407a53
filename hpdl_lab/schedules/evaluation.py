"""The times of a schedule's actions, and how much waits in memory: arithmetic, without ranks.

Every rank does its actions in order, each as soon as what it needs is there. The numbers may be ints, floats or
fractions: nothing but sums and one division by the number of chunks is done with them.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, count, islice, pairwise
from numbers import Real
from typing import NamedTuple, TypeAlias

from ..predict.graph import Need, TaskGraph
from .catalog import FOLDED, build
from .schedule import Action, Schedule, require_schedule

MANY = 16  # ranks from which a round of as many micro-batches as ranks is long enough

Cost: TypeAlias = float | Sequence[float]  # time of an action: a number, or one for each stage of the model


class TimedAction(NamedTuple):
    """An action with its begin and its end."""

    action: Action
    begin: float
    end: float


class Evaluation(NamedTuple):
    """The times of a schedule, and what its ranks hold.

    rows:     rows[r] is a tuple of Timed of rank r, in order.
    makespan: when the last rank ends.
    bubble:   share of the ranks' time, from 0 to the makespan, in which they wait.
    live:     live[r] is a tuple of (time, count): from then on rank r holds the activations of `count` micro-batches,
              from the begin of a forward to the end of its backward, or of its weight gradient. With v chunks per
              rank each stage counts for itself, and its activations are 1/v as large.
    peak:     peak[r] is the largest count of rank r.
    """

    rows: tuple[tuple[TimedAction, ...], ...]
    makespan: float
    bubble: float
    live: tuple[tuple[tuple[float, int], ...], ...]
    peak: tuple[int, ...]


def evaluate(
    schedule: Schedule,
    forward: Cost = 1,
    backward: Cost = 2,
    input: Cost = 1,
    weight: Cost = 1,
    transfer: float = 0,
    pair: Cost | None = None,
) -> Evaluation:
    """Time a schedule.

    Args:    forward, backward, input, weight: time of an F, B, I, W. A number is what one micro-batch costs on a
             rank: with v chunks each takes 1/v of it. A sequence has one number for each stage of the model.
             transfer: from the end of an action to the begin of what needs it on another rank.
             pair: time of an F and a B that overlap (Pair), at least as long as each; None: F, and then B.
    Returns: Evaluation.
    Raises:  ValueError that names the cycle if the schedule deadlocks; for sequences of another length, and what is
             no time; TypeError if it is no Schedule.
    """
    require_schedule(schedule)
    costs = {"F": _per_stage(schedule, "forward", forward), "B": _per_stage(schedule, "backward", backward)}
    costs |= {"I": _per_stage(schedule, "input", input), "W": _per_stage(schedule, "weight", weight)}
    both = None
    if pair is not None:
        both, least = _per_stage(schedule, "pair", pair)[0], max(*costs["F"], *costs["B"])
        if both < least:
            raise ValueError(f"a pair takes at least as long as its forward and its backward, {least}, got {both}")
    return summary(_timed(schedule, costs, transfer, both))


def _per_stage(schedule: Schedule, what: str, cost: Cost) -> list[float]:
    """Return one number for each stage of the model."""
    if isinstance(cost, Real):
        costs: list[float] = [cost / schedule.chunks if schedule.chunks > 1 else cost] * schedule.stages
    else:
        costs = list(cost) if isinstance(cost, Iterable) else [cost]
    if wrong := [time for time in costs if not isinstance(time, Real) or not float(time) >= 0]:
        raise ValueError(f"{what} takes a time of at least 0, or one for each stage, got {wrong[0]!r}")
    if len(costs) != schedule.stages:
        raise ValueError(f"{what} has {len(costs)} numbers, and {schedule.name} has {schedule.stages} stages")
    return costs


def _timed(
    schedule: Schedule, costs: Mapping[str, Sequence[float]], transfer: float, pair: float | None = None
) -> list[list[TimedAction]]:
    """Return a list of Timed for each rank. A pair begins with its forward and ends with its backward.

    costs: {kind: [time of each stage of the model]}; pair: time of one, or None.
    """
    graph = _graph_of(schedule)
    if len(graph.order) < len(graph.seconds):
        raise ValueError(_deadlock(schedule, set(graph.order)))
    actions, seconds = list(chain.from_iterable(schedule.rows)), _seconds_of(schedule, costs)
    second = [n + 1 for n, action in enumerate(actions) if action in schedule.paired]
    alone = [seconds[n] for n in second]
    if pair is not None:
        for n in second:
            seconds[n] = pair - seconds[n - 1]
    begins, ends = graph.times(seconds, transfer)
    for n, least in zip(second, alone, strict=True):
        begins[n] = min(begins[n], ends[n] - least)
    times = map(TimedAction, actions, begins, ends)
    return [list(islice(times, len(row))) for row in schedule.rows]


def _seconds_of(schedule: Schedule, costs: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the time of every action, rank by rank."""
    stages = schedule.stages
    return [costs[kind][stage % stages] for row in schedule.rows for stage, kind, _ in row]


def _graph_of(schedule: Schedule) -> TaskGraph:
    """Return the Graph with a task for each action, rank by rank. One that needs what no rank does waits for itself.

    A task that needs the forward of a pair waits for the backward behind it, with which the pair ends.
    """
    graph = TaskGraph()
    numbers: dict[tuple[int, str, int], int] = {
        action: number for number, action in enumerate(chain.from_iterable(schedule.rows))
    }
    numbers |= {forward: numbers[backward] for forward, backward in schedule.partner.items()}
    for rank, row in enumerate(schedule.rows):
        first = len(graph.seconds)
        for number, action in enumerate(row, start=first):
            needs = []
            for stage, kinds, micro_batch in schedule.needs(action):
                required = next((n for k in kinds if (n := numbers.get((stage, k, micro_batch))) is not None), number)
                if not first <= required < number:  # before it on its own rank
                    needs.append(
                        Need(required, far=schedule.rank_of(action.stage if required == number else stage) != rank)
                    )
            graph.add(needs=needs, row=rank)
    return graph


def _deadlock(schedule: Schedule, done: set[int]) -> str:
    """Return the sentence about ranks that wait for each other; done: numbers of the actions that can end."""
    numbered = enumerate(chain.from_iterable(schedule.rows))
    ended = {action for number, action in numbered if number in done}
    later = [[action for action in row if action not in ended] for row in schedule.rows]
    rank = next(r for r, row in enumerate(later) if row)
    passed, steps = [], []
    while rank not in passed:
        passed.append(rank)
        action = later[rank][0]
        stage, kinds, micro_batch = next(
            required
            for required in schedule.needs(action)
            if not any((required[0], kind, required[2]) in ended for kind in required[1])
        )
        wanted = [Action(stage, kind, micro_batch) for kind in kinds]
        found = next(((r, a) for r, row in enumerate(later) for a in row if a in wanted), None)
        if found is None:
            return f"{schedule.name}: rank {rank} waits at {action} for {wanted[0]}, which no rank does"
        rank, needed = found
        steps.append(f"at {action} for {needed} of rank {rank}")
    return f"{schedule.name} deadlocks: rank {rank} waits " + ", which waits ".join(steps[passed.index(rank) :])


def summary(rows: list[list[TimedAction]]) -> Evaluation:
    """Return the Evaluation of a list of Timed for each rank, measured or calculated; the clock begins at 0."""
    makespan = max((row[-1].end for row in rows if row), default=0)
    busy = sum(map(covered, rows))
    live = tuple(_held(row) for row in rows)
    return Evaluation(
        rows=tuple(map(tuple, rows)),
        makespan=makespan,
        bubble=1 - busy / (makespan * len(rows)) if makespan else 0,
        live=live,
        peak=tuple(max((count for _, count in counts), default=0) for counts in live),
    )


def covered(row: Iterable[TimedAction]) -> float:
    """Return how long one rank is busy; time in which a pair overlaps counts once."""
    busy: float = 0
    until: float = 0
    for _, begin, end in sorted(row, key=lambda timed: timed.begin):
        busy, until = busy + max(0, end - max(begin, until)), max(until, end)
    return busy


def _held(row: list[TimedAction]) -> tuple[tuple[float, int], ...]:
    """Return ((time, count), ...) of one rank: how many micro-batches' activations it holds from that time on."""
    changes = [(begin, 1) for action, begin, _ in row if action.kind == "F"]
    changes += [(end, -1) for action, _, end in row if action.kind in "BW"]
    counts, count = [], 0
    for time, change in sorted(changes):  # at equal times the -1 first: an end makes room for a begin
        count += change
        if counts and counts[-1][0] == time:
            counts.pop()
        counts.append((time, count))
    return tuple(counts)


# -- long steps, in milliseconds of our own time -----------------------------------------------------------------------


class PipelineTime(NamedTuple):
    """The times of one step, in s.

    ends:      ends[rank]: when its last action ends.
    gradients: gradients[rank]: ((stage, begin, end), ...) of the action with which a stage's gradients are complete.
    hidden:    hidden[rank]: messages behind arithmetic in pairs.
    """

    ends: tuple[float, ...]
    gradients: tuple[tuple[tuple[int, float, float], ...], ...]
    hidden: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return max(self.ends)


def pipeline_time(
    name: str,
    ranks: int,
    micro_batches: int,
    costs: list[tuple[float, ...]],
    transfer: float,
    chunks: int | None = None,
    messages: Sequence[tuple[float, float]] = (),
) -> PipelineTime:
    """Return the times of one step with stages of any length.

    After a few rounds a pipeline repeats itself, so a step with many micro-batches is one with few, and as much more as
    the last round took:

        T(m) = T(2n) + (m / n - 2) (T(2n) - T(n))     for m > 2n micro-batches, n = twice the ranks, or a multiple of n

    Args:    name: of a schedule; costs: per stage of the model (forward, backward, input, weight) in s.
             transfer: s of a message between stages on different ranks. messages: per stage, s of its forward and of
             its backward that are messages inside, which a pair hides behind the arithmetic of both.
    Returns: PipelineTime.
    Raises:  ValueError as build.
    """
    by_kind: dict[str, tuple[float, ...]] = dict(zip("FBIW", zip(*costs, strict=True), strict=True))

    def of(m: int) -> PipelineTime:
        schedule, graph, last = built(name, ranks, m, chunks)
        seconds, hidden = _seconds_of(schedule, by_kind), [0.0] * len(schedule.rows)
        actions = ((rank, action) for rank, row in enumerate(schedule.rows) for action in row)
        for n, (rank, action) in enumerate(actions) if messages else ():
            if action in schedule.partner:  # the forward of a pair; its backward comes next
                less = hidden_in_pair(schedule, action, costs, messages)
                seconds[n + 1] -= less
                hidden[rank] += less
        begins, ends = graph.times(seconds, transfer)
        bounds = pairwise(accumulate(map(len, schedule.rows), initial=0))
        gradients = tuple(tuple((stage, begins[n], ends[n]) for stage, n in stages) for stages in last)
        done = tuple(ends[after - 1] if after > first else 0.0 for first, after in bounds)
        return PipelineTime(done, gradients, tuple(hidden))

    counts, more = repeating_rounds(name, ranks, micro_batches)
    if not more:
        return of(micro_batches)
    short, long = map(of, counts)

    def go_on(few: float, many: float) -> float:
        return many + (more - 1) * (many - few)

    ends = tuple(map(go_on, short.ends, long.ends))
    gradients = tuple(
        tuple(
            (stage, go_on(begin, later), go_on(end, last))
            for (stage, begin, end), (_, later, last) in zip(few, many, strict=True)
        )
        for few, many in zip(short.gradients, long.gradients, strict=True)
    )
    return PipelineTime(ends, gradients, tuple(map(go_on, short.hidden, long.hidden)))


def hidden_in_pair(
    schedule: Schedule, forward: Action, costs: Sequence[Sequence[float]], messages: Sequence[tuple[float, float]]
) -> float:
    """Return the s that a pair saves: messages of its forward and its backward under arithmetic of the other.

    Args:    forward: of the pair; costs, messages: as of pipeline_time.
    """
    one, other = forward.stage % schedule.stages, schedule.partner[forward].stage % schedule.stages
    there, back = messages[one][0], messages[other][1]
    return min(there, costs[other][1] - back) + min(back, costs[one][0] - there)


def repeating_rounds(name: str, ranks: int, micro_batches: int) -> tuple[tuple[int, ...], int]:
    """Return ((few micro-batches, a round more), more): a long step is one with few, and `more` rounds; 0 if short."""
    period = 2 * ranks if ranks < MANY or name in FOLDED else ranks
    more, rest = divmod(micro_batches - period, period) if micro_batches > 2 * period else (0, 0)
    return (period + rest, 2 * period + rest), more


@functools.lru_cache(maxsize=512)
def built(
    name: str, ranks: int, micro_batches: int, chunks: int | None
) -> tuple[Schedule, TaskGraph, tuple[tuple[tuple[int, int], ...], ...]]:
    """Return (Schedule, its Graph, and per rank ((stage, number of the action that completes its gradients), ...))."""
    schedule = build(name, ranks, micro_batches, chunks)
    numbers = count()
    last: list[dict[int, int]] = [{} for _ in schedule.rows]
    for row, stages in zip(schedule.rows, last, strict=True):
        for (stage, kind, _), number in zip(row, numbers, strict=False):
            if kind in "BW":
                stages[stage] = number
    return schedule, _graph_of(schedule), tuple(tuple(sorted(stages.items())) for stages in last)
