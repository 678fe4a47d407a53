"""The one stopwatch, on a clock that the test turns."""

from hpdl_lab.measure import Measured, measure


def test_what_counts_is_what_follows_the_warm_up():
    now, took, begins = [0], iter([100, 1, 2, 3, 4, 5]), []

    def fn():
        now[0] += next(took) * 10**9

    found = measure(fn, repeats=5, clock=lambda: now[0], barrier=lambda: begins.append(now[0]))
    assert found.times == (1, 2, 3, 4, 5) and len(begins) == 5
    assert (found.median, found.quartiles, found.spread) == (3, (2, 4), 2 / 3)


def test_it_ends_when_its_seconds_are_over_and_a_sample_may_be_many_calls():
    now = [0]

    def fn():
        now[0] += 10**9

    assert measure(fn, seconds=4, calls=2, clock=lambda: now[0]).times == (1, 1)
    assert measure(fn, seconds=0, warmup=0, clock=lambda: now[0]).times == (1,)
    assert Measured((0.0,)).spread == 0
