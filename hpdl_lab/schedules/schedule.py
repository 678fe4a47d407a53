"""A pipeline schedule as data: which rank does what, in which order.

A model is cut into stages, a batch into micro-batches. A schedule says in which order each rank works on them, and
nothing about when: times follow from the order (evaluation.py), and messages follow from the stages' neighbors.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from .printing import compact

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Action(NamedTuple):
    """What a rank does without a pause: one stage, one micro-batch. "2F5" is stage 2's forward of micro-batch 5.

    kind: "F" forward, "B" the whole backward, or its halves: "I" the gradient of the stage's input, which the stage
    before waits for, and "W" the gradients of its weights, for which nobody waits. torch.distributed.pipelining has
    the same letters.
    """

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Pair(NamedTuple):
    """A forward and the whole backward of another micro-batch, done as one: while one communicates, the other computes.

    They begin when what both need is there, and what both make is sent when both are done. Written as torch writes it.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


def apart(row: Iterable[Action | Pair]) -> tuple[tuple[Action, ...], frozenset[Action]]:
    """(the Actions of a row, those of them that are the forward of a Pair)."""
    parts = [part if isinstance(part, Pair) else (part,) for part in row]
    return tuple(chain.from_iterable(parts)), frozenset(part[0] for part in parts if len(part) == 2)


@dataclass(frozen=True)
class Schedule:
    """One step of a pipeline.

    name:          "1f1b"
    ranks, stages: of the pipeline; of one model. A rank with v chunks has v of the `stages` = v * ranks.
    micro_batches: into which the batch is cut, m.
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
    rows: tuple
    paired: frozenset = frozenset()

    @classmethod
    def of(cls, name: str, stages: int, micro_batches: int, replicas: int, rows: Iterable[Iterable]) -> "Schedule":
        """The Schedule of rows of Actions and Pairs; stages: of one model."""
        found = [apart(row) for row in rows]
        paired = frozenset(chain.from_iterable(forwards for _, forwards in found))
        return cls(name, len(found), stages, micro_batches, replicas, tuple(row for row, _ in found), paired)

    def __str__(self) -> str:
        return compact(self)

    @property
    def chunks(self) -> int:
        """How many stages of one model a rank holds."""
        return self.stages // self.ranks

    @cached_property
    def partner(self) -> dict[Action, Action]:
        """{the forward of a pair: its backward}."""
        return {a: b for row in self.rows for a, b in pairwise(row) if a in self.paired}

    @cached_property
    def _ranks_of_stages(self) -> dict[int, int]:
        return {action.stage: rank for rank, row in enumerate(self.rows) for action in row}

    def rank_of(self, stage: int | None) -> int:
        """The rank that holds `stage`. Raises: ValueError for None, which is before the first and after the last."""
        if stage in self._ranks_of_stages:
            return self._ranks_of_stages[stage]
        raise ValueError(
            f"no rank has stage {stage}: there is none before the first, and none after the last, whose output is the "
            "loss"
        )

    def stages_of(self, rank: int) -> list[int]:
        """The stages that `rank` holds, ascending."""
        return sorted(stage for stage, owner in self._ranks_of_stages.items() if owner == rank)

    def replica(self, stage: int) -> int:
        """Which of the replicas `stage` belongs to."""
        return stage // self.stages

    def replica_of(self, micro_batch: int) -> int:
        """The replica that works on `micro_batch`."""
        return micro_batch % self.replicas

    def is_first(self, stage: int) -> bool:
        """Whether `stage` takes the batch itself."""
        return stage % self.stages == 0

    def is_last(self, stage: int) -> bool:
        """Whether `stage` computes the loss."""
        return stage % self.stages == self.stages - 1

    def previous(self, stage: int) -> int | None:
        """The stage that sends its output to `stage`; None for the first."""
        return None if self.is_first(stage) else stage - 1

    def next(self, stage: int) -> int | None:
        """The stage that takes the output of `stage`; None for the last."""
        return None if self.is_last(stage) else stage + 1

    def needs(self, action: Action) -> list[tuple[int, str, int]]:
        """What must be done before `action`, as (stage, kinds, micro-batch): one of those kinds is enough.

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
