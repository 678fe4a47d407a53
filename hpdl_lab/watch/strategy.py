"""The kind of training that a run was: which ranks hold the same parameters, and what they add up in a step."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .places import NotedPlace
from .records import Event, ParameterShard, RankRecord, WatchedRun, numbers

if TYPE_CHECKING:
    from .collectives import Begun, Entry

SUMS = ("all_reduce", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced")
MOVES = (*SUMS, "all_gather", "_allgather_base", "gather", "broadcast", "allgather_into_tensor_coalesced")
FLOATS = ("float", "bfloat16")
WIDTHS = {
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "bool": 1,
    "int8": 1,
    "uint8": 1,
}  # bytes of a number, 8 of all others
FEW = 64  # numbers: a loss, a table of metrics
MANY = 0.5  # of the parameters: so many numbers added in a step are gradients


def elements(entry: Begun) -> int:
    """Return the numbers of the larger of what goes in and what comes out."""
    return max(sum(math.prod(size) for size in sizes) for sizes in (entry["sizes"], entry["out"]))


def nbytes(entry: Begun) -> int:
    """Return the bytes of the larger of what goes in and what comes out."""
    return elements(entry) * (WIDTHS.get(entry["dtypes"][0], 8) if entry["dtypes"] else 0)


def is_float(entry: Begun) -> bool:
    return bool(entry["dtypes"]) and entry["dtypes"][0].startswith(FLOATS)


@dataclass
class ObservedStrategy:
    """A strategy, recognized from the models and the traffic of a run."""

    run: WatchedRun

    @cached_property
    def models(self) -> list[Event]:
        """The model of each rank, {} if it has called none."""
        return [rank.model() for rank in self.run.ranks]

    @cached_property
    def parameters(self) -> dict[str, ParameterShard]:
        """{name: what rank 0 holds} for the trained parameters of its model."""
        found: dict[str, ParameterShard] = self.models[0].get("parameters", {}) if self.models else {}
        return {name: p for name, p in found.items() if p["trained"]}

    @cached_property
    def ddp(self) -> bool:
        return any(event["ddps"] for rank in self.run.ranks for event in rank.all("model"))

    @cached_property
    def fsdp(self) -> bool:
        return any(
            kind.startswith(("FSDP", "FullyShardedDataParallel")) for m in self.models for kind in m.get("kinds", {})
        )

    @cached_property
    def axes(self) -> set[str]:
        """The axes of the meshes that parameters are cut on."""
        return {axis for m in self.models for p in m.get("parameters", {}).values() for axis in p.get("axes", ())}

    @cached_property
    def meshes(self) -> int:
        """The most axes that a parameter is cut on."""
        cut = [p.get("placements", []) for m in self.models for p in m.get("parameters", {}).values()]
        return max(map(len, cut), default=0)

    @cached_property
    def tensor_parallel(self) -> bool:
        return self.meshes > (1 if self.fsdp else 0)

    @cached_property
    def pipeline(self) -> bool:
        """True if ranks hold different models and send each other messages."""
        names = {frozenset(m.get("parameters", {})) for m in self.models}
        messages = any(entry.get("p2p") for rank in self.run.ranks for entry in rank.entries)
        return messages and (len(names) > 1 or len({numbers(m) for m in self.models if m}) > 1 or self.staged)

    @cached_property
    def staged(self) -> bool:
        return any("Stage" in kind for m in self.models for kind in m.get("kinds", {}))

    @cached_property
    def windows(self) -> list[list[list[Entry]]]:
        """For each of the last steps that the flight recorder still has, the collectives of each rank in it."""
        found = []
        for step in range(1, min((len(rank.steps) for rank in self.run.ranks), default=0)):
            rows = []
            for rank in self.run.ranks:
                begin, end = rank.steps[step - 1]["till"], rank.steps[step]["till"]
                if rank.entries and rank.entries[0]["time_ns"] > begin and rank.entries[0]["seq"] > 1:
                    break  # overwritten
                rows.append(rank.between(begin, end))
            if len(rows) == self.run.size:
                found.append(rows)
        return found[-16:]

    def added(self, entries: list[Entry]) -> int:
        """Return the floating-point numbers that are added over ranks."""
        return sum(elements(entry) for entry in entries if entry["op"] in SUMS and is_float(entry))

    @cached_property
    def adding(self) -> NotedPlace | None:
        """The author's line that adds gradients over ranks, None if it is not known."""
        rows = self.windows[-1][0] if self.windows else []
        return next((entry["place"] for entry in rows if entry["op"] in SUMS and is_float(entry)), None)

    @cached_property
    def by_hand(self) -> bool:
        """True if every step adds tensors with the sizes of the gradients, in a plain loop."""
        if self.ddp or self.fsdp or self.tensor_parallel or self.pipeline or not self.windows:
            return False
        return sum(self.adds_gradients(rows[0]) for rows in self.windows) > 0.8 * len(self.windows)

    def adds_gradients(self, entries: list[Entry]) -> bool:
        """Return True if collectives have the sizes of gradients: one by one, or all in one flat tensor."""
        sizes = Counter(p["held"] for p in self.parameters.values())
        sent = Counter(elements(entry) for entry in entries if entry["op"] in MOVES and is_float(entry))
        whole, sum_sent = sum(n * count for n, count in sizes.items()), sum(n * count for n, count in sent.items())
        alike = sum((sizes & sent).values())
        return bool(sizes) and (alike >= MANY * sum(sizes.values()) or abs(sum_sent - whole) <= 0.01 * whole)

    @cached_property
    def data_parallel(self) -> bool:
        """True if all ranks hold the same model, or a share of it, and each has examples of its own."""
        return (self.ddp or self.fsdp or self.by_hand) and not self.tensor_parallel and not self.pipeline

    @cached_property
    def silent(self) -> bool:
        """True if no step but the first ones moves anything that could be gradients or weights."""
        moved = [elements(e) for rank in self.run.ranks for e in rank.entries if is_float(e) and _after(rank, e)]
        return bool(self.parameters) and all(n <= FEW for n in moved)

    @property
    def name(self) -> str:
        parts = [
            *(["pipeline parallel"] if self.pipeline else []),
            *(["tensor parallel"] if self.tensor_parallel else []),
            *(["FSDP"] if self.fsdp else []),
            *(["data parallel by DDP"] if self.ddp else []),
            *(["data parallel by hand"] if self.by_hand else []),
        ]
        return " and ".join(parts) or ("no parallelism recognized" if self.run.size > 1 else "one rank")


def _after(rank: RankRecord, entry: Begun) -> bool:
    """Return True if an entry was begun after the first step of its rank, or in its backward."""
    first = next((event["time_ns"] for event in rank.events if event["what"] == "forward" and event["training"]), None)
    return first is not None and bool(entry["time_ns"] > first)
