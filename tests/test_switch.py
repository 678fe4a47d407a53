"""Notebook 14: links as data; a switch that adds and a DPU that does the ring, in bytes, sums and virtual time."""

import re

import numpy as np
import pytest

from hpdl_lab.comm import sim
from hpdl_lab.comm.network import describe
from hpdl_lab.performance.links import CHEAPEST_FIRST, INSIDE, LINKS, ladder, offers
from hpdl_lab.performance.switch import NDR, AddingSwitch, all_reduce_in_switch, by_dpus, by_hosts, by_ring, by_switch

NBYTES = 2**20


def total(ranks, nbytes):
    return np.arange(nbytes // 8) * (ranks * (ranks + 1) // 2)


@pytest.mark.parametrize("name", [*INSIDE, *CHEAPEST_FIRST])
def test_every_link_states_its_sources_with_their_years(name):
    link = LINKS[name]
    assert link.name == name and all(re.search(r"\b(19|20)\d\d\b", s) for s in (link.alpha_source, link.GBps_source))


def test_offers_keep_the_order_that_is_asked_for_and_count_bytes_per_second():
    assert offers(["nvlink_4", "ethernet_1"]) == [("nvlink_4", 450e9, 0.6e-6), ("ethernet_1", 0.125e9, 10e-6)]
    assert [name for name, *_ in offers()] == list(CHEAPEST_FIRST) and len(set(CHEAPEST_FIRST)) == 8


@pytest.mark.parametrize(("beta", "above"), [(1 / 20e9, "slingshot_11"), (0.0, "this machine"), (1e-6, "ethernet_1 ")])
def test_the_ladder_has_this_machine_in_its_place(beta, above):
    lines = ladder(5e-6, beta).splitlines()
    assert len(lines) == 1 + len(INSIDE) + len(CHEAPEST_FIRST) + 1
    here = next(i for i, line in enumerate(lines) if line.startswith("this machine"))
    assert lines[here].split()[3:5] == ["5", "µs"]
    assert next(i for i, line in enumerate(lines) if line.startswith(above)) <= here


@pytest.mark.parametrize(("ranks", "nbytes"), [(2, 8), (3, 1024), (8, NBYTES), (16, 1024)])
def test_a_switch_gives_the_sum_of_the_ring_for_one_vector_sent_and_sooner(ranks, nbytes):
    ring, switch = by_ring(ranks, nbytes), by_switch(ranks, nbytes)
    assert (ring.total == total(ranks, nbytes)).all() and (switch.total == ring.total).all()
    assert switch.sent == nbytes and (nbytes % (8 * ranks) or ring.sent == 2 * (ranks - 1) * nbytes // ranks)
    assert ranks == 2 or switch.seconds < ring.seconds


@pytest.mark.parametrize(("size", "n", "segments"), [(2, 5, 1), (4, 10, 3), (5, 1, 2), (9, 1000, 7)])
def test_all_ranks_get_the_sum_after_segments_and_one_more_step(size, n, segments):
    def fn(comm):
        return all_reduce_in_switch(comm, np.full(n, 2.0**comm.rank), segments)

    run = sim.run(size, fn, network=AddingSwitch(alpha=1.0, beta=0.0))
    assert all((x == 2.0 ** (size - 1) - 1).all() for x in run)
    assert run.seconds == pytest.approx(segments + 1)


def test_the_switch_has_a_port_for_each_rank_and_messages_between_ranks_cost_as_ever():
    switch, plain = AddingSwitch(NDR.alpha, NDR.beta), NDR
    assert [int(link) for link in switch.routes(1, 3, 4).links] == [1, -1]
    assert [int(link) for link in switch.routes(3, 1, 4).links] == [-1, 5]
    assert [int(link) for link in switch.routes(0, 1, 4).links] == list(plain.routes(0, 1, 4).links)
    assert "4 ranks" in describe(switch, 4)


@pytest.mark.parametrize(("calls", "steps"), [(1, 1), (4, 4), (14, 14), (40, 14)])
def test_a_host_hides_one_step_of_the_ring_for_each_call(calls, steps):
    result = by_hosts(8, NBYTES, 2e-3, calls)
    assert result.hidden == pytest.approx(steps / 14) and (result.total == total(8, NBYTES)).all()


def test_a_dpu_hides_everything_and_takes_longer_alone():
    result, alone = by_dpus(8, NBYTES, 5e-4), by_dpus(8, NBYTES, 0)
    assert result.hidden == pytest.approx(1) and result.seconds == pytest.approx(5e-4)
    assert alone.seconds > by_ring(8, NBYTES).seconds and alone.hidden == pytest.approx(0)
    assert (result.total == total(8, NBYTES)).all() and (alone.total == result.total).all()
