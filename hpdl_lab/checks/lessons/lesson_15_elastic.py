"""Notebook 15: a training that is killed and goes on with other numbers of ranks, compared with one rank."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import cast

import torch
from torch import Tensor

from ...collectives.chunks import bounds
from ...comm import Results
from ...comm.base import Comm
from ...resilience.elastic import Task, make_task, train_elastic
from ...resilience.shards import ITEM, LATEST, Disk, read_latest
from ...units import counted
from ..checkers import because
from ..ranks import capital, simulate, unlike
from ..record import Answer, Broken, Exercise, Passed, Reason

KILLS, WITHIN = 200, 30  # random kills; operations of a life, gradients among them, within which they come
TASKS = (make_task(13, 9, 5), make_task(10, 14, 6), make_task(11, 7, 3))
UNTIL, EVERY = 4, 2  # of a job that is killed
DIGITS = "dtype: They are right to 7 digits, and float64 has 16."
Asking = dict[int, list[int]]  # examples that each rank computes in a step


class _Course:
    """A task on one rank: state (n, 3), rows [w, m, v], examples and mean gradient of each step."""

    def __init__(self, task: Task, steps: int) -> None:
        self.task, state = task, torch.stack([task.start, 0 * task.start, 0 * task.start], dim=1)
        places = [i for epoch in range(steps * task.batch // task.examples + 2) for i in task.order(epoch)]
        self.ids = [places[step * task.batch :][: task.batch] for step in range(steps + 1)]
        self.states, self.means = [state], list[Tensor]()
        for step, ids in enumerate(self.ids):
            self.means.append(task.gradient(state[:, 0], ids) / task.batch)
            state = _updated(task, state, self.means[step], step + 1)
            self.states.append(state)
        self.weights = [state[:, 0] for state in self.states]


def _updated(task: Task, state: Tensor, mean: Tensor, t: int) -> Tensor:
    task.update(state := state.clone(), mean, t)
    return state


class JobLife(Disk):
    """A disk with one start of a job on p ranks; a gradient is two operations: a kill comes before or after it."""

    run: Results | None = None

    def __init__(
        self, course: _Course, last: JobLife | None, p: int, until: int, every: int, kill_at: int | None = None
    ) -> None:
        super().__init__(last.files if last else None, kill_at)
        self.course, self.p, self.until, self.every, self.where = course, p, until, every, f"with {counted(p, 'rank')}"
        self.began, _, shards = read_latest(self.files[LATEST]) if LATEST in self.files else (0, 0, [])
        self.before = len(shards) or p  # ranks that have saved
        self.notes: list[tuple[int, Tensor, list[int] | None]] = []  # rank, weights, examples; None: it returns
        self.commits: list[int] = []  # steps that LATEST has named
        if last:
            died = f"killed on {{}} ({last.killed[0].what} {last.killed[0].name})" if last.killed else "stopped on {}"
            self.where = f"{died.format(counted(last.p, 'rank'))}, then from step {self.began} {self.where}"

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self.commits += [read_latest(self.files[LATEST])[0]] if new == LATEST else []


@dataclass(frozen=True)
class _Asked(Task):
    """A task that notes what a rank asks it for."""

    life: JobLife = field(kw_only=True)

    def gradient(self, weights: Tensor, ids: Sequence[int]) -> Tensor:
        self.life.begin("gradient", "begins")
        self.life.notes.append((cast("Comm", self.life.comm).rank, weights.detach().clone(), list(map(int, ids))))
        total = super().gradient(weights, ids)
        self.life.begin("gradient", "ends")
        return total


def _living(comm: Comm, fn: Answer, life: JobLife) -> None:
    """Run one life of the job on every rank; some ranks have a slow disk."""
    mine = cast("JobLife", life.of(comm, 1e-3 * (1 + (5 * comm.rank + 2) % 3)))
    task = _Asked(**vars(life.course.task), life=mine)
    life.notes.append((comm.rank, fn(comm, mine, task, life.until, life.every), None))


def _live(
    fn: Answer, course: _Course, last: JobLife | None, p: int, until: int, every: int, kill_at: int | None = None
) -> JobLife:
    """Return a life of these arguments, up to its end or to the kill, if it did what one rank would have done."""
    life = JobLife(course, last, p, until, every, kill_at)
    try:
        life.run = simulate(life.p, _living, fn, life, where=life.where)
    except Broken:
        if not life.killed:
            _judge_steps(life)
            raise
    if (step := _judge_steps(life)) != life.until and not life.killed:
        raise Broken(f"until: {capital(life.where)}, the job ends after {step} steps, and until is {life.until}.")
    due = [s for s in range(life.began + 1, life.until + 1) if s % life.every == 0 or s == life.until]
    if life.commits != (due[: len(life.commits)] if life.killed else due):
        raise Broken(f"""saves: {capital(life.where)}, until = {life.until} and every = {life.every}, it saves steps
            {life.commits}, and should save {due}.""")
    most = 3 * ITEM * -(-len(life.course.task.start) // life.p)
    if over := [o for o in life.log if o.nbytes > most and o.what == "write" and o.name.startswith("step-")]:
        raise Broken(f"""memory: {capital(life.where)}, rank {over[0].rank} writes {over[0].nbytes} bytes, and its shard
            has {most}. No rank has room for all moments.""")
    return life


def _judge_steps(life: JobLife) -> int:
    """Return the step that a life came to; raise Broken for the first thing that is not as on one rank."""
    right, step, asked, done = life.course.weights, life.began, Asking(), Asking()
    for rank, weights, ids in life.notes:
        if wrong := unlike(weights, right[0]) if ids is None else "":
            shape = f"All weights have shape {tuple(right[0].shape)}, in float64."
            raise Broken(f"returns: {capital(life.where)}, rank {rank} returned {wrong}. {shape}")
        if asked and not _close(weights, right[step]):
            _judge_ids(life, step, asked)
            step, asked, done = step + 1, {}, asked
        if not _close(weights, right[step]):
            why = _why_update(life, step - 1, done, rank, weights) if done else _why_load(life, weights)
            raise because(why, f"{capital(life.where)}, rank {rank} has wrong weights after {counted(step, 'step')}.")
        if ids is not None and step >= life.until:
            raise Broken(f"until: {capital(life.where)}, rank {rank} computes step {step}. Which step is the last one?")
        if ids is not None:
            asked[rank] = asked.get(rank, []) + ids
    return step


def _judge_ids(life: JobLife, step: int, asked: Asking) -> None:
    """Raise Broken unless the ranks together asked for the examples of this step, in even shares."""
    batch, examples, right = life.course.task.batch, life.course.task.examples, Counter(life.course.ids[step])
    got, resumed, share = Counter(sum(asked.values(), [])), step == life.began > 0, -(-batch // life.p)
    n, most, like = got.total(), max(map(len, asked.values())), [got == Counter(ids) for ids in life.course.ids]
    if got == right and most <= share:
        return
    for wrong, why in (
        (most == batch and n == life.p * batch and set(got) == set(right), "share: Each rank computes all of them."),
        (n > batch, f"batch: A batch has {batch}. Does its size depend on the number of ranks?"),
        (n < batch and step * batch % examples + batch > examples, "epoch: An epoch ends here. What fills the batch?"),
        (n < batch, f"remainder: A batch has {batch}. Which rank computes the others?"),
        (got == right, f"share: One rank computes {most} of them, and even shares have {share} at most."),
        (resumed and like[step - 1], f"again: They belong to step {step - 1}. Is this step in the checkpoint already?"),
        (resumed and like[step + 1], f"skipped: They belong to the next step. When is step {step} computed?"),
        (resumed, "place: At which place was the job when it saved?"),
        (max(got.values()) > max(right.values()), "order: Two ranks compute the same one. Which order has each rank?"),
        ((step + 1) * batch > examples, "epoch: Which examples of the last epoch were left over?"),
        (True, f"order: On one rank, they are {sorted(right)}. What is different here?"),
    ):
        if wrong:
            ids = sorted(got.elements())
            raise because(why, f"{capital(life.where)}, in step {step}, {counted(n, 'example')} are computed: {ids}.")


def _why_load(life: JobLife, weights: Tensor) -> Reason:
    """Return why the first weights of a life differ from its checkpoint."""
    if weights.shape != life.course.weights[0].shape:
        return f"assembled: They have shape {tuple(weights.shape)}. How does a rank get the other weights?"
    if _close(weights, life.course.weights[0]):
        return "load: They are the weights of step 0. What is on the disk?"
    if life.began and _close(weights, life.course.weights[life.began - 1]):
        return f"saved: They are the weights after {counted(life.began - 1, 'step')}. When was the checkpoint saved?"
    if _close(weights, life.course.weights[life.began], 1e-5):
        return DIGITS
    if life.before != life.p:
        return f"moved: {counted(life.before, 'rank')} saved the checkpoint. Which elements does each rank need now?"
    return "load: They are the weights of no step. Where in the checkpoint is each element?"


def _why_update(life: JobLife, step: int, asked: Asking, rank: int, weights: Tensor) -> Reason:
    """Return why an update differs from one rank's, although the examples were the right ones."""
    for state, mean, t, why in _mistakes(life, step, asked):
        if t > 0 and _close(_updated(life.course.task, state, mean, t)[:, 0], weights):
            return why
    old, right = life.course.weights[step : step + 2]
    a, b = bounds(len(right), life.p, rank)
    if _close(weights, right, 1e-5):
        return DIGITS
    if any(_close(weights, torch.cat([x[:a], right[a:b], x[b:]])) for x in (old, 0 * old)):
        return "assembled: Its own shard is right. How does it get the other shards?"
    if step == life.began and life.before != life.p:
        return f"moved: {counted(life.before, 'rank')} saved the checkpoint. Whose moments does each rank have now?"
    return "value: What does Adam's update need, besides the weights?"


def _mistakes(life: JobLife, step: int, asked: Asking) -> Iterator[tuple[Tensor, Tensor, int, Reason]]:
    """Yield known mistakes in an update: state and mean gradient, number of the update, why it is wrong."""
    task, p, state, mean, t = life.course.task, life.p, life.course.states[step], life.course.means[step], step + 1
    since = t - life.began
    for kept, name in (((1, 0, 0), "both moments are"), ((1, 0, 1), "the first is"), ((1, 1, 0), "the second is")):
        for u in (t, since):
            yield state * torch.tensor(kept), mean, u, f"moments: Before this update, {name} zero. Are both saved?"
    for u in (since, step, t + 1):
        yield state, mean, u, f"count: This is Adam's update number {t}, and {u} was given. What is it after a restart?"
    for factor, name in ((task.batch, "the sum of the gradients"), (1 / p, "a part of it")):
        yield state, mean * factor, t, f"mean: Instead of the mean gradient, {name} was used."
    sums = [task.gradient(state[:, 0], asked.get(r, [])) for r in range(p)]
    of_means = torch.stack([g / max(1, len(asked.get(r, []))) for r, g in enumerate(sums)]).mean(dim=0)
    yield state, of_means, t, "mean: It is a mean of the ranks' means. Do all ranks have equally many examples?"
    own = torch.cat([g[slice(*bounds(len(g), p, r))] for r, g in enumerate(sums)])
    yield state, own / task.batch, t, "reduced: Each rank has used the gradient of its own examples only."


def _close(x: Tensor, y: Tensor, within: float = 1e-10) -> bool:
    return x.shape == y.shape and bool(((x - y).abs() <= within).all())


def _check_train_elastic(fn: Answer) -> Passed:
    run: Results | None = None
    for course in (_Course(task, 7) for task in TASKS):
        for p in (1, 2, 3, 4):
            stopped = _live(fn, course, None, p, 5, 3)
            ended = _live(fn, course, stopped, p, 7, 3)
            _live(fn, course, ended, 1 + p % 4, 7, 3)  # there is nothing left to do
            run = stopped.run
    course, rng = _Course(TASKS[0], UNTIL), random.Random(15)
    for kills in count():  # at each operation
        life = _live(fn, course, None, 3, UNTIL, EVERY, kills)
        if not life.killed:
            break
        life = _live(fn, course, life, 2, max([UNTIL - 1, *life.commits]), EVERY)
        _live(fn, course, life, 4, UNTIL, EVERY)
    killed, jobs, last = 0, 0, None
    while killed < KILLS or last:
        kill_at = rng.randrange(WITHIN) if killed < KILLS else None
        life = _live(fn, course, last, rng.randint(1, 4), UNTIL, EVERY, kill_at)
        killed, jobs, last = (killed + 1, jobs, life) if life.killed else (killed, jobs + 1, None)
    return Passed(
        "weights of one rank to 1e-10, each example once per epoch, in even shares, on 1, 2, 3 and 4 simulated ranks",
        f"{kills} kills, at each operation of the disk and before and after each gradient: 3 ranks, then 2, then 4",
        f"{killed} random kills in {counted(jobs, 'job')}, with 1 to 4 ranks in each life",
        run=run,
    )


EXERCISES = (Exercise("15.3", "go on with fewer, then with more", train_elastic, 3, _check_train_elastic),)
