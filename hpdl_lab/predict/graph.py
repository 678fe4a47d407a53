"""The begin and the end of every task of a graph: arithmetic, without ranks.

    row "rank 0"   |-- f0 --|-- f1 --|      |-- b1 --|-- b0 --|      a row does its tasks in order
    row "rank 1"            |-- f0' --|-- b0' --|
    links                            (message)                       one message at a time, in the order of readiness

A task begins when what it needs has ended and all its links are free. Times may be ints, floats or fractions: nothing
but sums and comparisons are done with them.
"""

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

from ..comm.network.links import book

FIRST = -1  # the priority of what takes no link: before all messages that are ready at the same time


class Need(NamedTuple):
    """A task that must have ended. far: and `delay` after that, see TaskGraph.times.

    priority: at equal times the task with the least one goes first; a task has it from the need that ends last.
    """

    task: int
    far: bool = False
    priority: int = FIRST


class TaskGraph:
    """Tasks, numbered in the order in which they are added. Their costs may be changed without a new graph."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.latency: list[float] = []
        self.needs: list[tuple[Need, ...]] = []
        self.rows: list[Hashable] = []
        self.links: list[Sequence[int]] = []

    def add(
        self,
        seconds: float = 0,
        needs: Iterable[Need] = (),
        row: Hashable = None,
        links: Sequence[int] = (),
        latency: float = 0,
    ) -> int:
        """Add a task that takes latency + seconds; returns its number.

        Args:    needs: of tasks of any number.
                 row: what does its tasks one after the other, in the order of numbers; None: nothing does.
                 links: of a message. It holds the first and the last until it has ended, those between for `seconds`.
        """
        self.seconds.append(seconds)
        self.latency.append(latency)
        self.needs.append(tuple(needs))
        self.rows.append(row)
        self.links.append(links)
        return len(self.seconds) - 1

    @cached_property
    def successors(self) -> list[list[tuple[int, bool, int]]]:
        """The tasks that wait for each task, also in its row: (task, far, priority)."""
        successors: list[list[tuple[int, bool, int]]] = [[] for _ in self.seconds]
        before: dict[Hashable, int] = {}
        for task, (needs, row) in enumerate(zip(self.needs, self.rows, strict=True)):
            for source, far, priority in needs:
                successors[source].append((task, far, priority))
            if row is not None:
                if row in before:
                    successors[before[row]].append((task, False, FIRST))
                before[row] = task
        return successors

    @cached_property
    def order(self) -> list[int]:
        """The tasks, each behind what it needs; without tasks that wait for each other, and for these."""
        waiting = self._waiting()
        order = [task for task, count in enumerate(waiting) if not count]
        for task in order:  # which grows
            for successor, _, _ in self.successors[task]:
                waiting[successor] -= 1
                if not waiting[successor]:
                    order.append(successor)
        return order

    def _waiting(self) -> list[int]:
        waiting = [0] * len(self.seconds)
        for successors in self.successors:
            for successor, _, _ in successors:
                waiting[successor] += 1
        return waiting

    def times(
        self, seconds: Sequence[float] | None = None, delay: float = 0, speeds: Mapping[Any, float] | None = None
    ) -> tuple[list[float], list[float]]:
        """Return (begins, ends) of all tasks.

        Args:    seconds: of every task, default as they were added; delay: see Need.far.
                 speeds: {row: its speed while other rows are busy, too}, of rows that slow each other down; default 1.
                 A row with a speed of 0 stands still meanwhile, one below 0 loses what it has done; not all may.
        Raises:  ValueError if tasks wait for each other.
        """
        if len(self.order) < len(self.seconds):
            raise ValueError(
                f"{len(self.seconds) - len(self.order):,} of {len(self.seconds):,} tasks wait for each other"
            )
        seconds = self.seconds if seconds is None else seconds
        if speeds is not None and any(speed != 1 for speed in speeds.values()):
            return self._side_by_side(seconds, speeds)
        return self._by_readiness(seconds, delay) if any(self.links) else self._in_order(seconds, delay)

    def _in_order(self, seconds: Sequence[float], delay: float) -> tuple[list[float], list[float]]:
        """Return the times of tasks without links, which take nothing from each other: each is behind its needs."""
        begins: list[float] = [0] * len(seconds)
        ends: list[float] = [0] * len(seconds)
        clocks: dict[Hashable, float] = dict.fromkeys(self.rows, 0)
        needs, rows, latency = self.needs, self.rows, self.latency
        for task in self.order:
            row = rows[task]
            begin: float = 0 if row is None else clocks[row]
            for source, far, _ in needs[task]:
                there = ends[source] + delay if far else ends[source]
                if there > begin:
                    begin = there
            begins[task] = begin
            ends[task] = clocks[row] = begin + latency[task] + seconds[task]
        return begins, ends

    def _by_readiness(self, seconds: Sequence[float], delay: float) -> tuple[list[float], list[float]]:
        """Return the times of messages that take links in the order in which they become ready, then by priority."""
        begins: list[float] = [0] * len(seconds)
        ends: list[float] = [0] * len(seconds)
        waiting = self._waiting()
        keys: list[tuple[float, int]] = [(0, FIRST)] * len(seconds)
        free: defaultdict[int, float] = defaultdict(int)
        ready: list[tuple[float, int, int]] = [(0, FIRST, task) for task, count in enumerate(waiting) if not count]
        while ready:
            when, _, task = heapq.heappop(ready)
            begin, end = when, when + self.latency[task] + seconds[task]
            if self.links[task]:
                begin, end = book(free, self.links[task], self.latency[task], seconds[task], when)
            begins[task], ends[task] = begin, end
            for successor, far, priority in self.successors[task]:
                key = (end + delay, priority) if far else (end, priority)
                if key > keys[successor]:
                    keys[successor] = key
                waiting[successor] -= 1
                if not waiting[successor]:
                    heapq.heappush(ready, (*keys[successor], successor))
        return begins, ends

    def _side_by_side(self, seconds: Sequence[float], speeds: Mapping[Any, float]) -> tuple[list[float], list[float]]:
        """Return the times of rows that slow each other down, without links, latencies and delays."""
        begins, ends, left = [0.0] * len(seconds), [0.0] * len(seconds), list(seconds)
        waiting, now = self._waiting(), 0.0
        running = [task for task, count in enumerate(waiting) if not count]
        while running:
            rates = [speeds.get(self.rows[task], 1.0) if len(running) > 1 else 1.0 for task in running]
            needed = [left[task] / rate if rate > 0 else inf for task, rate in zip(running, rates, strict=True)]
            passed = min(needed)
            now += passed
            for task, rate in zip(running, rates, strict=True):
                left[task] -= passed * rate
            for task in [task for task, more in zip(running, needed, strict=True) if more == passed]:
                ends[task] = now
                running.remove(task)
                for successor, _, _ in self.successors[task]:
                    waiting[successor] -= 1
                    if not waiting[successor]:
                        begins[successor] = now
                        running.append(successor)
        return begins, ends
