"""Networks: routes over their links, what shared links cost, the order of booking, published figures."""

import numpy as np
import pytest

from hpdl_lab.comm import sim
from hpdl_lab.comm.network import PRESETS, FatTree, Interconnect, Islands, Ring, Switch, describe, title
from hpdl_lab.comm.network.describe import shared_links
from tests.wording import raises

NETWORKS = [
    Switch(),
    Ring(),
    FatTree(4, 2),
    FatTree(4, 1),
    Islands(4, "nvlink_3", "ethernet_10", nics=2),
    Islands(3, "pcie_4", "roce_100"),
]
FAST, SLOW = Interconnect("fast", 0.0, 1e9, "", ""), Interconnect("slow", 0.0, 1e-9, "", "")  # 1 s per byte


def pairs(p):
    """Every (source, dest) of different ranks, as two arrays."""
    source, dest = np.divmod(np.arange(p * p), p)
    return source[source != dest], dest[source != dest]


def exchange(network, p, moves, nbytes=1):
    """Seconds in which `moves`, pairs of source and dest that all start at once, are done."""

    def body(comm):
        works = [comm.irecv(np.zeros(nbytes, "u1"), s) for s, d in moves if d == comm.rank]
        works += [comm.isend(np.zeros(nbytes, "u1"), d) for s, d in moves if s == comm.rank]
        for work in works:
            work.wait()

    return sim.run(p, body, network=network).seconds


@pytest.mark.parametrize("p", [2, 7, 8, 9])
@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_a_route_leads_link_by_link_from_its_sender_to_its_receiver(network, p):
    links = network.links(p)
    assert len(links) == network.link_count(p)
    timetable = network.timetable(p)
    for source, dest in zip(*pairs(p), strict=True):
        route = [links[i] for i in timetable.route(source, dest).links]
        assert (route[0].source, route[-1].dest) == (f"rank {source}", f"rank {dest}")
        assert all(a.dest == b.source for a, b in zip(route, route[1:], strict=False))
        assert len(set(route)) == len(route)


@pytest.mark.parametrize("p", [2, 9])
@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_many_routes_at_once_are_the_same_as_one_by_one(network, p):
    source, dest = pairs(p)
    together, timetable = network.routes(source, dest, p), network.timetable(p)
    for i, (s, d) in enumerate(zip(source.tolist(), dest.tolist(), strict=True)):
        alone = timetable.route(s, d)
        assert alone.links == tuple(link[i] for link in together.links if link[i] >= 0)
        assert (alone.alpha, alone.beta) == (together.alpha[i], together.beta[i])


def test_a_ring_takes_the_shorter_way_and_pays_for_each_cable():
    network = Ring(alpha=1.0, beta=1.0)
    assert exchange(network, 8, [(0, 3)]) == 3 + 1
    assert exchange(network, 8, [(0, 6)]) == 2 + 1
    assert exchange(network, 8, [(r, (r + 1) % 8) for r in range(8)]) == 1 + 1
    assert exchange(network, 8, [(r, (r - 1) % 8) for r in range(8)] + [(r, (r + 1) % 8) for r in range(8)]) == 1 + 1


def test_messages_over_the_same_cable_of_a_ring_take_turns():
    network = Ring(alpha=0.0, beta=1.0)
    assert exchange(network, 8, [(0, 2), (1, 3)]) == 2
    assert exchange(network, 8, [(0, 2), (2, 4)]) == 1


@pytest.mark.parametrize(("oversubscription", "seconds"), [(1, 1), (2, 2), (4, 4)])
def test_oversubscription_divides_the_bandwidth_between_leaves_and_not_within_one(oversubscription, seconds):
    network = FatTree(4, oversubscription, alpha=0.0, beta=1.0, hop=0.0)
    assert exchange(network, 8, [(r, r + 4) for r in range(4)]) == seconds
    assert exchange(network, 8, [(r, (r + 1) % 4) for r in range(4)]) == 1


def test_two_messages_to_receivers_of_one_spine_share_a_cable_of_a_fat_tree():
    network = FatTree(4, alpha=0.0, beta=1.0, hop=0.0)
    assert exchange(network, 12, [(0, 4), (1, 5)]) == 1
    assert exchange(network, 12, [(0, 4), (1, 8)]) == 2  # 4 and 8 are both reached by spine 0


def test_a_message_to_another_leaf_pays_for_two_more_switches():
    network = FatTree(2, alpha=1.0, beta=0.0, hop=0.25)
    assert exchange(network, 4, [(0, 1)]) == 1
    assert exchange(network, 4, [(0, 2)]) == 1.5


@pytest.mark.parametrize(("nics", "seconds"), [(1, 4), (2, 2), (4, 1)])
def test_ranks_of_an_island_share_its_adapters(nics, seconds):
    network = Islands(4, FAST, SLOW, nics=nics)
    assert exchange(network, 8, [(r, r + 4) for r in range(4)]) == seconds
    assert exchange(network, 8, [(r, (r + 1) % 4) for r in range(4)]) == pytest.approx(1e-18)


def test_the_ring_hardly_feels_an_oversubscribed_tree_and_recursive_doubling_does():
    from hpdl_lab.collectives import recursive_doubling, ring

    full, thin = FatTree(8, 1), FatTree(8, 8)
    x = np.zeros(64 * 1024, "f4")
    slower = {
        module: sim.run(32, module.all_reduce, x, network=thin).seconds
        / sim.run(32, module.all_reduce, x, network=full).seconds
        for module in (ring, recursive_doubling)
    }
    assert slower[ring] == 1
    assert slower[recursive_doubling] > 3


def test_messages_that_are_ready_at_once_go_in_the_order_of_their_later_ends():
    """Two eager messages and one that waits, all to rank 3 at time 0: rank 0's, then 1's; rank 3's own is last."""
    ends = {}

    def body(comm):
        if comm.rank == 3:
            works = [comm.irecv(np.zeros(size, "u1"), source) for source, size in ((2, 9), (1, 1), (0, 1))]
            for work, source in zip(works, (2, 1, 0), strict=True):
                work.wait()
                ends[source] = work.end
        else:
            comm.send(np.zeros(9 if comm.rank == 2 else 1, "u1"), 3)

    sim.run(4, body, network=Switch(alpha=1.0, beta=0.0, eager_nbytes=1))
    assert ends == {0: 1.0, 1: 2.0, 2: 3.0}


def test_an_eager_message_travels_while_its_receiver_is_busy():
    def body(comm, nbytes):
        if comm.rank == 0:
            comm.send(np.zeros(nbytes, "u1"), 1)
            sent = comm.state.clock
            comm.barrier()
            return sent
        comm.compute(seconds=5.0)
        comm.recv(np.zeros(nbytes, "u1"), 0)
        received = comm.state.clock
        comm.barrier()
        return received

    network = Switch(alpha=1.0, beta=0.1, eager_nbytes=10)
    assert sim.run(2, body, 10, network=network) == [0.0, 5.0]  # it had arrived at 2
    assert sim.run(2, body, 20, network=network) == [8.0, 8.0]  # it waited for its receive: 5 + 1 + 2


def test_an_eager_message_carries_the_value_at_the_time_of_its_send():
    def body(comm):
        x = np.ones(1)
        if comm.rank == 0:
            comm.send(x, 1)
            x[0] = 7
            comm.barrier()
            return None
        comm.barrier()
        return comm.recv(x, 0)[0]

    assert sim.run(2, body, network=Switch(eager_nbytes=8))[1] == 1


def test_without_eager_sends_also_an_empty_message_waits_for_its_receive():
    from hpdl_lab.comm import Deadlock

    def head_to_head(comm):
        comm.send(np.zeros(0), 1 - comm.rank)
        comm.recv(np.zeros(0), 1 - comm.rank)

    with pytest.raises(Deadlock):
        sim.run(2, head_to_head)
    sim.run(2, head_to_head, network=Switch(eager_nbytes=1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Switch(alpha=-1.0), ("Switch", "0", "-1.0")),
        (lambda: FatTree(16, 3), ("16 hosts", "3")),
        (lambda: FatTree(0), ("hosts_per_leaf", "1", "0")),
        (lambda: Islands(8, nics=3), ("8 ranks", "3 adapters")),
        (lambda: Islands(2.5), ("1", "2.5")),
        (lambda: Switch.of("infiniband"), ("'infiniband'", "nvlink_3")),
        (lambda: Ring().routes(np.zeros(20000, int), np.full(20000, 8192), 16384), ("cables at a time",)),
    ],
)
def test_a_network_that_cannot_be_is_refused(make, message):
    with raises(ValueError, *message):
        make()


@pytest.mark.parametrize("preset", PRESETS.values(), ids=str)
def test_published_figures_say_where_they_are_from_and_when(preset):
    assert 0.1e-6 < preset.alpha < 100e-6 and 0.1 < preset.GBps < 1000
    assert preset.beta == pytest.approx(1e-9 / preset.GBps)
    for source in (preset.alpha_source, preset.GBps_source):
        assert 1999 <= int(source[-4:]) <= 2026


def test_a_network_can_be_made_of_published_figures():
    ethernet = Switch.of("ethernet_10", eager_nbytes=64)
    assert (ethernet.alpha, ethernet.beta, ethernet.eager_nbytes) == (10e-6, 0.8e-9, 64)
    islands = Islands(8, "nvlink_4", "infiniband_ndr", nics=8)
    assert islands == Islands.of("infiniband_ndr", nics=8)
    assert islands.alpha == PRESETS["infiniband_ndr"].alpha
    assert FatTree.of("omni_path_100", hosts_per_leaf=8).beta == 1e-9 / 12.5


def test_a_network_is_described_with_its_shared_links():
    text = describe(FatTree(4, 2), 8)
    assert "FatTree(hosts_per_leaf=4, oversubscription=2" in text
    assert "rank - leaf: 16 links of 12.5 GB/s\n" in text
    assert "leaf - spine: 4 links of 12.5 GB/s, shared by up to 2 messages" in text
    assert "rank 0 to rank 7: 2.22 us + n / 12.5 GB/s" in text
    assert "shared" not in describe(Switch(), 8)
    assert "adapter - switch: 2 links of 50 GB/s, shared by up to 8 messages" in describe(Islands(8), 16)


def test_a_network_has_a_title_of_a_few_words():
    assert title(Switch()) == "Switch"
    assert title(Islands(4, nics=2)) == "Islands, size 4, nics 2"
    assert title(FatTree(16, 4)) == "FatTree, hosts per leaf 16, oversubscription 4"


def test_shared_links_are_those_that_several_messages_need():
    assert shared_links(Switch(), 4).tolist() == [1] * 8
    assert shared_links(Switch(), 1).tolist() == [0, 0]
    tree = shared_links(FatTree(2, 2), 4)
    assert tree[:8].tolist() == [1] * 8 and tree[8:].tolist() == [2] * 4
