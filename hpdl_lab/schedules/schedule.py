"""A pipeline schedule as data: which rank does what, in which order.

A model is cut into stages, a batch into micro-batches. A schedule says in which order each rank works on them, and
nothing about when: times follow from the order (evaluation.py), and messages follow from the stages' neighbors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Action(NamedTuple):
    """The work of a rank on one stage and one micro-batch. "2F5" is stage 2's forward of micro-batch 5.

    kind: "F" forward, "B" the whole backward, or its halves: "I" the gradient of the stage's input, for which the
    stage before waits, and "W" the gradients of its weights, for which none waits. torch.distributed.pipelining has
    the same letters.
    """

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Pair(NamedTuple):
    """A forward and the whole backward of another micro-batch, done as one: while one communicates, the other computes.

    They begin when the needs of both are there, and their results are sent when both are done. Written as in torch.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


def apart(row: Iterable[Action | Pair]) -> tuple[tuple[Action, ...], frozenset[Action]]:
    """Return (the Actions of a row, the forwards of its Pairs)."""
    parts = [part if isinstance(part, Pair) else (part,) for part in row]
    return tuple(chain.from_iterable(parts)), frozenset(part[0] for part in parts if len(part) == 2)


@dataclass(frozen=True)
class Schedule:
    """The order of actions of a pipeline in a step.

    name:          "1f1b"
    ranks, stages: of the pipeline; of one model. A rank with v chunks has v of the `stages` = v * ranks.
    micro_batches: m, the parts of the batch.
    replicas:      whole models that the ranks hold; replica k has micro-batches k, k + replicas, ..., and its stages
                   are numbered k * stages to (k + 1) * stages - 1.
    rows:          rows[r] is a tuple of the Actions of rank r, in order.
    paired:        the forwards that overlap with the backward that follows in their row: see Pair.
    """

    name: str
    ranks: int
    stages: int
    micro_batches: int
    replicas: int
    rows: tuple[tuple[Action, ...], ...]
    paired: frozenset[Action] = frozenset()

    @classmethod
    def of(
        cls, name: str, stages: int, micro_batches: int, replicas: int, rows: Iterable[Iterable[Action | Pair]]
    ) -> Schedule:
        """Return the Schedule of rows of Actions and Pairs; stages: of one model."""
        found = [apart(row) for row in rows]
        paired = frozenset(chain.from_iterable(forwards for _, forwards in found))
        return cls(name, len(found), stages, micro_batches, replicas, tuple(row for row, _ in found), paired)

    def __str__(self) -> str:
        return compact(self)

    @property
    def chunks(self) -> int:
        """Number of stages of one model that a rank holds."""
        return self.stages // self.ranks

    @cached_property
    def partner(self) -> dict[Action, Action]:
        """Backward of each pair, by its forward."""
        return {a: b for row in self.rows for a, b in pairwise(row) if a in self.paired}

    @cached_property
    def _ranks_of_stages(self) -> dict[int, int]:
        return {action.stage: rank for rank, row in enumerate(self.rows) for action in row}

    def rank_of(self, stage: int | None) -> int:
        """Return the rank that holds `stage`. Raises: ValueError for None, before the first and after the last."""
        if stage in self._ranks_of_stages:
            return self._ranks_of_stages[stage]
        raise ValueError(
            f"no rank has stage {stage}: there is none before the first, and none after the last, whose output is the "
            "loss"
        )

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that `rank` holds, ascending."""
        return sorted(stage for stage, owner in self._ranks_of_stages.items() if owner == rank)

    def replica(self, stage: int) -> int:
        """Return the number of the replica that `stage` belongs to."""
        return stage // self.stages

    def replica_of(self, micro_batch: int) -> int:
        """Return the replica that works on `micro_batch`."""
        return micro_batch % self.replicas

    def is_first(self, stage: int) -> bool:
        """Return True if `stage` takes the batch itself."""
        return stage % self.stages == 0

    def is_last(self, stage: int) -> bool:
        """Return True if `stage` computes the loss."""
        return stage % self.stages == self.stages - 1

    def previous(self, stage: int) -> int | None:
        """Return the stage that sends its output to `stage`; None for the first."""
        return None if self.is_first(stage) else stage - 1

    def next(self, stage: int) -> int | None:
        """Return the stage that takes the output of `stage`; None for the last."""
        return None if self.is_last(stage) else stage + 1

    def needs(self, action: Action) -> list[tuple[int, str, int]]:
        """Return the needs of `action` as (stage, kinds, micro-batch): one of the kinds must be done before.

        Forward needs the forward of the stage before. Backward needs its own forward and the backward of the stage
        after. The gradient of weights needs the gradient of the input, which leaves the output's gradient behind. The
        forward of a pair also needs what its backward needs.
        """
        both = self.needs(self.partner[action]) if action in self.partner else []
        stage, kind, micro_batch = action
        if kind == "W":
            return [(stage, "I", micro_batch)]
        if kind == "F":
            return both if self.is_first(stage) else [(stage - 1, "F", micro_batch), *both]
        needed = [(stage, "F", micro_batch)]
        if not self.is_last(stage):
            needed.append((stage + 1, "BI", micro_batch))
        return needed


def require_schedule(value: Schedule) -> None:
    """Raise TypeError unless `value` is a Schedule."""
    if not isinstance(value, Schedule):
        raise TypeError(f'a Schedule is needed, got {value!r:.40}: schedules.build("1f1b", 4, 8) makes one')


# -- as text, as DualPipe writes its steps ----------------------------------------------------------------------------

LONGEST_BLOCK = 6  # actions that are written once with a number of repetitions before them


def compact(schedule: Schedule) -> str:
    """Return one line per rank: "rank 0: 3F 5FB 3B" is 3 forwards, 5 times a forward and a backward, 3 backwards.

    Micro-batches are left out: each kind takes them in turn. Ranks with several stages number them: F0, F1. Actions
    that overlap stand together: F0&B1.
    """
    lines = []
    for rank, row in enumerate(schedule.rows):
        local = {stage: index for index, stage in enumerate(sorted({action.stage for action in row}))}
        symbols: list[str] = []
        for action in row:
            symbol = f"{action.kind}{local[action.stage]}" if len(local) > 1 else action.kind
            if symbols and symbols[-1].endswith("&"):
                symbols[-1] += symbol
            else:
                symbols.append(symbol + "&" * (action in schedule.paired))
        lines.append(f"rank {rank}: {' '.join(_shortest(symbols))}")
    return "\n".join(lines)


def _shortest(symbols: list[str]) -> list[str]:
    """Return `symbols` in as few letters as blocks with repetitions allow: F F F F B F B B B -> ["3F", "2FB", "2B"].

    Found from the end: best[i] is (length, repetitions, the block at i, the index of the next one).
    """
    n = len(symbols)
    best = [(0, 0, "", n)] * (n + 1)
    for i in reversed(range(n)):
        candidates = []
        for long in range(1, min(LONGEST_BLOCK, n - i) + 1):
            part, times, j = symbols[i : i + long], 0, i
            block = "".join(part)
            while symbols[j : j + long] == part:
                times, j = times + 1, j + long
                text = block if times == 1 else f"{times}{block}"
                candidates.append((best[j][0] + 1 + long + block.count("&"), best[j][1] + times, text, j))
        best[i] = min(candidates)
    texts, i = [], 0
    while i < n:
        texts.append(best[i][2])
        i = best[i][3]
    return texts
