"""lab.scaling without engines: simulated points up to 1,024 ranks, model, fits, files; bad input in one sentence."""

import pytest

from hpdl_lab import lab
from hpdl_lab.collectives import ring
from hpdl_lab.collectives.sweep import WrongAnswer
from hpdl_lab.comm.network import Islands, Switch
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.data_parallel import DataParallel, DataParallelOverlapped
from hpdl_lab.parallel.parameter_server import StaleSynchronous
from tests.wording import raises

SMALL = mlp((64, 32, 10))


@pytest.fixture(autouse=True, scope="module")
def no_engines():
    with pytest.MonkeyPatch.context() as patch:
        for module in ("world", "scaling"):
            patch.setattr(f"hpdl_lab.verbs.{module}.running", lambda: None)
        patch.setattr("hpdl_lab.verbs.scaling_points.REHEARSALS_S", 0.2)
        yield


@pytest.fixture(scope="module")
def ring_result():
    return lab.scaling(all_reduce=my_ring, prediction={2: 1.9, 1024: 300}, n=64, simulate=(8, 1024))


def my_ring(comm, x):
    """An attendee's: the table does not know it, and its messages are those of a ring."""
    return ring.all_reduce(comm, x)


def texts(result):
    return " ".join(t.get_text() for t in result.figure.texts).replace("\n", " ")


def test_a_training_step_up_to_1024_ranks(ring_result):
    points = [(r["kind"], r["ranks"], r["how"]) for r in ring_result.simulated]
    points_of = [(kind, p, "schedule") for kind in ("strong", "weak") for p in (1, 2, 4, 8, 1024)]
    assert points == points_of and ring_result.rows == []
    for r in ring_result.simulated:
        assert r["cores"] == r["ranks"] and r["p25"] == r["rate"] == r["p75"]
        assert 0 <= r["exposed"] <= 1 and 0 <= r["overlap"] <= 1 and r["imbalance"] >= 1
    strong = [r for r in ring_result.simulated if r["kind"] == "strong"]
    assert strong[0]["efficiency"] == 1 and strong[-1]["efficiency"] < 0.1 < strong[-1]["exposed"]


def test_model_and_simulation_agree_on_a_ring(ring_result):
    """Both know the same times of computing; one follows messages or their schedule, the other is a formula."""
    for simulated, modelled in zip(ring_result.simulated, ring_result.model, strict=True):
        assert (simulated["kind"], simulated["ranks"]) == (modelled["kind"], modelled["ranks"])
        assert simulated["rate"] == pytest.approx(modelled["rate"], rel=0.02)


def test_one_kind_alone_is_drawn_as_speedup_beside_the_diagonal():
    result = lab.scaling(model=SMALL, n=64, ranks=1, simulate=(8,), kind="weak", prediction={8: 7.5})
    assert [(r["kind"], r["ranks"]) for r in result.simulated] == [("weak", 1), ("weak", 8)]
    left, right = result.figure.axes
    ideal, simulated, guess = left.lines
    assert list(ideal.get_xdata()) == list(ideal.get_ydata()) == [1, 8]
    assert simulated.get_ydata()[-1] == result.simulated[-1]["speedup"] and list(guess.get_ydata()) == [7.5]
    assert right.get_title(loc="left") == "weak: the same work per rank"


def test_fits_and_texts(ring_result):
    laws = {(fit.law, fit.source, fit.points) for fit in ring_result.fits}
    assert laws == {("Amdahl", "simulated", 5), ("Gustafson", "simulated", 5)}
    assert "Amdahl simulated: s = " in repr(ring_result) and "schedule" in repr(ring_result)
    assert "No engines run" in texts(ring_result) and "of more than 64 ranks some have no ex" in texts(ring_result)


def test_a_network_that_is_given_is_used():
    fast, slow = (
        lab.scaling(n=64, ranks=4, simulate=(), network=network) for network in (Islands(4), Switch.of("ethernet_1"))
    )
    assert slow.simulated[1]["exposed"] > 2 * fast.simulated[1]["exposed"]
    assert "Islands" in texts(fast)


def test_a_strategy_that_overlaps_hides_communication():
    network = Switch(alpha=1e-6, beta=2e-10)
    hidden, shown = (
        lab.scaling(strategy=strategy, model=mlp((64, 256, 256, 10)), n=256, ranks=4, simulate=(), network=network)
        for strategy in (DataParallelOverlapped(ring.all_reduce, 100_000, 20_000), DataParallel(ring.all_reduce))
    )
    assert all(r["overlap"] > 0.2 for r in hidden.simulated) and all(r["overlap"] == 0 for r in shown.simulated)


def test_ranks_that_would_take_too_long_are_named():
    def twice(comm, x):
        ring.all_reduce(comm, x.clone())
        return ring.all_reduce(comm, x)

    result = lab.scaling(all_reduce=twice, model=SMALL, n=64, ranks=2, simulate=(8, 4096))
    assert [(r["ranks"], r["how"]) for r in result.simulated] == [(2, "messages"), (8, "messages")] * 2
    assert "4,096 ranks would take too long" in texts(result)


def test_a_model_and_data_by_name():
    assert lab.scaling(model="gpt", data="copy", n=4, ranks=1, simulate=()).simulated[0]["rate"] > 0


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"all_reduce": ring.all_reduce, "strategy": DataParallel()}, ValueError, ("not both",)),
        ({"all_reduce": "ring"}, TypeError, ("all_reduce='ring'",)),
        ({"strategy": "flat"}, TypeError, ("'flat'",)),
        ({"strategy": DataParallel}, TypeError, ("DataParallel",)),
        ({"strategy": StaleSynchronous()}, ValueError, ("asynchronous",)),
        ({"model": "alexnet"}, LookupError, ("alexnet",)),
        ({"n": 0}, ValueError, ("1", "0")),
        ({"n": 2.5}, ValueError, ("2.5",)),
        ({"ranks": ()}, ValueError, ("no number of ranks",)),
        ({"ranks": (0, 1)}, ValueError, ("0",)),
        ({"ranks": "four"}, ValueError, ("'f'",)),
        ({"simulate": (8, 2.5)}, ValueError, ("2.5",)),
        ({"prediction": 2}, ValueError, ("2",)),
        ({"prediction": {2: -1}}, ValueError, ("2 ranks", "-1")),
        ({"prediction": {"2": 1.9}}, ValueError, ("'2'",)),
        ({"kind": "both"}, ValueError, ("'both'", "'weak'")),
        ({"network": "ethernet"}, TypeError, ("ethernet",)),
        ({"deadline": 0}, ValueError, ("0",)),
        ({"all_reduce": lambda comm, x: x, "model": SMALL, "n": 64}, WrongAnswer, ("element 0", "3 ranks")),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error, says):
    with raises(error, *says) as caught:
        lab.scaling(**arguments)
    assert "\n" not in str(caught.value)
