"""Amdahl and Gustafson: exact curves give back their s, bent ones a residual, too few points no numbers."""

import pytest

from hpdl_lab.parallel.scaling.laws import Fit, amdahl, fit, gustafson

RANKS = (1, 2, 4, 8, 1024)


@pytest.mark.parametrize("serial", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize(("kind", "law"), [("strong", amdahl), ("weak", gustafson)])
def test_exact_curves_give_back_their_serial_share(kind, law, serial):
    found = fit(kind, RANKS, [law(serial, p) for p in RANKS])
    assert found.serial == pytest.approx(serial, abs=1e-9) and found.residual == pytest.approx(0, abs=1e-9)
    assert found.speedup(16) == pytest.approx(law(serial, 16))


def test_the_laws_at_known_points():
    assert amdahl(0.05, 20) == pytest.approx(10.256, abs=1e-3), "Amdahl's own warning: 5% limit 20 ranks to 10"
    assert gustafson(0.1, 1024) == pytest.approx(921.7)
    assert amdahl(0.5, 1e12) == pytest.approx(2)


def test_ranks_are_counted_from_the_fewest():
    found = fit("strong", (2, 4, 8), [amdahl(0.2, p) for p in (1, 2, 4)])
    assert found.serial == pytest.approx(0.2) and found.fewest == 2
    assert found.speedup(8) == pytest.approx(amdahl(0.2, 4))


def test_a_curve_that_no_law_describes_has_a_residual():
    found = fit("strong", (1, 2, 4, 8), (1, 1.8, 2.5, 0.9))
    assert 0.3 < found.residual < 1 and 0 < found.serial < 1
    assert str(found).endswith("%: not this law")


def test_better_than_ideal_is_no_negative_share():
    assert fit("weak", (1, 2, 4), (1, 2.2, 4.4)).serial == 0.0
    assert fit("strong", (1, 2, 4), (1, 2.2, 4.4)).serial == 0.0


@pytest.mark.parametrize("points", [1, 2])
def test_few_points_fit_nothing_and_say_so(points):
    found = fit("strong", RANKS[:points], (1, 1.9)[:points])
    assert found == Fit("strong", "measured", points)
    assert "a fit needs 3" in str(found) and f"{points} point" in str(found)


def test_a_fit_says_what_it_is():
    told = str(fit("weak", RANKS, [gustafson(0.1, p) for p in RANKS], "simulated"))
    assert told == "Gustafson simulated: s = 10.00%, residual 0.0%"
