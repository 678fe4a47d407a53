"""Notebook 10: schedules, judged by bubble and memory; stages that cost the same; the backward of one micro-batch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from ...comm import Results
from ...comm.base import Comm
from ...parallel.pipeline import naive as reference
from ...parallel.pipeline.split import partition
from ...schedules import KINDS, Action, Evaluation, Schedule, build, evaluate, over_time
from ...schedules.gpipe import gpipe
from ...schedules.one_f_one_b import one_f_one_b, zero_bubble_h1
from ...schedules.validation import in_order
from ...units import counted
from ..checkers import because, engine_facts, exactly, first_wrong, in_all_cases
from ..ranks import ALONE, alone, capital, full_stop, number, off_by, simulate, tried
from ..record import Answer, Broken, Drawing, Exercise, Passed, Reason, Runner
from ..traffic import check_waits, in_barriers

CASES = ((3, 4), (4, 8), (2, 5), (1, 3), (4, 4), (4, 2), (3, 1), (8, 16), (5, 7))  # (ranks, micro-batches)
SHOW = (4, 8)  # of the facts
SHOWN_UNITS = 40  # of time: a schedule that takes longer is not shown as text
WHY_LOST = {
    "F": "its examples would never reach the loss",
    "B": "its examples would be missing in every gradient of that stage",
    "I": "the previous stage would wait forever",
    "W": "the weights of that stage would miss its examples",
}


def _case_of(ranks: int, micro_batches: int) -> str:
    """Return the name of a case in messages."""
    several = "es" if micro_batches > 1 else ""
    return f"with {counted(ranks, 'rank')} and {micro_batches} micro-batch{several}"


def _beginning(schedule: Schedule) -> str:
    """Return the beginning of a sentence about `schedule`."""
    return capital(_case_of(schedule.ranks, schedule.micro_batches))


def _schedule_of(fn: Answer, ranks: int, micro_batches: int, kinds: str) -> Schedule:
    """Return the Schedule whose rows `fn` makes, every action in it once, and no rank ahead of itself; raises Broken.

    Args:    kinds: of the actions that each micro-batch needs, such as "FB".
    """
    where, rows = _case_of(ranks, micro_batches), []
    for rank in range(ranks):
        row = alone(fn, rank, ranks, micro_batches, where=f"{where}, for rank {rank},")
        rows.append(_formed(row, f"{capital(where)} rank {rank}"))
    schedule = Schedule(fn.__name__, ranks, ranks, micro_batches, 1, tuple(rows))
    for rank, row in enumerate(rows):
        _check_actions(rank, row, schedule, kinds, f"{capital(where)} rank {rank}")
    try:
        in_order(schedule)
    except ValueError as error:
        message = f"{capital(where)} {_text_of(error)}: it would work on what is not there yet."
        raise Broken(f"order: {message}", _shown_rows(schedule)) from None
    return schedule


def _formed(row: object, who: str) -> tuple[Action, ...]:
    """Return `row` as a tuple of Actions."""
    if row is None:
        raise Broken(f"returns: {who} gets nothing: return the list of its actions.")
    if not isinstance(row, (list, tuple)):
        raise Broken(f"returns: {who} gets {type(row).__name__}: return a list of Action.")
    wrong = next((item for item in row if not isinstance(item, tuple) or len(item) != len(Action._fields)), None)
    if wrong is not None:
        raise Broken(f"""returns: {who} gets a list with {wrong!r} in it: each item is an Action, such as Action(2, "F",
            5).""")
    return tuple(Action(*item) for item in row)


def _check_actions(rank: int, row: tuple[Action, ...], schedule: Schedule, kinds: str, who: str) -> None:
    """Raise Broken unless `row` has each micro-batch's actions of this rank's stage, once."""
    m, several = schedule.micro_batches, "F, I and W" if len(kinds) == 3 else "F and B"
    for action in row:
        if action.kind not in tuple(kinds):
            word = KINDS.get(action.kind, "nothing that a stage does")
            raise Broken(f"""kind: {who} does {action}, {word}: in this schedule every micro-batch has one each of
                {several}.""")
        if action.stage != rank:
            raise Broken(f"""stage: {who} does {action}, which is of stage {action.stage}: rank {rank} holds stage
                {rank} and no other. An Action is (stage, kind, micro-batch), in this order.""")
        if not isinstance(action.micro_batch, int) or not 0 <= action.micro_batch < m:
            many = sum(other.kind == action.kind for other in row)
            message = f"{who} does {action}: there is no micro-batch {action.micro_batch}, they go from 0 to {m - 1}."
            if many > m:
                word = KINDS[action.kind]
                message += f" It does {counted(many, word)}, and {m} are needed: {off_by(many, m, word)}."
            raise Broken(f"micro-batch: {message}")
    for kind in kinds:
        done = [action.micro_batch for action in row if action.kind == kind]
        twice = next((i for i in done if done.count(i) > 1), None)
        if twice is not None:
            raise Broken(f"twice: {who} does {rank}{kind}{twice} {done.count(twice)} times: once is enough.")
    for kind in kinds:
        lost = sorted(set(range(m)) - {action.micro_batch for action in row if action.kind == kind})
        if lost:
            raise Broken(f"lost: {who} {_lost_text(rank, kind, lost, m)}")


def _lost_text(rank: int, kind: str, lost: list[int], m: int) -> str:
    """Return the sentence about micro-batches whose action of `kind` is in no row."""
    if len(lost) == m:
        return f"has no {KINDS[kind]} at all: {WHY_LOST[kind]}."
    which = f"the last micro-batch, {m - 1}" if lost == [m - 1] else f"micro-batch {lost[0]}"
    if len(lost) > 1:
        which = f"micro-batches {', '.join(map(str, lost[:5]))}{' ...' if len(lost) > 5 else ''}"
    each = "its" if len(lost) == 1 else "their"
    return f"never does the {KINDS[kind]} of {which}: {WHY_LOST[kind].replace('its', each)}."


def _times_of(schedule: Schedule, **costs: float) -> Evaluation:
    """Return the Evaluation of `schedule`; raises Broken with the cycle if it deadlocks."""
    try:
        return evaluate(schedule, **costs)
    except ValueError as error:
        message = f"{_beginning(schedule)} there is a deadlock: {_text_of(error).removeprefix('deadlocks: ')}."
        raise Broken(f"deadlock: {message}", _shown_rows(schedule)) from None


def _text_of(error: ValueError) -> str:
    """Return the sentence of validation or evaluation without the name of the schedule."""
    text = str(error)
    return text.partition(": ")[2] if ": rank" in text.partition(" deadlocks")[0] else text.partition(" ")[2]


def _shown_rows(schedule: Schedule) -> str:
    """Return the rows of a schedule that cannot be carried out, for the detail of a message."""
    return "\n".join(
        f"rank {rank}  {' '.join(f'{a.kind}{a.micro_batch}' for a in row)}" for rank, row in enumerate(schedule.rows)
    )


def _shown(schedule: Schedule, times: Evaluation) -> str:
    """Return `schedule` over time, for the detail of a message; "" if it is too long to read."""
    return over_time(schedule, times) if times.makespan <= SHOWN_UNITS else ""


def _facts_of(fn: Answer, cases: tuple[tuple[int, ...], ...], kinds: str, memory: str) -> tuple[str, ...]:
    """Return facts about a right answer, with the number against its target."""
    p, m = SHOW
    times = _times_of(_schedule_of(fn, p, m, kinds))
    return (
        f"right for {len(cases)} pairs of ranks and micro-batches",
        f"{_case_of(p, m)}: {times.makespan} units of time, {times.bubble:.1%} of them bubble",
        memory,
    )


COSTS = ((1, 2), (1, 1), (2, 1))  # time of forward and of backward


def _check_gpipe(fn: Answer) -> Passed:
    for p, m in CASES:
        schedule = _schedule_of(fn, p, m, "FB")
        for rank, row in enumerate(schedule.rows):
            _check_forwards_first(schedule, rank, row)
        _check_makespan(schedule, "Do all ranks take the micro-batches in the same order?")
    return Passed(
        *_facts_of(fn, CASES, "FB", f"held: {SHOW[1]} micro-batches on every rank, all of them: 10.2 needs fewer")
    )


def _check_forwards_first(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> None:
    """Raise Broken if a backward comes before a forward."""
    kinds = [action.kind for action in row]
    forwards = [place for place, kind in enumerate(kinds) if kind == "F"]
    early = next((place for place in range(forwards[-1]) if kinds[place] == "B"), None)
    if early is not None:
        p, m, times = schedule.ranks, schedule.micro_batches, _times_of(schedule)
        why = "GPipe's synchronous step has all forwards first."
        if times.makespan == 3 * m * p and p > 1:
            why = f"So only one of {p} ranks works at a time: no pipeline, {times.bubble:.0%} bubble. {why}"
        message = f"{_beginning(schedule)} rank {rank} does {row[early]} while forwards are still to come. {why}"
        raise Broken(f"forwards first: {message}", _shown(schedule, times))


def _check_makespan(schedule: Schedule, question: str) -> None:
    """Raise Broken unless the schedule takes (m + p - 1)(tf + tb), for several tf and tb."""
    p, m = schedule.ranks, schedule.micro_batches
    for tf, tb in COSTS:
        times, least = _times_of(schedule, forward=tf, backward=tb), (m + p - 1) * (tf + tb)
        if times.makespan > least:
            message = f"""{_beginning(schedule)} a forward takes {tf}, a backward {tb}, and your schedule
                takes {times.makespan}. (m+p-1)(tf+tb) = {least} is enough: {times.bubble:.0%} of your time is bubble,
                not {(p - 1) / (m + p - 1):.0%}. {question}"""
            raise Broken(f"bubble: {message}", _shown(schedule, times))


def _check_one_f_one_b(fn: Answer) -> Passed:
    for p, m in CASES:
        schedule = _schedule_of(fn, p, m, "FB")
        times = _times_of(schedule)
        for rank, peak in enumerate(times.peak):
            if peak > min(m, p - rank):
                raise Broken(f"memory: {_too_many_live(schedule, times, rank)}", _shown(schedule, times))
        _check_makespan(schedule, "Warm-up: how many forwards before the first backward comes back?")
    return Passed(
        *_facts_of(fn, CASES, "FB", f"held at most: {', '.join(map(str, range(SHOW[0], 0, -1)))} micro-batches, not 8")
    )


def _too_many_live(schedule: Schedule, times: Evaluation, rank: int) -> str:
    """Return the message about a rank that holds more than it has to."""
    m, peak, enough = schedule.micro_batches, times.peak[rank], min(schedule.micro_batches, schedule.ranks - rank)
    text = f"""{_beginning(schedule)} rank {rank} holds the activations of {peak} micro-batches at once, and 1F1B needs
        min(m, p - rank) = {enough}. """
    if set(times.peak) == {m}:
        return f"{text}That is GPipe: every rank holds all m of them. Do a backward as soon as one is possible."
    if len(set(times.peak)) == 1:
        return (
            f"{text}All ranks hold equally many. A later rank gets its first backward sooner: its warm-up is shorter."
        )
    return f"{text}Backward should come {counted(peak - enough, 'forward')} sooner."


DRAWN: tuple[list[float], int] = ([5, 1, 1, 1, 4, 4], 3)  # (costs, stages): the case that the docstring draws
CASES_PARTITION: tuple[tuple[list[float], int], ...] = (
    DRAWN,
    ([1, 1, 1, 1, 1, 9], 3),  # equal numbers of layers are not equal work
    ([9, 1, 1, 1, 1, 1], 3),
    ([4, 3, 2, 6], 1),
    ([2, 3], 2),
    ([1, 0, 0, 0], 3),  # layers that cost nothing still belong somewhere
    ([0.5, 0.25, 0.5, 1.0], 2),
    ([7, 1, 7, 1, 7, 1], 4),
    ([3, 3, 3, 3, 4], 2),
)
RANDOM = 12  # more cases, of up to 12 layers, half of them in seconds, as layers are measured
A_GPT = [3.0, *[1.0] * 12, 6.0]  # about: a token embedding, twelve blocks, and a head that makes logits


def _cases() -> Iterator[tuple[list[float], int]]:
    """Yield (costs, stages) of every case."""
    yield from CASES_PARTITION
    for seed in range(RANDOM):
        generator = np.random.default_rng(seed)
        layers = int(generator.integers(3, 13))
        costs, stages = generator.integers(1, 30, layers).tolist(), int(generator.integers(2, layers))
        yield [cost / 1000 for cost in costs] if seed % 2 else costs, stages


def _check_partition(fn: Answer) -> Passed:
    for costs, stages in _cases():
        where = f"for costs = {costs} and {counted(stages, 'stage')}"
        sizes = alone(fn, costs, stages, where=f"{where},", keep="costs")
        _check_form(sizes, costs, stages, capital(where))
        _check_balance(sizes, costs, stages, capital(where))
    _check_refusal(fn)
    return Passed(f"right in {len(CASES_PARTITION) + RANDOM} cases of up to 12 layers", _fact_about_a_gpt(fn))


def _check_form(sizes: Any, costs: list[float], stages: int, where: str) -> None:
    """Raise Broken unless `sizes` are `stages` whole numbers, at least 1, that add up to all layers."""
    if sizes is None:
        raise Broken(f"form: {where} your function returned nothing: return the list of sizes.")
    try:
        items = [int(size) for size in sizes]
        whole = all(size == item for size, item in zip(sizes, items, strict=True))
    except (TypeError, ValueError):
        items, whole = [], False
    if not whole:
        raise Broken(f"form: {where} your function returned {str(sizes)[:60]}: sizes are a list of whole numbers.")
    text = f"{where} your sizes are {items}"
    if len(items) != stages:
        raise Broken(f"form: {text}: {counted(len(items), 'part')} for {counted(stages, 'stage')}.")
    if min(items) < 1:
        raise Broken(f"""empty: {text}: a stage without a layer would only pass on what it gets, and a rank would do
            nothing.""")
    if sum(items) != len(costs):
        lost = len(costs) - sum(items)
        what = f"the last {lost} would be in no stage" if lost > 0 else f"that is {-lost} too many"
        raise Broken(f"form: {text}, {sum(items)} layers in all, and there are {len(costs)}: {what}.")


def stage_costs(sizes: list[int], costs: list[float]) -> list[float]:
    """Return the cost of each part."""
    ends = np.cumsum([int(size) for size in sizes]).tolist()
    return [sum(costs[end - int(size) : end]) for end, size in zip(ends, sizes, strict=True)]


def _check_balance(sizes: list[int], costs: list[float], stages: int, where: str) -> None:
    """Raise Broken unless the most expensive part is as cheap as it can be."""
    best = partition(costs, stages)
    parts, least = stage_costs(sizes, costs), max(stage_costs(best, costs))
    if max(parts) <= least * (1 + 1e-12):
        return
    slow = parts.index(max(parts))
    text = ", ".join(number(part) for part in parts)
    message = f"""{where} your sizes {[int(size) for size in sizes]} make stages that cost {text}: all wait for stage
        {slow} with its {number(parts[slow])}, and {number(least)} is possible. """
    if max(sizes) - min(sizes) <= 1:
        message += "Equal numbers of layers are not equal work."
    elif slow == stages - 1:
        message += "The earlier stages took too little, and the rest has piled up in the last one."
    elif slow == 0:
        message += "The first stage took more than its share."
    raise Broken(f"balance: {message}")


def _check_refusal(fn: Answer) -> None:
    """Raise Broken unless more stages than layers are refused in a sentence."""
    sizes, error = tried(fn, [1.0, 2.0], 3, where="for 2 layers and 3 stages,")
    if error is None:
        message = f"2 layers cannot be shared by 3 stages, and your function returned {sizes}: raise ValueError."
    elif not isinstance(error, ValueError):
        message = f"For 2 layers and 3 stages your function raised {type(error).__name__}: {error}. Raise ValueError."
    elif "2" in str(error) and "3" in str(error):
        return
    else:
        message = f"""For 2 layers and 3 stages your function raised ValueError({str(error)!r}): say both numbers, so
            that a reader knows what to change. The line with raise stood above your solution."""
    raise Broken(f"refusal: {message}")


def _fact_about_a_gpt(fn: Answer) -> str:
    """Return what it means for a model whose head is expensive."""
    sizes = [int(size) for size in alone(fn, list(A_GPT), 4, where="for a GPT of 14 layers,")]
    equal = max(stage_costs([4, 4, 3, 3], A_GPT))
    slowest = max(stage_costs(sizes, A_GPT))
    return f"a GPT whose head costs six blocks: sizes {sizes}, slowest stage {number(slowest)}, not {number(equal)}"


FILLED = tuple((p, m) for p, m in CASES if m >= p)  # ZB-H1 needs so many micro-batches


def _check_zero_bubble_h1(fn: Answer) -> Passed:
    for p, m in FILLED:
        schedule = _schedule_of(fn, p, m, "FIW")
        times = _times_of(schedule)
        if max(times.peak) > p:
            rank = times.peak.index(max(times.peak))
            message = f"""{_beginning(schedule)} rank {rank} holds the activations of {times.peak[rank]} micro-batches
                at once, until W is done, and ZB-H1 needs only p = {p}. How many Ws do you keep back?"""
            raise Broken(f"memory: {message}", _shown(schedule, times))
        if times.makespan > 3 * m + p - 1:
            raise Broken(f"bubble: {_not_filled(schedule, times)}", _shown(schedule, times))
    p, m = SHOW
    memory = f"held at most: {p} micro-batches, as by 1F1B, whose bubble is {3 * (p - 1) / (3 * (m + p - 1)):.1%}"
    return Passed(*_facts_of(fn, FILLED, "FIW", memory))


def _not_filled(schedule: Schedule, times: Evaluation) -> str:
    """Return the message about a bubble that is larger than it has to be."""
    p, m = schedule.ranks, schedule.micro_batches
    text = f"""{_beginning(schedule)} F, I and W take 1 each, and your schedule takes {times.makespan}. 3m+p-1 =
        {3 * m + p - 1} is enough: {times.bubble:.0%} of your time is bubble, not
        {(p - 1) / (3 * m + p - 1):.0%}. """
    places = [{(action.kind, action.micro_batch): place for place, action in enumerate(row)} for row in schedule.rows]
    if all(row["W", i] == row["I", i] + 1 for row in places for i in range(m)):
        return f"{text}Every W follows its I at once, so ranks wait as in 1F1B: keep some Ws back for that time."
    gap = next((r for r in reversed(range(p)) if times.rows[r][-1].end < times.makespan), 0)
    return f"{text}Rank {gap} still waits although it could do a W: which W is left by then?"


WIDTH, EXAMPLES = 3, 2  # numbers that pass between stages for an example; examples of a micro-batch
GPIPE, GEMS = "gpipe", "gems_mast"
REVERSED = "gpipe, last micro-batch first"  # as in the picture of its paper
STEPPED = ((2, GPIPE, 1), (3, GPIPE, 4), (3, REVERSED, 3), (1, GPIPE, 3), (5, GPIPE, 2), (3, GEMS, 2), (4, GEMS, 2))
WHERE = {GEMS: "in GEMS ", REVERSED: "if the last micro-batch goes back first, "}


class _Ran(NamedTuple):
    """A rank after a step.

    grads:  {stage: {parameter: its gradient as an array, or None}}.
    taken:  [(action, sorted keys that it took out of `saved`)] of its backwards.
    sent:   messages sent in backwards, nbytes: their bytes.
    """

    grads: dict[int, dict[str, np.ndarray | None]]
    taken: list[tuple[Action, list[tuple[int, int]]]]
    sent: int
    nbytes: int


def _plan_of(name: str, ranks: int, micro_batches: int) -> Schedule:
    """Return the schedule of a case."""
    if name != REVERSED:
        return build(name, ranks, micro_batches)
    plan, m = build(GPIPE, ranks, micro_batches), micro_batches
    return replace(plan, name=name, rows=tuple(row[:m] + row[: -m - 1 : -1] for row in plan.rows))


def _layers_of(part: int) -> torch.nn.Module:
    """Return the layers of one stage, the same wherever it is: (b, WIDTH) -> (b, WIDTH)."""
    return copy.deepcopy(_stage_drawn(part))


@functools.cache
def _stage_drawn(part: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(part)
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double()


def _batch(micro_batch: int) -> tuple[Tensor, ...]:
    """Return (x, y) of a micro-batch, each (EXAMPLES, WIDTH)."""
    generator = torch.Generator().manual_seed(100 + micro_batch)
    made = (torch.randn(EXAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return tuple(made)


def _step(comm: Comm, fn: Answer, name: str, micro_batches: int) -> _Ran:
    """Run one step of the schedule `name`, forwards by the library, backwards by fn(comm, schedule, action, saved)."""
    schedule = _plan_of(name, comm.size, micro_batches)
    modules = {stage: _layers_of(stage % schedule.stages) for stage in schedule.stages_of(comm.rank)}
    saved, taken, backwards = {}, [], []
    for action in schedule.rows[comm.rank]:
        if action.kind == "F":
            x, y = _batch(action.micro_batch)
            x = x if schedule.is_first(action.stage) else torch.empty_like(x)
            loss = _loss_for(y, micro_batches)
            reference.do_forward(comm, schedule, action, modules[action.stage], saved, x, loss)
        else:
            begun, held = len(comm.trace.log), set(saved)
            fn(comm, schedule, action, saved)
            taken.append((action, sorted(held - set(saved))))
            backwards += [e.nbytes for e in comm.trace.events[begun:] if e.op == "send"]
    grads = {
        stage: {name: None if p.grad is None else p.grad.numpy().copy() for name, p in module.named_parameters()}
        for stage, module in modules.items()
    }
    return _Ran(grads, taken, len(backwards), sum(backwards))


def _loss_for(y: Tensor, micro_batches: int) -> Callable[[Tensor], Tensor]:
    """Return f(output) -> the loss of a micro-batch, divided so that the losses of all micro-batches add up."""
    return lambda output: mse_loss(output, y) / micro_batches


def sequential_gradients(schedule: Schedule, micro_batches: Iterable[int]) -> list[dict[str, np.ndarray]]:
    """Return {stage: {parameter: gradient}} of the sequential model, for those micro-batches."""
    modules = [_layers_of(part) for part in range(schedule.stages)]
    for i in micro_batches:
        x, y = _batch(i)
        _loss_for(y, schedule.micro_batches)(torch.nn.Sequential(*modules)(x)).backward()
    return [{name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None} for module in modules]


def _check_do_backward(fn: Answer, runner: Runner = None) -> Passed:
    def where(p: int, name: str, m: int) -> str:
        return f"{WHERE.get(name, '')}{_case_of(p, m)},"

    def judge(run: Results, where: str, name: str, m: int) -> None:
        _check_step(run, where if where.endswith(",") else f"{where},", name, m)

    in_all_cases(fn, _step, STEPPED, where, judge, _neighbor_wrong)
    p, name, m = STEPPED[1]
    run = simulate(p, _step, fn, name, m, where=_case_of(p, m))
    facts = [
        "gradients: equal to the sequential model's, to 1e-10, in GPipe and in GEMS",
        f"messages: {m} from each of {p - 1} ranks, {run[1].nbytes} bytes, one for each micro-batch",
    ]
    there = engine_facts(runner, judge, _step, fn, name, m)
    return Passed(*facts, *([ALONE] if " 1 MPI rank" in str(there) else there), run=run)


def _neighbor_wrong(broken: Broken, where: str, name: str, m: int) -> Reason | None:
    """Return `broken`, about the neighbor if it goes wrong only when stages run the other way."""
    if name != GEMS:
        return None
    return f"""neighbor: Right in GPipe, but not in GEMS (further below), whose second replica runs from the last rank
        to the first. {full_stop(broken.message)} schedule.rank_of(stage) is the rank of each stage."""


def _check_step(run: Results, where: str, name: str, m: int) -> None:
    """Raise Broken unless every gradient is the sequential model's, nothing is kept, and no message is sent in vain."""
    schedule = _plan_of(name, len(run), m)
    events = list(getattr(run, "events", ()))
    for stage in sorted((s for ran in run for s in ran.grads), key=lambda s: -(s % schedule.stages)):
        rank = schedule.rank_of(stage)
        mine = [i for i in range(schedule.micro_batches) if schedule.replica_of(i) == schedule.replica(stage)]
        right = sequential_gradients(schedule, mine)[stage % schedule.stages]
        for param, got in run[rank].grads[stage].items():
            if got is None or not exactly(got, right[param]):
                raise because(_explain(got, param, stage, mine, schedule), where)
    if events:
        check_waits(events, len(run))
    if waits := in_barriers(events):
        raise Broken(f"traffic: {where} the gradients are right, but {waits}")
    for rank, ran in enumerate(run):
        for action, taken in ran.taken:
            if taken != [(action.stage, action.micro_batch)]:
                raise because(_wrongly_taken(rank, action, taken), f"{where} the gradients are right, but")
        needed = sum(not schedule.is_first(a.stage) for a in schedule.rows[rank] if a.kind == "B")
        if ran.sent != needed:
            raise Broken(f"""traffic: {where} the gradients are right, but rank {rank} sends
                {counted(ran.sent, "message")} in its backwards and {needed} are enough, one per micro-batch.""")


def _wrongly_taken(rank: int, action: Action, taken: list[tuple[int, ...]]) -> Reason:
    """Return the Reason for a backward that left the wrong things in `saved`."""
    key = action.stage, action.micro_batch
    if not taken:
        return f"""memory: `saved` of rank {rank} still holds the activations of {key} after {action}. Take the entry
            out: saved.pop(key)."""
    return f"""micro-batch: in {action} rank {rank} takes {", ".join(map(str, taken))} out of `saved`, and not {key}.
        With different orders on the ranks, gradients would meet the wrong activations."""


def _explain(got: np.ndarray | None, name: str, stage: int, mine: list[int], schedule: Schedule) -> Reason:
    """Return the Reason for a gradient of `stage` that is not the sequential model's."""
    m, part = schedule.micro_batches, stage % schedule.stages
    if got is None:
        return f"""weights: stage {stage} has no gradient for {name}: torch.autograd.grad returns gradients, and only
            torch.autograd.backward leaves them in .grad of the parameters, for the optimizer."""
    right = sequential_gradients(schedule, mine)[part][name]
    flat = got.reshape(-1), right.reshape(-1)
    found = first_wrong(f"the gradient of {name}{{}} of stage {stage}", *flat, np.isclose(*flat, 1e-10, 1e-10)) + "."
    for factor, why in ((m, "multiplied by"), (1 / m, "divided by")):
        if m > 1 and exactly(got, right * factor):
            return f"scale: {found} It was {why} {m}, the number of micro-batches: the losses are divided already."
    for which in (mine[0], mine[-1]):
        if len(mine) > 1 and exactly(got, sequential_gradients(schedule, [which])[part][name]):
            return f"accumulate: {found} That is micro-batch {which} alone: all micro-batches add up in .grad."
    return f"""gradient: {found} Later stages are right. So stage {stage} did not begin with the gradient of its own
        output: did stage {stage + 1} send something else, or did you not use what came?"""


def _drawn(name: str) -> Drawing:
    return Drawing("still", data=lambda: build(name, 4, 8))


EXERCISES = (
    Exercise("10.1", "GPipe: all forwards, then all backwards", gpipe, 2, _check_gpipe, picture=_drawn("gpipe")),
    Exercise(
        "10.2", "1F1B: a backward as soon as there is one", one_f_one_b, 2, _check_one_f_one_b, picture=_drawn("1f1b")
    ),
    Exercise(
        "10.3",
        "ZB-H1: weights fill the bubble",
        zero_bubble_h1,
        3,
        _check_zero_bubble_h1,
        picture=_drawn("zero_bubble_h1"),
    ),
    Exercise(
        "10.4",
        "the backward of one micro-batch through one stage",
        reference.do_backward,
        3,
        _check_do_backward,
        picture=Drawing("traffic", "Activations to the next rank, gradients to the one before"),
    ),
    Exercise("10.6", "cut a model into stages that cost the same", partition, 2, _check_partition),
)
