"""lab.scaling without engines: simulated points up to 1,024 ranks, model, fits, files; bad input in one sentence."""

import csv
from importlib import import_module

import numpy as np
import pytest
from PIL import Image

from hpdl_lab import lab
from hpdl_lab.collectives import ring
from hpdl_lab.collectives.sweep import WrongAnswer
from hpdl_lab.comm.network import Islands, Switch
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.data_parallel import DataParallel, DataParallelOverlapped
from hpdl_lab.parallel.parameter_server import StaleSynchronous

SMALL = mlp((64, 32, 10))


@pytest.fixture(autouse=True)
def no_engines(monkeypatch):
    for module in ("ranks", "scaling", "scaling_runs"):  # by import_module: the verb lab.scaling hides the module
        monkeypatch.setattr(import_module(f"hpdl_lab.lab.{module}"), "running", lambda: None)
    monkeypatch.setattr(import_module("hpdl_lab.lab.scaling_points"), "REHEARSALS_S", 0.2)
    monkeypatch.setattr(import_module("hpdl_lab.lab.scaling_runs"), "FOLLOW_S", 60)  # of any work; no core for a while


@pytest.fixture(scope="module")
def ring_result():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("hpdl_lab.lab.scaling_points"), "REHEARSALS_S", 0.2)
        for module in ("ranks", "scaling", "scaling_runs"):
            patch.setattr(import_module(f"hpdl_lab.lab.{module}"), "running", lambda: None)
        return lab.scaling(all_reduce=my_ring, prediction={2: 1.9, 1024: 300}, n=64, simulate=(8, 1024))


def my_ring(comm, x):
    """An attendee's: the table does not know it, and its messages are those of a ring."""
    return ring.all_reduce(comm, x)


def busy(comm, n):
    """n vectors are summed, and all ranks agree on the result."""
    x = np.zeros(1000, np.float32)
    for _ in range(n // comm.size):
        x += 1
    ring.all_reduce(comm, x)


def test_a_training_step_up_to_1024_ranks(ring_result):
    assert ring_result.rows == [] and ring_result.unit == "samples/s"
    points = [(r["kind"], r["ranks"], r["how"]) for r in ring_result.simulated]
    how = {1: "messages", 2: "messages", 4: "messages", 8: "messages", 1024: "schedule"}
    assert points == [(kind, p, how[p]) for kind in ("strong", "weak") for p in how]
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


def test_fits_and_texts(ring_result):
    laws = {(fit.law, fit.source, fit.points) for fit in ring_result.fits}
    assert laws == {("Amdahl", "simulated", 5), ("Gustafson", "simulated", 5)}
    told = repr(ring_result)
    assert told.startswith("scaling    ranks") and "Amdahl simulated: s = " in told and "schedule" in told
    said = " ".join(t.get_text() for t in ring_result.figure.texts)
    assert "No engines run" in said and "of more than 64 ranks some have no example" in said.replace("\n", " ")


def test_files(ring_result, tmp_path):
    with open(ring_result.csv(tmp_path / "points.csv")) as file:
        rows = list(csv.DictReader(file))
    assert [r["source"] for r in rows] == ["simulated"] * 10 + ["model"] * 10
    assert float(rows[-1]["rate"]) == ring_result.model[-1]["rate"] and rows[0]["simulated"] == ""
    assert Image.open(ring_result.png(tmp_path / "figure.png")).size[0] > 1000
    assert ring_result.savefig == ring_result.png


def test_a_network_that_is_given_is_used():
    fast, slow = (
        lab.scaling(n=64, ranks=4, simulate=(), kind="weak", network=network)
        for network in (Islands(4), Switch.of("ethernet_1"))
    )
    assert slow.simulated[0]["exposed"] > 2 * fast.simulated[0]["exposed"]
    assert "Islands" in " ".join(t.get_text() for t in fast.figure.texts)


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

    result = lab.scaling(all_reduce=twice, model=SMALL, n=64, ranks=2, simulate=(8, 4096), kind="weak")
    assert [r["ranks"] for r in result.simulated] == [2, 8]
    assert "4,096 ranks would take too long" in " ".join(t.get_text() for t in result.figure.texts)


def test_a_model_and_data_by_name():
    result = lab.scaling(model="gpt", data="copy", n=4, ranks=1, simulate=(), kind="strong")
    assert result.simulated[0]["rate"] > 0


# -- any work ---------------------------------------------------------------------------------------------------------


def test_points_of_any_work():
    result = lab.scaling(busy, ranks=(1, 2, 4), n=400, simulate=())
    assert result.rows == [] and result.unit == "units/s"
    assert [(r["kind"], r["ranks"]) for r in result.simulated] == [
        (k, p) for k in ("strong", "weak") for p in (1, 2, 4)
    ]
    for r in result.simulated:
        assert 0 < r["efficiency"] <= 1 + 1e-9 and r["exposed"] is None
    assert "simulated, messages" in repr(result)


def test_more_messages_scale_worse():
    def chatty(comm, n):
        for _ in range(50):
            busy(comm, n // 50)

    few, many = (lab.scaling(work, ranks=(1, 4), n=2000, simulate=()).simulated for work in (busy, chatty))
    assert many[1]["efficiency"] < few[1]["efficiency"]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"work": busy, "all_reduce": ring.all_reduce}, ValueError, "give work or all_reduce, not both"),
        ({"work": busy, "model": "mlp"}, ValueError, "give work or model, not both"),
        ({"work": 3}, TypeError, r"needs work f\(comm, n\), got int"),
        (
            {"all_reduce": ring.all_reduce, "strategy": DataParallel()},
            ValueError,
            "a strategy or an all_reduce, not both",
        ),
        ({"all_reduce": "ring"}, TypeError, r"all_reduce must be a function f\(comm, x\), got str"),
        ({"strategy": "flat"}, TypeError, "an instance of one of parallel/data_parallel.py.*'flat'"),
        ({"strategy": DataParallel}, TypeError, r"an instance.*DataParallel\(\)"),
        ({"strategy": StaleSynchronous()}, ValueError, "StaleSynchronous.* is asynchronous"),
        ({"model": "alexnet"}, LookupError, "alexnet"),
        ({"model": 7}, TypeError, "model=7: the name of one"),
        ({"model": "gpt", "data": "digits"}, ValueError, "gpt reads windows of tokens"),
        ({"data": "imagenet"}, LookupError, "no data set is called 'imagenet'"),
        ({"data": 5}, TypeError, "data is a int: the name of a set"),
        ({"n": 0}, ValueError, "at least 1, got 0"),
        ({"n": True}, ValueError, "at least 1, got True"),
        ({"n": 2.5}, ValueError, "at least 1, got 2.5"),
        ({"ranks": ()}, ValueError, "no number of ranks"),
        ({"ranks": (0, 1)}, ValueError, "whole numbers of ranks, at least 1, got 0"),
        ({"ranks": "four"}, ValueError, "ranks must be numbers of ranks, such as .* got 'four'"),
        ({"simulate": (8, 2.5)}, ValueError, "simulate must be whole numbers of ranks, at least 1, got 2.5"),
        ({"kind": "medium"}, ValueError, "kind='medium'"),
        ({"kind": ()}, ValueError, r"kind=\(\)"),
        ({"kind": 3}, ValueError, "kind=3"),
        ({"prediction": 2}, ValueError, "a prediction is {ranks: speedup}.* got 2"),
        ({"prediction": {}}, ValueError, "a prediction is {ranks: speedup}"),
        ({"prediction": {2: -1}}, ValueError, "a speedup above 0, got 2: -1"),
        ({"prediction": {"2": 1.9}}, ValueError, "got '2': 1.9"),
        ({"prediction": {"strong": 2}}, ValueError, "a prediction is {ranks: speedup}"),
        ({"network": "ethernet"}, TypeError, "one of comm.network is needed"),
        ({"deadline": 0}, ValueError, "deadline must be a number of seconds above 0, got 0"),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused(arguments, error, sentence):
    with pytest.raises(error, match=sentence) as caught:
        lab.scaling(**arguments)
    assert "\n" not in str(caught.value)


def test_an_all_reduce_that_does_not_add_up_is_not_scaled():
    def does_nothing(comm, x):
        return x

    with pytest.raises(WrongAnswer, match="does_nothing is not timed, because its sum is wrong: on rank 0"):
        lab.scaling(all_reduce=does_nothing, model=SMALL, n=64)
