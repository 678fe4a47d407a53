"""A pipeline schedule as data: which rank does what, in which order.

A model is cut into stages, a batch into micro-batches. A schedule says in which order each rank works on them, and
nothing about when: times follow from the order (evaluation.py), and messages follow from the stages' neighbors.
"""

from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True)
class Schedule:
    """One step of a pipeline.

    name:          "1f1b"
    ranks, stages: of the pipeline; of one model. A rank with v chunks has v of the `stages` = v * ranks.
    micro_batches: into which the batch is cut, m.
    replicas:      whole models that the ranks hold; replica k has micro-batches k, k + replicas, ..., and its stages
                   are numbered k * stages to (k + 1) * stages - 1.
    rows:          rows[r] is a tuple of the Actions of rank r, in order.
    """

    name: str
    ranks: int
    stages: int
    micro_batches: int
    replicas: int
    rows: tuple

    def __str__(self) -> str:
        return compact(self)

    @property
    def chunks(self) -> int:
        """How many stages of one model a rank holds."""
        return self.stages // self.ranks

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
        after. The gradient of weights needs the gradient of the input, which leaves the output's gradient behind.
        """
        stage, kind, micro_batch = action
        if kind == "W":
            return [(stage, "I", micro_batch)]
        if kind == "F":
            return [] if self.is_first(stage) else [(stage - 1, "F", micro_batch)]
        needed = [(stage, "F", micro_batch)]
        if not self.is_last(stage):
            needed.append((stage + 1, "BI", micro_batch))
        return needed


def require_schedule(value: Schedule) -> None:
    """Raise TypeError unless `value` is a Schedule."""
    if not isinstance(value, Schedule):
        raise TypeError(f'a Schedule is needed, got {value!r:.40}: schedules.build("1f1b", 4, 8) makes one')
