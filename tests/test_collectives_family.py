"""Every collective algorithm over the grid of ranks and sizes, on simulated ranks: results, messages, schedule."""

import itertools
import math

import numpy as np
import pytest
import torch

from hpdl_lab.collectives import steps
from hpdl_lab.collectives.chunks import bounds
from hpdl_lab.collectives.double_tree import trees
from hpdl_lab.collectives.table import ALGORITHMS, algorithm_names, collective_names, find_algorithm
from hpdl_lab.comm import PerRank, sim
from tests.traffic import calls, posted
from tests.wording import raises

RANKS = [*range(1, 10), 13, 16]
OPTIONS = [  # (name, collective, options) beside the defaults, in which every other number is found too
    *((name, "all_reduce", {"segments": s}) for name in ("double_tree", "hierarchical") for s in (1, 2, 7)),
    *(("segmented_ring", "all_reduce", {"segments": s}) for s in (2, 7)),
    *(("hierarchical", "all_reduce", {"group": g}) for g in (1, 2, 3, 5, 40)),
    *(("parameter_server", "all_reduce", {"servers": k}) for k in (2, 3, "p")),
    *(("grid", "all_reduce", {"inner": d}) for d in (1, "p")),
    *(
        ("tree", collective, {"root": root})
        for collective in ("broadcast", "reduce", "gather", "scatter")
        for root in (1, "p")
    ),
    *(("chain", collective, {"root": 1, "segments": s}) for collective in ("broadcast", "reduce") for s in (1, 5)),
]


def sizes(collective, p):
    """0, 1, p - 1, 1000, 1001 elements, fewer on many ranks; all_to_all needs p equal chunks."""
    chosen = (0, 1, p - 1, 1000, 1001) if p <= 9 else (p - 1, 101)
    return [n * p if collective == "all_to_all" else n for n in chosen]


def promised(collective, values, r, root=0):
    """(first, last, what elements first:last of x must be) on rank r, where values[q] is rank q's x."""
    p, n = values.shape
    cut = [bounds(n, p, c) for c in range(p)]
    if collective in ("reduce", "gather") and r != root:
        return 0, 0, values[0, :0]
    if collective in ("all_reduce", "reduce"):
        return 0, n, values.sum(0)
    if collective == "broadcast":
        return 0, n, values[root]
    if collective == "reduce_scatter":
        return *cut[r], values.sum(0)[slice(*cut[r])]
    if collective == "scatter":
        return *cut[r], values[root, slice(*cut[r])]
    if collective in ("all_gather", "gather"):
        return 0, n, np.concatenate([values[c, slice(*cut[c])] for c in range(p)])
    assert collective == "all_to_all"
    return 0, n, np.concatenate([values[q, slice(*cut[r])] for q in range(p)])


def check(algorithm, p, **options):
    """Results, and the messages of the function, of its schedule and of the schedule executed, over all sizes."""
    options = {name: p - (name == "root") if value == "p" else value for name, value in options.items()}
    counts = sizes(algorithm.collective, p)
    values = [np.random.default_rng([p, n]).integers(-99, 100, (p, n)).astype(float) for n in counts]

    def by_function(comm):
        mine = [rows[comm.rank].copy() for rows in values]
        return mine, [algorithm.function(comm, x, **options) for x in mine]

    def by_schedule(comm):
        return [steps.execute(comm, v[comm.rank].copy(), algorithm.steps(p, v.shape[1], **options)) for v in values]

    ran = sim.run(p, by_function)
    executed = sim.run(p, by_schedule) if p <= 9 else ran
    for r, (mine, returned) in enumerate(ran):
        for n, rows, x, out, other in zip(counts, values, mine, returned, executed[r], strict=True):
            first, last, expected = promised(algorithm.collective, rows, r, options.get("root", 0))
            assert np.array_equal(x[first:last], expected), (n, r)
            assert np.shares_memory(out, x) or not out.size, (n, r)
            assert np.array_equal(out, x if algorithm.collective != "reduce_scatter" else expected), (n, r)
            assert p > 9 or np.array_equal(x, other), (n, r)
    schedule = itertools.chain.from_iterable(algorithm.steps(p, n, **options) for n in counts)
    assert posted(ran.events, p) == calls(schedule, p, 8) == posted(executed.events, p)
    assert ran.seconds == executed.seconds


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_every_algorithm(algorithm, p):
    check(algorithm, p)


@pytest.mark.parametrize(("name", "collective", "options"), OPTIONS, ids=str)
def test_every_option(name, collective, options):
    for p in (3, 6):
        check(find_algorithm(name, collective), p, **options)


ALL_REDUCES = [find_algorithm(name) for name in algorithm_names() if name != "naive"]


@pytest.mark.parametrize("p", [3, 8])
@pytest.mark.parametrize("algorithm", [find_algorithm("naive"), *ALL_REDUCES], ids=str)
@pytest.mark.parametrize(
    ("dtype", "once"), [("float32", 0.0), ("float64", 0.0), ("bfloat16", 2**-8), ("float16", 2**-11)]
)
def test_sums_of_floats(algorithm, dtype, once, p):
    """Within the bound of float32, for 16 bits plus one rounding; the same bits on every rank."""
    values = torch.randn(p, 203, generator=torch.Generator().manual_seed(p)).to(getattr(torch, dtype))
    ran = sim.run(p, lambda comm, x: (algorithm.function(comm, x), x), PerRank(values))
    exact = values.double().sum(0)
    bound = (p - 1) * 2**-24 * values.double().abs().sum(0)
    bound = bound + once * (exact.abs() + bound)
    for out, x in ran:
        assert out is x and x.dtype == values.dtype
        assert ((x.double() - exact).abs() <= bound).all()
    if algorithm.name != "naive":  # whose ranks add in different orders
        assert all(torch.equal(x, ran[0][1]) for _, x in ran)


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if "reduce" in a.collective], ids=str)
@pytest.mark.parametrize("array", [False, True])
def test_16_bits_do_not_stop_a_sum_from_growing(algorithm, array):
    """In bfloat16 256 + 1 is 256, however often: only a wider sum comes to 272. Partial sums travel as 4 bytes."""
    p = 17
    x = np.ones(p, np.float16) * 2048 if array else torch.full((p,), 256.0, dtype=torch.bfloat16)
    ones = x * 0 + 1
    ran = sim.run(p, algorithm.function, PerRank([x, *[ones] * 16]))
    assert all(total == (2064 if array else 272) for total in np.asarray(ran[0].tolist()))
    assert type(ran[0]) is type(x) and ran[0].dtype == x.dtype
    rounds = algorithm.steps(p, p)
    assert posted(ran.events, p) == calls(rounds, p, 4)
    again = sim.run(p, lambda comm, x: steps.execute(comm, x, algorithm.steps(p, p)), PerRank([x, *[ones] * 16]))
    assert posted(again.events, p) == posted(ran.events, p)


def test_what_only_moves_16_bits_moves_2_bytes():
    for algorithm in (
        find_algorithm("tree", "broadcast"),
        find_algorithm("ring", "all_gather"),
        find_algorithm("pairwise", "all_to_all"),
    ):
        ran = sim.run(3, algorithm.function, torch.ones(9, dtype=torch.bfloat16))
        assert posted(ran.events, 3) == calls(algorithm.steps(3, 9), 3, 2)


def test_integers_stay_integers():
    for algorithm in ALL_REDUCES:
        (x, *_) = sim.run(5, algorithm.function, torch.full((7,), 2**31 - 1, dtype=torch.int32))
        assert (x == (5 * (2**31 - 1) + 2**31) % 2**32 - 2**31).all()


def test_a_node_is_what_the_communicator_says():
    algorithm = find_algorithm("hierarchical")

    def on_nodes(comm, x):
        comm.node_size = 3
        algorithm.function(comm, x)

    run = sim.run(9, on_nodes, np.zeros(8))
    assert posted(run.events, 9) == calls(algorithm.steps(9, 8, group=3), 9, 8)


# -- schedules of many ranks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "double_tree", "hierarchical", "grid", "tree"])
def test_a_schedule_of_many_ranks_begins_at_once_and_takes_one_round_of_memory(name):
    rounds = find_algorithm(name).steps(16_384, 10**9)
    first = next(rounds)
    assert first.source.dtype == first.first.dtype == np.int64
    assert len(first.source) <= 2 * 16_384


def test_an_unknown_name_lists_the_known_ones():
    with raises(LookupError, "all_reduce", "'rnig'", "segmented_ring"):
        find_algorithm("rnig")
    with raises(LookupError, "'reduce_all'", "all_reduce", "reduce_scatter"):
        find_algorithm("ring", "reduce_all")


def test_all_eight_collectives_are_there():
    assert sorted(collective_names()) == sorted(
        ["all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"]
    )


@pytest.mark.parametrize(
    ("name", "collective", "options", "message"),
    [
        ("segmented_ring", "all_reduce", {"segments": 1}, ("2 segments", "1")),
        ("double_tree", "all_reduce", {"segments": 0}, ("1 segment", "0")),
        ("chain", "broadcast", {"segments": 0}, ("1 segment", "0")),
        ("hierarchical", "all_reduce", {"group": 0}, ("1 rank", "group=0")),
        ("grid", "all_reduce", {"inner": 4}, ("6 ranks", "4")),
        ("parameter_server", "all_reduce", {"servers": 7}, ("6 ranks", "1", "6 servers", "7")),
        ("pairwise", "all_to_all", {}, ("6", "10 elements")),
    ],
)
def test_wrong_options_are_named_before_the_first_message(name, collective, options, message):
    algorithm = find_algorithm(name, collective)
    with raises(ValueError, *message):
        sim.run(6, lambda comm, x: algorithm.function(comm, x, **options), np.zeros(10))
    with raises(ValueError, *message):
        next(algorithm.steps(6, 10, **options))


@pytest.mark.parametrize("p", [*range(1, 70), 127, 128, 1000, 1023])
def test_both_trees_are_valid_and_share_the_work(p):
    middles = []
    for tree in trees(p):
        assert np.count_nonzero(tree.parent < 0) == 1
        up = tree.parent >= 0
        assert (tree.depth[up] == tree.depth[tree.parent[up]] + 1).all() and tree.depth[~up] == 0
        assert tree.depth.max() <= math.ceil(math.log2(p))
        assert np.bincount(tree.parent[up], minlength=1).max(initial=0) <= 2
        middles.append(set(tree.parent[up].tolist()))
    assert len(middles[0] & middles[1]) == (p % 2 if p > 1 else 0)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 13, 16, 33, 100])
def test_nobody_has_two_ways_of_one_color(p):
    for color in (0, 1):
        up = [(r, q) for tree in trees(p) for r in range(p) for q in tree.neighbors(r)[0][color]]
        down = [(r, q) for tree in trees(p) for r in range(p) for q in tree.neighbors(r)[1][color]]
        assert len({r for r, _ in up}) == len({q for _, q in up}) == len(up)
        assert sorted(up) == sorted((q, r) for r, q in down)
    assert sum(len(ways) for tree in trees(p) for r in range(p) for ways in tree.neighbors(r)[0]) == 2 * (p - 1)


def test_the_first_tree_is_that_of_the_picture_in_the_docstring():
    first, second = trees(8)
    assert first.parent.tolist() == [-1, 2, 4, 2, 0, 6, 4, 6]
    assert second.parent.tolist() == [1, 3, 1, 7, 5, 3, 5, -1]
