"""Alpha and beta fitted to an all-reduce, and the algorithm that a function is like."""

import pytest

from hpdl_lab.collectives import ring, tree
from hpdl_lab.collectives.calibrate import count_messages, fit_switch, infer_algorithm, schedule_time, virtual
from hpdl_lab.collectives.selector import Selection
from hpdl_lab.collectives.table import algorithm_names, find_algorithm
from hpdl_lab.comm.network import Switch
from tests.wording import raises

TRUE = Switch(alpha=40e-6, beta=3e-10)
BYTES = (8, 4096, 1 << 20)


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("function", [ring.all_reduce, tree.all_reduce])
def test_the_fit_finds_the_network_that_made_the_times(p, function):
    measured = {n: virtual(p, function, n, TRUE) for n in BYTES}
    found = fit_switch(count_messages(p, function, BYTES), measured)
    assert found.alpha == pytest.approx(TRUE.alpha) and found.beta == pytest.approx(TRUE.beta)


def test_no_cost_is_below_zero():
    for measured in ({8: 1e-3, 1 << 20: 1e-5}, {8: 1e-9, 1 << 20: 1.0}):
        found = fit_switch(count_messages(2, ring.all_reduce, measured), measured)
        assert found.alpha >= 0 and found.beta >= 0 and found.alpha + found.beta > 0


def test_where_no_line_fits_all_the_helper_gives_way():
    """An empty message that took longer than a large one: a machine with other work to do."""
    for measured in ({8: 5e-3, 1 << 20: 1e-3}, {8: 1e-7, 1 << 20: 1e-3}):
        found = fit_switch(count_messages(2, ring.all_reduce, measured), measured, helpers=(8,))
        assert virtual(2, ring.all_reduce, 1 << 20, found) == pytest.approx(1e-3, rel=0.05)


def test_what_makes_the_time_of_a_ring():
    assert count_messages(4, ring.all_reduce, [4096]) == {4096: pytest.approx((6, 6 / 4 * 4096))}


def test_a_fit_needs_two_of_each():
    with raises(ValueError, "2 ranks", "1"):
        count_messages(1, ring.all_reduce, BYTES)
    with raises(ValueError, "2 times", "1"):
        fit_switch(count_messages(2, ring.all_reduce, [8]), {8: 1.0})


@pytest.mark.parametrize("name", algorithm_names())
def test_a_function_is_recognized_by_its_messages(name):
    function = find_algorithm(name).function

    def mine(comm, x):
        return function(comm, x)

    found = infer_algorithm(mine)(1000)
    assert schedule_time(found, 16, 5000, TRUE) == pytest.approx(
        schedule_time(find_algorithm(name), 16, 5000, TRUE), rel=1e-2
    )


def test_a_selection_is_followed_by_size():
    algorithm = infer_algorithm(Selection.parse("tree:0-1000;ring:1001-max"))
    assert [algorithm(n).name for n in (8, 1000, 1001, 1 << 20)] == ["tree", "tree", "ring", "ring"]


def test_what_is_like_nothing_has_no_schedule():
    def twice(comm, x):
        ring.all_reduce(comm, x)
        return ring.all_reduce(comm, x)

    assert infer_algorithm(twice) is None
