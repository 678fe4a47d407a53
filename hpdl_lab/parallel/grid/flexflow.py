"""FlexFlow: every operator of a graph is split in its own way, and a Markov chain looks for the fastest step.

    operators    conv ------> conv ------> dense ------> dense        data parallel splits samples everywhere, tensor
    samples        4            4            1             1          parallel features; here each operator has its own
    features       1            1            4             2          numbers, and the ranks that have its blocks
    ranks       0 1 2 3      0 1 2 3      0 1 2 3         0 1

A step is a graph of tasks: the blocks that ranks compute, the messages between blocks that share samples, and the sums
of parameters' gradients. Rows (ranks, links) do theirs in the order of operators. A block needs its samples in their
whole width. Backward is counted with its forward: three times the arithmetic, and each message once more the other way.

The chain changes one operator at a time, so that most of the timeline stays as it is: `Timeline.change` times only what
is reached by the change, and agrees with predict.graph, which times everything.

Ref: Jia et al. 2018 (FlexFlow), arXiv:1807.05358; Metropolis et al. 1953.
"""

import heapq
import itertools
import random
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ...comm.network import Switch
from ...predict.graph import Graph, Need
from ...units import require_int, require_number

ITEMSIZE = 4
PASSES, WAYS = 3, 2  # a forward and a backward of twice its arithmetic; messages there and their gradients back
SEND, COMPUTE, SUM = range(3)  # kinds of tasks, in the order of an operator's
Key = tuple[int, int, int, int, int]  # (operator, kind, ...): what a task needs has a smaller one


class Operator(NamedTuple):
    """What computes (samples, features) from all features of its inputs. inputs: numbers of operators before it.

    flops: of a forward; nbytes: of its parameters.
    """

    name: str
    inputs: tuple[int, ...]
    samples: int
    features: int
    flops: float
    nbytes: float


class Split(NamedTuple):
    """How an operator is split: samples x features blocks, on as many ranks from `first` on, features fastest."""

    samples: int
    features: int
    first: int = 0

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.samples * self.features)

    def rows(self, block: int, samples: int) -> tuple[float, float]:
        """Of a block, of `samples` in all."""
        i = block // self.features
        return i * samples / self.samples, (i + 1) * samples / self.samples


class Task(NamedTuple):
    """row: what does its tasks one after the other: a rank, a link (from, to), or the sums of a rank."""

    seconds: float
    needs: tuple[Key, ...]
    row: Hashable


class Found(NamedTuple):
    """The fastest splits of a search, s of their step, and of the step that each change has led to, kept or not."""

    splits: tuple[Split, ...]
    seconds: float
    tried: tuple[float, ...] = ()


def splits_of(operator: Operator, ranks: int) -> list[Split]:
    """Every Split into equal blocks on a part of the ranks: on as many as divide them, from a multiple of that on."""
    return [
        Split(samples, size // samples, first)
        for size in range(1, ranks + 1)
        if ranks % size == 0
        for samples in range(1, size + 1)
        if size % samples == operator.samples % samples == operator.features % (size // samples) == 0
        for first in range(0, ranks, size)
    ]


def tasks_of(k: int, operators: Sequence[Operator], splits: Sequence[Split], network: Switch) -> Iterator[tuple]:
    """(Key, Task) of operator k: the messages to it, its blocks, and the sums of its gradients."""
    operator, split = operators[k], splits[k]
    seconds = PASSES * operator.flops / len(split.ranks) / network.flops_per_s
    for block, rank in enumerate(split.ranks):
        needs: list[Key] = []
        begin, end = split.rows(block, operator.samples)
        for source in operator.inputs:
            theirs = splits[source]
            for other, sender in enumerate(theirs.ranks):
                first, last = theirs.rows(other, operator.samples)
                shared = min(end, last) - max(begin, first)
                made = (source, COMPUTE, other, 0, 0)
                if shared <= 0:
                    continue
                if sender != rank:
                    nbytes = shared * operators[source].features / theirs.features * ITEMSIZE
                    message = (k, SEND, source, other, block)
                    yield message, Task(WAYS * (network.alpha + nbytes * network.beta), (made,), (sender, rank))
                    made = message
                needs.append(made)
        yield (k, COMPUTE, block, 0, 0), Task(seconds, tuple(needs), rank)
    if operator.nbytes and split.samples > 1:
        part, hops = operator.nbytes / split.features / split.samples, 2 * (split.samples - 1)  # of a ring's chunks
        for j in range(split.features):
            blocks = tuple((k, COMPUTE, i * split.features + j, 0, 0) for i in range(split.samples))
            task = Task(hops * (network.alpha + part * network.beta), blocks, ("sums", split.first + j))
            yield (k, SUM, j, 0, 0), task


def graph_of(operators: Sequence[Operator], splits: Sequence[Split], network: Switch) -> tuple[Graph, list[Key]]:
    """(the Graph of a whole step, the Key of each of its tasks)."""
    tasks = dict(task for k in range(len(operators)) for task in tasks_of(k, operators, splits, network))
    keys, graph = sorted(tasks), Graph()
    number = {key: n for n, key in enumerate(keys)}
    for key in keys:
        seconds, needs, row = tasks[key]
        graph.add(seconds, [Need(number[need]) for need in needs], row)
    return graph, keys


def seconds_of(operators: Sequence[Operator], splits: Sequence[Split], network: Switch) -> float:
    """s of a step, all of it timed."""
    return max(graph_of(operators, splits, network)[0].times()[1])


class Timeline:
    """When each task of a step ends; a change of one operator times again only what it reaches.

    ends: {Key: s}; timed: how many tasks have been timed so far.
    """

    def __init__(self, operators: Sequence[Operator], splits: Sequence[Split], network: Switch) -> None:
        self.operators, self.splits, self.network = operators, list(splits), network
        self.users = [[k for k, o in enumerate(operators) if source in o.inputs] for source in range(len(operators))]
        self.tasks: list[dict[Key, Task]] = [{} for _ in operators]
        self.needed_by: defaultdict[Key, set[Key]] = defaultdict(set)
        self.rows: defaultdict[Hashable, list[Key]] = defaultdict(list)  # in order
        self.ends: dict[Key, float] = {}
        self.timed = 0
        self._renew(range(len(operators)))

    @property
    def seconds(self) -> float:
        return max(self.ends.values())

    def change(self, k: int, split: Split) -> float:
        """Split operator k like this; returns s of the step."""
        self.splits[k] = split
        self._renew([k, *self.users[k]])
        return self.seconds

    def _renew(self, operators: Iterable[int]) -> None:
        """Put the tasks of these operators in the place of those that they had."""
        reached: set[Key] = set()
        for k in operators:
            old, new = self.tasks[k], dict(tasks_of(k, self.operators, self.splits, self.network))
            self.tasks[k] = new
            for key in [key for key in old if old[key] != new.get(key)]:
                reached |= self._remove(key, old[key])
            for key in [key for key in new if old.get(key) != new[key]]:
                reached |= self._insert(key, new[key])
        self._time(reached)

    def _remove(self, key: Key, task: Task) -> set[Key]:
        """Take out a task; returns those that it reaches."""
        row = self.rows[task.row]
        place = bisect_left(row, key)
        del row[place], self.ends[key]
        for need in task.needs:
            self.needed_by[need].discard(key)
        return {*row[place : place + 1], *self.needed_by[key]}

    def _insert(self, key: Key, task: Task) -> set[Key]:
        row = self.rows[task.row]
        insort(row, key)
        for need in task.needs:
            self.needed_by[need].add(key)
        return {key, *self._behind(key, row)}

    def _behind(self, key: Key, row: list[Key]) -> list[Key]:
        """[the next task of its row], or []."""
        place = bisect_left(row, key) + 1
        return row[place : place + 1]

    def _time(self, reached: set[Key]) -> None:
        """Time these tasks, and those for which their ends matter: smaller keys first, as needs and rows go upward."""
        waiting = sorted(reached)
        while waiting:
            key = heapq.heappop(waiting)
            if waiting and waiting[0] == key or (task := self.tasks[key[0]].get(key)) is None:
                continue  # once is enough; or it has been taken out
            row = self.rows[task.row]
            place = bisect_left(row, key)
            before = [*task.needs, *row[max(place - 1, 0) : place]]
            end = max((self.ends[other] for other in before), default=0) + task.seconds
            self.timed += 1
            if self.ends.get(key) != end:
                self.ends[key] = end
                for other in (*self.needed_by[key], *row[place + 1 : place + 2]):
                    heapq.heappush(waiting, other)


def exhaustive(operators: Sequence[Operator], ranks: int, network: Switch) -> Found:
    """The fastest of all splits, each step timed as a whole."""
    choices = itertools.product(*(splits_of(operator, ranks) for operator in operators))
    seconds, splits = min((seconds_of(operators, splits, network), splits) for splits in choices)
    return Found(splits, seconds)


def metropolis(
    operators: Sequence[Operator],
    ranks: int,
    network: Switch,
    steps: int = 1000,
    seed: int = 0,
    temperature: float = 0.05,
) -> Found:
    """Look for the fastest splits by a Markov chain that begins with data parallelism.

    It proposes another split of one operator, both drawn at random, and goes there if that is no slower; if it takes f
    times as long, with the probability f^(-1/T). So it can leave what is best only in its neighborhood.

    Args:    temperature: T, 0.05: a step that is 10% slower is taken in 15 of 100 cases. seed: of what is drawn.
    Returns: Found, the fastest that it came by.
    Raises:  ValueError, a sentence with numbers, where ranks do not divide the samples.
    """
    require_int("steps", steps, 0)
    require_number("the temperature", temperature, above=0)
    if uneven := [operator for operator in operators if operator.samples % require_int("ranks", ranks, 1)]:
        raise ValueError(f"{uneven[0].samples} samples of {uneven[0].name} cannot be shared equally by {ranks} ranks")
    draw, choices = random.Random(seed), [splits_of(operator, ranks) for operator in operators]
    timeline = Timeline(operators, [Split(ranks, 1)] * len(operators), network)
    now, tried = timeline.seconds, []
    best = Found(tuple(timeline.splits), now)
    for _ in range(steps):
        k = draw.randrange(len(operators))
        before = timeline.splits[k]
        seconds = timeline.change(k, draw.choice(choices[k]))
        tried.append(seconds)
        if seconds <= now or draw.random() < (now / seconds) ** (1 / temperature):
            now = seconds
            best = min(best, Found(tuple(timeline.splits), now), key=lambda found: found.seconds)
        else:
            timeline.change(k, before)
    return best._replace(tried=tuple(tried))
