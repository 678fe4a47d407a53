"""Who belongs together after a split: decided by every rank for all of them, so that all raise or none."""

import pickle
from typing import Any


def part_of(notes: list[bytes], rank: int) -> list[int]:
    """The part to which `rank` belongs, of `parts_of`. notes: pickled (color, key) of every rank, in rank order."""
    return next(part for part in parts_of([pickle.loads(note) for note in notes]) if rank in part)


def parts_of(answers: list[tuple[Any, ...]]) -> list[list[int]]:
    """The ranks of each color, ordered by (key, rank). answers: (color, key) of every rank, in rank order.

    Raises ValueError, the same for every rank.
    """
    parts = []
    for r, (color, _) in enumerate(answers):
        if not color == color:  # as nan, which would belong to no part
            raise ValueError(f"color {color!r} of rank {r} does not equal itself")
        part = next((part for part in parts if answers[part[0]][0] == color), None)
        if part is None:
            parts.append([r])
        else:
            part.append(r)
    return [in_order(part, answers) for part in parts]


def in_order(part: list[int], answers: list[tuple[Any, ...]]) -> list[int]:
    """`part` sorted by (key, rank)."""
    keys = [(answers[r][1], r) for r in part]
    try:
        return [r for _, r in sorted(keys)]
    except TypeError:
        text = ", ".join(f"{key!r} of rank {r}" for key, r in keys)
        raise ValueError(f"keys of one color that cannot be compared: {text}") from None
