"""Ranks on a grid: coordinates, groups, the communicators along the axes, the drawing, and what is refused."""

import itertools

import pytest
import torch

from hpdl_lab.comm import PerRank, sim
from hpdl_lab.mesh import AXES, DeviceMesh, Grid, coordinates, groups
from tests.wording import raises

GRIDS = [
    Grid(),
    Grid(dp=1),
    Grid(tp=5),
    Grid(dp=2, tp=3),
    Grid(tp=3, dp=2),
    Grid(dp=2, pp=2, tp=2),
    Grid(pp=3, dp=1, tp=2),
    Grid(dp=2, pp=3, cp=1, tp=2, ep=2),
]


@pytest.mark.parametrize("sizes", [(), (1,), (4,), (2, 3), (3, 1, 2), (2, 2, 2), (4, 3, 2, 5)])
def test_coordinates_count_like_nested_loops(sizes):
    places = list(itertools.product(*(range(size) for size in sizes)))
    assert [coordinates(rank, sizes) for rank in range(len(places))] == places


def test_groups_come_in_the_order_of_their_lowest_rank():
    assert groups((2, 3), 0) == [[0, 3], [1, 4], [2, 5]] and groups((2, 3), 1) == [[0, 1, 2], [3, 4, 5]]
    assert groups((2, 2, 2), 1) == [[0, 2], [1, 3], [4, 6], [5, 7]] and groups((1,), 0) == [[0]]


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_a_grid_knows_its_ranks(grid):
    assert grid.size == torch.tensor(grid.sizes).prod()
    for rank in range(grid.size):
        place = grid.coordinates(rank)
        assert set(place) == set(AXES) and list(place)[: len(grid.axes)] == list(grid.axes)
        assert grid.rank(**place) == rank
    for axis in AXES:
        groups = grid.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(grid.size))
        for group in groups:
            assert [grid.coordinates(rank)[axis] for rank in group] == list(range(grid[axis]))


def test_the_order_of_torch():
    """The last axis varies fastest, as in init_device_mesh, whose mesh is arange(size).view(sizes)."""
    grid = Grid(dp=2, pp=3, tp=4)
    theirs = torch.arange(24).view(2, 3, 4)
    for rank in range(24):
        place = grid.coordinates(rank)
        assert theirs[place["dp"], place["pp"], place["tp"]] == rank
    assert grid.groups("pp") == theirs.movedim(1, -1).reshape(-1, 3).tolist()


def members(comm, grid):
    """{axes: the ranks of `comm` that each communicator of the mesh has, in its order}."""
    mesh = DeviceMesh(comm, grid)
    me, told = torch.tensor([comm.rank]), {}
    for axes in [*((axis,) for axis in AXES), ("dp", "tp"), ("tp", "dp"), ("dp", "pp", "tp", "cp", "ep"), ()]:
        part = mesh.over(*axes)
        told[axes] = part.all_gather(me).flatten().tolist()
        assert told[axes][part.rank] == comm.rank
    assert mesh["tp"] is mesh["tp"] and mesh.over("dp", "tp") is mesh.over("tp", "dp")
    return told


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_communicators_along_the_axes(grid):
    of = grid.coordinates
    for rank, told in enumerate(sim.run(grid.size, members, grid)):
        for axes, ranks in told.items():
            others = [axis for axis in AXES if axis not in axes]
            same = [r for r in range(grid.size) if all(of(r)[axis] == of(rank)[axis] for axis in others)]
            assert ranks == same


def test_the_drawing():
    assert str(Grid(dp=2, pp=2, tp=2)).splitlines() == [
        "Grid(dp=2, pp=2, tp=2): 8 ranks",
        "dp 0  tp 0 1",
        "pp 0     0 1",
        "pp 1     2 3",
        "dp 1  tp 0 1",
        "pp 0     4 5",
        "pp 1     6 7",
    ]
    assert str(Grid(tp=3)).splitlines() == ["Grid(tp=3): 3 ranks", "  tp 0 1 2", "     0 1 2"]
    assert Grid(dp=2)._repr_html_() == f"<pre>{Grid(dp=2)}</pre>"
    assert sim.run(2, lambda comm: str(DeviceMesh(comm, dp=2)))[1] == "rank 1 (dp 1) of Grid(dp=2)"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 0}, ("dp=0", "1")),
        ({"dp": 2.0}, ("dp=2.0",)),
        ({"dp": True}, ("dp=True",)),
        ({"replicas": 2}, ("'replicas'",)),
    ],
)
def test_a_grid_that_is_none(sizes, message):
    with raises(ValueError, *message):
        Grid(**sizes)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda grid: grid.coordinates(6), ("rank 6", "Grid(dp=2, tp=3)", "0", "5")),
        (lambda grid: grid.coordinates(-1), ("-1",)),
        (lambda grid: grid.rank(tp=3), ("tp=3", "Grid(dp=2, tp=3)", "0", "2")),
        (lambda grid: grid.rank(pp=1), ("0", "0")),
        (lambda grid: grid["zp"], ("no axis",)),
        (lambda grid: grid.groups("zp"), ("no axis",)),
    ],
)
def test_a_place_that_is_none(ask, message):
    with raises(ValueError, *message):
        ask(Grid(dp=2, tp=3))


def refused(comm, facts, *args, **sizes):
    with raises(ValueError, *facts):
        DeviceMesh(comm, *args, **sizes)


@pytest.mark.parametrize(
    ("args", "sizes", "facts"),
    [
        ((), {"dp": 2, "tp": 2}, ("Grid(dp=2, tp=2)", "4", "3 ranks")),
        ((Grid(),), {}, ("Grid()", "1", "3 ranks")),
        ((), {}, ("Grid",)),
        ((3,), {}, ("Grid",)),
        ((Grid(dp=3),), {"dp": 3}, ("Grid",)),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_on_every_rank(args, sizes, facts):
    sim.run(3, lambda comm: refused(comm, facts, *args, **sizes))


def test_ranks_that_disagree_are_named_on_every_rank():
    grids = PerRank([Grid(dp=3), Grid(tp=3), Grid(dp=3)])
    sim.run(3, refused, ("Grid(tp=3)", "rank 1", "Grid(dp=3)", "ranks 0, 2"), grids)


def test_the_report_of_a_stuck_run_names_the_group():
    def stuck(comm):
        mesh = DeviceMesh(comm, dp=2, tp=2)
        mesh["dp"].recv(torch.zeros(1), 1 - mesh["dp"].rank)

    with raises(Exception, "tp=0"):
        sim.run(4, stuck)
