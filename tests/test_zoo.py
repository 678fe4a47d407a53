"""The zoo: every broken program is diagnosed, on simulated ranks and on engines; every repaired one is right."""

import os

import pytest

from hpdl_lab.comm import sim
from hpdl_lab.zoo import SPECIMENS, find

each = pytest.mark.parametrize("specimen", SPECIMENS, ids=lambda specimen: specimen.name)


@each
def test_the_doctor_finds_the_reason_on_simulated_ranks(specimen):
    with pytest.raises(Exception) as caught:
        sim.run(specimen.ranks, specimen.broken, deadline=specimen.deadline / 3)
    assert specimen.reason in caught.value.reason
    assert [w.rank for w in caught.value.waits] == list(range(specimen.ranks))
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert specimen.reason in text and "  rank  state" in text and f"{specimen.name}.py:" in text


@each
def test_the_repaired_program_is_right_on_simulated_ranks(specimen):
    assert sim.run(specimen.ranks, specimen.repaired) == specimen.returns


def test_no_such_specimen():
    with pytest.raises(ValueError, match="no specimen 'lion' in the zoo: both_receive_first, head_to_head_sends"):
        find("lion")


@pytest.mark.timeout(240)
def test_the_doctor_finds_the_reason_on_engines_which_are_usable_afterwards(cluster):
    """Sooner or later: on a machine with much else to do not every rank is, at the deadline, where it waits."""
    pids = cluster.run(lambda comm: os.getpid())
    for specimen in SPECIMENS:
        ranks = range(specimen.ranks)
        for patience in (0.4, 1, 2, 2, 2):  # after 3 s the straggler has done its work
            with pytest.raises(Exception) as caught:
                cluster.run(specimen.broken, ranks=ranks, deadline=patience * specimen.deadline)
            if specimen.reason in getattr(caught.value, "reason", ""):
                break
        text = str(caught.value)
        assert specimen.reason in caught.value.reason, f"{specimen.name}: {text}"
        assert [w.rank for w in caught.value.waits] == list(ranks), text
        assert specimen.reason in text and "  rank  state" in text and f"{specimen.name}.py:" in text, text
        assert cluster.run(specimen.repaired, ranks=ranks) == specimen.returns
    assert cluster.run(lambda comm: os.getpid()) == pids
