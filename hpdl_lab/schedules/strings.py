"""Schedules as torch.distributed.pipelining writes them: "2F5", a row of the CSV file per rank."""

import csv
import os
import re
from collections.abc import Iterable, Sequence

from .schedule import Action, Pair, Schedule, apart

ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
# Torch adds these to a schedule for its own runtime. Here messages follow from the stages' neighbors.
ADDED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")


def to_strings(schedule: Schedule) -> list[list[str]]:
    """Return one list of strings per rank: [["0F0", "0F1", ...], ["1F0", ...]]; a pair is one string."""
    with_pairs = [[Pair(a, schedule.partner[a]) if a in schedule.partner else a for a in row] for row in schedule.rows]
    seconds = {*schedule.partner.values()}
    return [[str(part) for part in row if part not in seconds] for row in with_pairs]


def from_strings(rows: Iterable[Sequence[str]], name: str = "imported", replicas: int = 1) -> Schedule:
    """Return the Schedule in `rows` of strings: one row per rank, as to_strings and torch write them.

    Empty cells are left out, and so are torch's additions for its messages and shards. Ranks hold the stages that their
    rows name.

    Args:    replicas: whole models among the stages; torch's schedules have one.
    Raises:  ValueError with the position of what is no action, or without any. `validate` finds out if it can run.
    """
    rows = rows if isinstance(rows, str) or not isinstance(rows, Iterable) else list(rows)
    if not isinstance(rows, list) or not all(isinstance(row, list | tuple) for row in rows):
        raise ValueError(
            f"a schedule has one list of actions for each rank, such as [['0F0', '0B0']], got {rows!r:.80}"
        )
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"replicas={replicas!r}: a whole number of at least 1 is needed")
    parsed = [
        [part for cell, text in enumerate(row) for part in parse(text, rank, cell)] for rank, row in enumerate(rows)
    ]
    actions = [action for row in parsed for action in apart(row)[0]]
    if not actions:
        raise ValueError(f"there is no action in {len(parsed)} rows: a schedule has some, such as 0F0")
    stages = max(action.stage for action in actions) + 1
    if stages % replicas:
        raise ValueError(f"{replicas} replicas cannot have equal parts of {stages} stages")
    micro_batches = max(action.micro_batch for action in actions) + 1
    return Schedule.of(name, stages // replicas, micro_batches, replicas, parsed)


def parse(text: str, rank: int, cell: int) -> list[Action | Pair]:
    """Return the content of one cell: nothing, an Action or a Pair."""
    text = str(text or "").strip()
    if not text or ADDED.fullmatch(text):
        return []
    if together := TOGETHER.fullmatch(text):
        parts = [a for part in together[1].split(";") for a in apart(parse(part, rank, cell))[0]]
        if len(parts) != 2:
            raise ValueError(f"row {rank}, cell {cell}: {text!r} has {len(parts)} actions, and two overlap")
        return [Pair(*parts)]
    found = ACTION.fullmatch(text)
    if not found:
        raise ValueError(
            f"row {rank}, cell {cell}: {text!r} is no action; one is a stage, F, B, I or W, and a micro-batch: 2F5"
        )
    return [Action(int(found[1]), found[2], int(found[3]))]


def to_csv(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write a line per rank, which torch's schedules load with _load_csv."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(to_strings(schedule))


def from_csv(path: str | os.PathLike[str], name: str = "imported", replicas: int = 1) -> Schedule:
    """Return the Schedule in a CSV file with a line per rank. Raises: ValueError as from_strings; OSError."""
    with open(path, newline="") as file:
        return from_strings(list(csv.reader(file)), name, replicas)
