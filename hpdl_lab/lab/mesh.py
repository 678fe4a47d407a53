"""`lab.mesh`: ranks on a grid with named axes, drawn: who stands where, and who belongs to one group."""

from ..comm.errors import name_ranks
from ..mesh import Grid
from ..plots import mesh as drawing
from .cluster import running
from .picture import picture

MOST_RANKS = 4096


def mesh(grid=None, **sizes):
    """Draw a mesh: every rank at its coordinates, where its engine runs, and the groups along every axis.

        lab.mesh(dp=2, pp=2)                  the last axis varies fastest
        lab.mesh(Grid(dp=8, pp=16, tp=8))     1,024 ranks; drawn is the first replica

    Args:    grid: a mesh.Grid, or the sizes of its axes (dp, pp, tp, cp, ep).
    Returns: Picture, with the grid in words in its text.
    Raises:  ValueError with the numbers for sizes that are none.
    """
    grid = asked_grid(grid, sizes)
    places, foot = places_of(grid.size)
    title = f"{', '.join(f'{axis}={n}' for axis, n in zip(grid.axes, grid.sizes, strict=True))}: {told(grid.size)}"
    return picture(drawing.draw, grid, places, title, foot, text=str(grid), height=drawing.height(grid))


def asked_grid(grid, sizes):
    """The Grid that is meant: one, or the sizes of its axes. Raises ValueError, TypeError."""
    if grid is not None and sizes:
        raise ValueError("give a Grid or the sizes of axes, not both: lab.mesh(dp=2, tp=2)")
    if grid is None and not sizes:
        raise ValueError("a mesh needs the sizes of its axes: lab.mesh(dp=2, tp=2)")
    if grid is not None and not isinstance(grid, Grid):
        raise TypeError(f"{grid!r} is no grid: lab.mesh(dp=2, tp=2), or a Grid, is needed")
    grid = Grid(**sizes) if grid is None else grid
    if grid.size > MOST_RANKS:
        raise ValueError(f"{grid!r} has {grid.size:,} ranks: at most {MOST_RANKS:,} can be drawn")
    return grid


def places_of(ranks):
    """([where each rank's engine runs], a line about it); ([], why) where there are not enough engines."""
    engines = running()
    if engines is None:
        return [], f"No engines run: lab.start({ranks}) puts one at each place." if ranks <= 16 else ""
    if engines.n < ranks:
        return [], f"{engines.n} engines run, and the mesh has {ranks:,} places."
    infos = engines.infos[:ranks]
    hosts = {info["host"] for info in infos}
    if len(hosts) > 1:
        return [info["host"] for info in infos], "Below each rank: the host of its engine."
    if engines.device == "cuda":
        return [info["gpu"] for info in infos], "Below each rank: the GPU of its engine."
    cores = [name_ranks(info["cores"]).replace("rank", "core") for info in infos]
    return cores, f"Below each rank: where its engine runs, on {hosts.pop()}."


def told(ranks):
    return f"{ranks:,} rank{'s' if ranks > 1 else ''}"
