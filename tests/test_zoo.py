"""The zoo: every broken program is diagnosed, on simulated ranks and on engines; every repaired one is right."""

import os

import pytest

from hpdl_lab.comm import sim
from hpdl_lab.zoo import PROGRAMS, find
from tests.wording import raises

each = pytest.mark.parametrize("example", PROGRAMS, ids=lambda example: example.name)


@each
def test_the_doctor_finds_the_reason_on_simulated_ranks(example):
    with pytest.raises(Exception) as caught:
        sim.run(example.ranks, example.broken, deadline=example.deadline / 3)
    assert example.reason in caught.value.reason
    assert [w.rank for w in caught.value.waits] == list(range(example.ranks))
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert example.reason in text and "  rank  state" in text and "zoo.py:" in text


@each
def test_the_repaired_program_is_right_on_simulated_ranks(example):
    assert sim.run(example.ranks, example.repaired) == example.returns


def test_no_such_program():
    with raises(ValueError, "'lion'", "both_receive_first", "head_to_head_sends"):
        find("lion")


def test_the_doctor_finds_the_reason_on_engines_which_are_usable_afterwards(cluster):
    """Sooner or later: on a machine with much else to do not every rank is, at the deadline, where it waits."""
    pids = cluster.run(lambda comm: os.getpid())
    for example in PROGRAMS:
        ranks = range(example.ranks)
        for patience in (0.4, 1, 2, 2, 2):  # after 3 s the straggler has done its work
            with pytest.raises(Exception) as caught:
                cluster.run(example.broken, ranks=ranks, deadline=patience * example.deadline)
            if example.reason in getattr(caught.value, "reason", ""):
                break
        text = str(caught.value)
        assert example.reason in caught.value.reason, f"{example.name}: {text}"
        assert [w.rank for w in caught.value.waits] == list(ranks), text
        assert example.reason in text and "  rank  state" in text and "zoo.py:" in text, text
        assert cluster.run(example.repaired, ranks=ranks) == example.returns
    assert cluster.run(lambda comm: os.getpid()) == pids
