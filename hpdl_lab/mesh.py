"""Ranks on a grid with named axes: who holds which replica, stage and shard, and which ranks exchange messages.

    Grid(dp=2, pp=2, tp=2)      dp 0      tp 0  1        dp 1      tp 0  1        the last axis varies fastest:
                                  pp 0       0  1          pp 0       4  5        ranks 0 and 1 are neighbors on one
                                  pp 1       2  3          pp 1       6  7        host, and tp sends most there

Along every axis a rank belongs to one group, whose ranks differ in that coordinate only: rank 2 adds gradients with
rank 6 (dp), passes activations to and from rank 0 (pp), and shares its layers with rank 3 (tp).
Ref: Narayanan et al. 2021, arXiv:2104.04473; torch.distributed.device_mesh.init_device_mesh has the same order.
"""

from __future__ import annotations

import html
import itertools
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .comm.status.report import name_ranks

if TYPE_CHECKING:
    from .comm.base import Comm


LONGEST = 160  # bytes of a grid in words: five axes of up to 20 digits
AXES = {
    "dp": "data parallel: replicas",
    "pp": "pipeline parallel: stages",
    "tp": "tensor parallel: shards of layers",
    "cp": "context parallel: parts of a sequence",
    "ep": "expert parallel: experts of a layer",
}


def coordinates(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return where a rank stands on a grid: one coordinate per axis, and the last varies fastest.

        sizes (2, 3):   0 1 2      rank 4 -> (1, 1)
                        3 4 5

    Args:    rank: int, 0 <= rank < product of sizes; sizes: how many ranks along each axis, ints.
    Returns: tuple of len(sizes) ints.
    """
    place = []
    for size in reversed(sizes):
        rank, coordinate = divmod(rank, size)
        place.append(coordinate)
    return tuple(reversed(place))


def groups(sizes: tuple[int, ...], axis: int) -> list[list[int]]:
    """List the groups of ranks along one axis of a grid.

        sizes (2, 3):   0 1 2      axis 0, downwards: [[0, 3], [1, 4], [2, 5]]
                        3 4 5      axis 1, across:    [[0, 1, 2], [3, 4, 5]]

    Ranks of a group differ in their coordinate along this axis, and in no other
    coordinate. The last axis varies fastest. `coordinates(rank, sizes)` returns the
    coordinates of a rank: (1, 1) for rank 4.

    Args:    sizes: how many ranks along each axis, ints; axis: index into sizes.
    Returns: list of lists of ranks. Each group is in the order of the coordinate along
             the axis, and the groups are in the order of their lowest ranks.
    """
    ### BEGIN SOLUTION
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes)):
        place = coordinates(rank, sizes)
        found.setdefault(place[:axis] + place[axis + 1 :], []).append(rank)
    return list(found.values())
    ### END SOLUTION


@dataclass(frozen=True, init=False)
class Grid:
    """The geometry alone, without communication: `Grid(dp=2, tp=4)`; axes that are not given have size 1.

    axes, sizes: names and sizes as given, first to last; size: ranks in all; grid["tp"]: the size of one axis.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __init__(self, **sizes: int) -> None:
        for axis, size in sizes.items():
            _require_axis(axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{axis}={size!r}: the size of an axis is an int of at least 1")
        object.__setattr__(self, "axes", tuple(sizes))
        object.__setattr__(self, "sizes", tuple(sizes.values()))

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def __getitem__(self, axis: str) -> int:
        _require_axis(axis)
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    def __repr__(self) -> str:
        return f"Grid({', '.join(f'{axis}={size}' for axis, size in zip(self.axes, self.sizes, strict=True))})"

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return {axis: coordinate} of a rank: the given axes in their order, then the others, all of size 1."""
        if not 0 <= rank < self.size:
            raise ValueError(f"there is no rank {rank} in {self!r}: its ranks are 0 to {self.size - 1}")
        place = dict(zip(self.axes, coordinates(rank, self.sizes), strict=True))
        return place | {axis: 0 for axis in AXES if axis not in place}

    def rank(self, **place: int) -> int:
        """Return the rank at these coordinates; axes that are not given are 0. The inverse of `coordinates`."""
        number = 0
        for axis, coordinate in place.items():
            if not 0 <= coordinate < self[axis]:
                raise ValueError(
                    f"{axis}={coordinate} is outside {self!r}, in which {axis} goes from 0 to {self[axis] - 1}"
                )
        for axis, size in zip(self.axes, self.sizes, strict=True):
            number = number * size + place.get(axis, 0)
        return number

    def groups(self, axis: str) -> list[list[int]]:
        """Return the groups along one axis: Grid(dp=2, pp=2, tp=2).groups("pp") -> [[0, 2], [1, 3], [4, 6], [5, 7]]."""
        _require_axis(axis)
        if axis not in self.axes:
            return [[rank] for rank in range(self.size)]
        return groups(self.sizes, self.axes.index(axis))

    def others(self, rank: int, axes: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
        """Return the coordinates of `rank` along all axes but `axes`, in their order: what a group has in common."""
        for axis in axes:
            _require_axis(axis)
        place = self.coordinates(rank)
        return tuple((axis, place[axis]) for axis in self.axes if axis not in axes)

    # -- pictures -----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return f"{self!r}: {self.size} rank{'s' if self.size > 1 else ''}\n" + "\n".join(self._lines())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _lines(self) -> list[str]:
        """Draw one table per place along the leading axes: the last axis across, the one before it downwards."""
        *leading, (down, rows), (across, columns) = [("", 1), ("", 1), *zip(self.axes, self.sizes, strict=True)]
        leading = [pair for pair in leading if pair[0]]
        lines, ranks, width = [], itertools.count(), len(str(self.size - 1)) + 1
        for place in itertools.product(*(range(size) for _, size in leading)):
            title = " ".join(f"{axis} {i}" for (axis, _), i in zip(leading, place, strict=True))
            labels = [f"{down} {row}" if down else "" for row in range(rows)]
            margin = max(map(len, [title, *labels])) + 2
            lines.append(f"{title:{margin}}{across:2}" + "".join(f"{i:{width}}" for i in range(columns)))
            lines += [
                f"{label:>{margin - 2}}    " + "".join(f"{next(ranks):{width}}" for _ in range(columns))
                for label in labels
            ]
        return [line.rstrip() for line in lines]


class DeviceMesh:
    """The ranks of `comm` on a grid, with a communicator along every axis: `mesh["tp"].all_reduce(x)`.

        mesh = DeviceMesh(comm, dp=2, tp=2)        or DeviceMesh(comm, Grid(dp=2, tp=2))
        mesh.coordinates                           {"dp": 1, "tp": 0, "pp": 0, "cp": 0, "ep": 0} on rank 2
        mesh["dp"]                                 the communicator of ranks 0 and 2: its rank 1 here

    Collective. grid: a Grid; comm: as given.
    Raises:  ValueError on every rank if the grid has not as many places as comm has ranks, or if ranks disagree.
    Steps: one all_gather of 8 bytes, one split per axis longer than 1 and one for all the others.
    """

    def __init__(self, comm: Comm, grid: Grid | None = None, /, **sizes: int) -> None:
        if (grid is None) == (not sizes) or not isinstance(grid, Grid | None):
            raise ValueError("a mesh needs a Grid or the sizes of its axes, and not both: DeviceMesh(comm, dp=2, tp=2)")
        self.comm = comm
        self.grid = Grid(**sizes) if grid is None else grid
        self._require_fit()
        self.coordinates = self.grid.coordinates(comm.rank)
        # axes longer than 1 -> the communicator over them
        self._parts: dict[tuple[str, ...], Comm] = {(): comm.split(comm.rank)}
        for axis in self.grid.axes:
            self.over(axis)

    def __getitem__(self, axis: str) -> Comm:
        """Return the communicator along one axis: of this rank alone if its size is 1."""
        return self.over(axis)

    def over(self, *axes: str) -> Comm:
        """Return the communicator over several axes at once: `mesh.over("dp", "cp")`, ranked in the grid's order.

        Collective at its first call for these axes, unless at most one of them is longer than 1.
        """
        for axis in axes:
            _require_axis(axis)
        long = tuple(axis for axis in self.grid.axes if axis in axes and self.grid[axis] > 1)
        if long not in self._parts:
            common = self.grid.others(self.comm.rank, long)
            text = " ".join(["+".join(long), *(f"{axis}={i}" for axis, i in common)])  # for the report of a stuck run
            self._parts[long] = self.comm.split(text, self.comm.rank)
        return self._parts[long]

    def __str__(self) -> str:
        place = ", ".join(f"{axis} {self.coordinates[axis]}" for axis in self.grid.axes)
        return f"rank {self.comm.rank} ({place}) of {self.grid!r}"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _require_fit(self) -> None:
        """Raise ValueError on every rank unless all ranks mean the same grid, and there is a place for each."""
        import torch

        number = zlib.crc32(repr(self.grid).encode())
        numbers = self.comm.all_gather(torch.tensor([number], dtype=torch.int64, device=self.comm.device))
        if not bool((numbers == number).all()):  # words only if they are needed: 1,024 ranks read 1,024 of them
            raise ValueError(f"the ranks do not agree on the mesh: {self._grids_in_words()}")
        if self.grid.size != self.comm.size:
            product = f"{' x '.join(map(str, self.grid.sizes))} = " if len(self.grid.sizes) > 1 else ""
            raise ValueError(
                f"{self.grid!r} has {product}{self.grid.size} places for ranks, and there are {self.comm.size} ranks"
            )

    def _grids_in_words(self) -> str:
        """Say which ranks mean which grid: "Grid(dp=4) on rank 1, Grid(dp=2, tp=2) on ranks 0, 2, 3". Collective."""
        import torch

        text = torch.tensor(list(repr(self.grid).encode()[:LONGEST].ljust(LONGEST)), dtype=torch.uint8)
        grids: dict[str, list[int]] = {}
        for rank, row in enumerate(self.comm.all_gather(text.to(self.comm.device)).tolist()):
            grids.setdefault(bytes(row).decode().rstrip(), []).append(rank)
        in_order = sorted(grids.items(), key=lambda g: len(g[1]))
        return ", ".join(f"{grid} on {name_ranks(ranks)}" for grid, ranks in in_order)


def _require_axis(axis: str) -> None:
    """Raise ValueError unless `axis` is the name of one."""
    if axis not in AXES:
        text = ", ".join(f"{name} ({what})" for name, what in AXES.items())
        raise ValueError(f"no axis of a mesh is called {axis!r}: {text}")
