"""Graphs of tasks; schedules of messages against simulated ranks: the same clocks, bit by bit."""

import subprocess
import sys
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from hpdl_lab.collectives import steps
from hpdl_lab.collectives.steps import Round
from hpdl_lab.collectives.table import ALGORITHMS, find_algorithm
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import FatTree, Islands, Ring, Switch
from hpdl_lab.predict import messages
from hpdl_lab.predict.graph import Need, TaskGraph
from hpdl_lab.predict.messages import predict_rounds
from tests.wording import raises

NETWORKS = {
    "switch": Switch(3e-6, 2e-9),
    "eager switch": Switch(3e-6, 2e-9, eager_nbytes=100),
    "ring": Ring(3e-6, 2e-9),
    "eager ring": Ring(3e-6, 2e-9, eager_nbytes=200),
    "fat tree": FatTree(4, 2, 3e-6, 2e-9),
    "eager fat tree": FatTree(4, 4, 3e-6, 2e-9, eager_nbytes=64),
    "islands": Islands(4, "nvlink_4", "ethernet_10"),
    "eager islands": Islands(2, "nvlink_4", "ethernet_10", eager_nbytes=333),
    "islands, three adapters": Islands(3, "pcie_4", "roce_100", nics=3),
}


def simulated(rounds, p, n, network):
    """(p,) clocks of coroutines that do the same schedule, which is a list."""

    def body(comm):
        steps.execute(comm, np.zeros(n), rounds)
        return comm.state.clock

    return np.array(sim.run(p, body, network=network, trace=False))


def random_rounds(seed):
    """(p, rounds): anybody sends any number of elements to anybody, any number of times."""
    rng = np.random.default_rng(seed)
    p = int(rng.integers(2, 13))
    rounds = []
    for _ in range(rng.integers(1, 7)):
        count = rng.integers(0, 2 * p)
        source = rng.integers(0, p, count)
        dest = (source + rng.integers(1, p, count)) % p
        first = rng.integers(0, 50, count)
        rounds.append(Round(source, dest, first, first + rng.integers(0, 50, count), False))
    return p, rounds


# -- graphs of tasks ---------------------------------------------------------------------------------------------------


def test_a_row_does_its_tasks_in_order_and_waits_for_what_they_need():
    graph = TaskGraph()
    a, b = graph.add(Fraction(1), row="a"), graph.add(Fraction(2), row="b")
    late = graph.add(Fraction(1), [Need(b, far=True)], row="a")
    last = graph.add(Fraction(1), row="a")
    begins, ends = graph.times(delay=Fraction(1, 2))
    assert [begins[task] for task in (a, b, late, last)] == [0, 0, Fraction(5, 2), Fraction(7, 2)]
    assert graph.times([3, 1, 1, 1])[1] == [3, 1, 4, 5], "another cost of the same tasks"


def test_a_message_holds_its_ports_until_it_has_arrived_and_the_links_between_for_its_bytes():
    graph = TaskGraph()
    first = graph.add(10, links=(0, 8, 1), latency=2)
    same_cable, same_port = graph.add(10, links=(2, 8, 3), latency=2), graph.add(10, links=(0, 9, 4), latency=2)
    begins, ends = graph.times()
    assert (begins[first], begins[same_cable], begins[same_port]) == (0, 10, 12) and ends[same_cable] == 22


def test_messages_that_are_ready_at_once_go_in_their_turns():
    graph = TaskGraph()
    begin = graph.add()
    last, first = (graph.add(5, [Need(begin, priority=priority)], links=(0, 1)) for priority in (7, 3))
    assert graph.times()[0][first] == 0 and graph.times()[0][last] == 5


def test_rows_may_slow_each_other_down():
    graph = TaskGraph()
    compute = graph.add(6.0, row="compute")
    message = graph.add(2.0, row="messages")
    assert graph.times(speeds={"compute": 0.5, "messages": 0.5})[1] == [8.0, 4.0]
    assert graph.times(speeds={"messages": 0.0})[1] == [6.0, 8.0]
    assert graph.times()[1] == [6.0, 2.0] and (compute, message) == (0, 1)


def test_tasks_that_wait_for_each_other_are_counted():
    graph = TaskGraph()
    graph.add(1, row="a")
    graph.add(1, [Need(2)], row="a")
    graph.add(1, [Need(1)], row="b")
    assert graph.order == [0]
    with raises(ValueError, "2 of 3 tasks"):
        graph.times()


# -- schedules on networks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_random_schedules_take_what_simulated_ranks_take(network):
    for seed in range(40):
        p, rounds = random_rounds(seed)
        expected = simulated(rounds, p, 100, network)
        got = predict_rounds(iter(rounds), p, 8, network)
        assert got.clocks.tolist() == expected.tolist(), f"seed {seed}"
        assert got.seconds == expected.max()


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.collective} {a.name}")
def test_every_collective_takes_what_simulated_ranks_take(algorithm, network):
    for p, n in ((1, 8), (3, 0), (5, 1000), (8, 64), (13, 130)):
        try:
            rounds = list(algorithm.steps(p, n))
        except ValueError:  # an all_to_all of chunks that are not equal
            continue
        assert (
            predict_rounds(rounds, p, 8, network).clocks.tolist() == simulated(rounds, p, 13 * n, network).tolist()
        ), (
            p,
            n,
        )


@pytest.mark.parametrize("name", ["ring", "tree", "halving_doubling", "double_tree", "parameter_server"])
def test_the_readable_function_takes_as_long_as_its_schedule(name):
    algorithm = find_algorithm(name)
    for p, network in product((2, 5, 8), (NETWORKS["switch"], NETWORKS["fat tree"], NETWORKS["islands"])):
        run = sim.run(p, algorithm.function, np.zeros(240), network=network)
        assert run.seconds == predict_rounds(algorithm.steps(p, 240), p, 8, network).seconds


@pytest.mark.parametrize("network", [FatTree(8, 4), Islands(8), Ring()], ids=str)
@pytest.mark.parametrize("name", ["recursive_doubling", "halving_doubling", "hierarchical", "grid"])
def test_64_ranks_that_contend_take_what_simulated_ranks_take(name, network):
    rounds = list(find_algorithm(name).steps(64, 640))
    assert predict_rounds(rounds, 64, 8, network).clocks.tolist() == simulated(rounds, 64, 640, network).tolist()


def one(source, dest, count):
    """A round of one message."""
    return Round(*(np.array([v]) for v in (source, dest, 0, count)), False)


def test_messages_of_later_rounds_may_come_first():
    """Ranks 0 and 1 share a cable to ranks 3 and 4. Rank 1 is busy at first, so that its message is the later one."""
    network = FatTree(3, 3, alpha=1.0, beta=1.0, hop=0.0)
    busy, late, early = one(1, 2, 50), one(1, 3, 10), one(0, 4, 10)
    for rounds in ([busy, early, late], [busy, late, early]):
        clocks = predict_rounds(rounds, 6, 1, network).clocks.tolist()
        assert clocks == [11, 62, 51, 62, 11, 0] == simulated_bytes(rounds, 6, network)


def simulated_bytes(rounds, p, network):
    def body(comm):
        steps.execute(comm, np.zeros(100, "u1"), rounds)
        return comm.state.clock

    return list(sim.run(p, body, network=network))


def test_only_rounds_that_some_rank_has_not_passed_are_held(monkeypatch):
    """Rank 8, which has nothing to do, may have a message in the next round, before all others: so all are held."""
    monkeypatch.setattr(messages, "MOST_HELD", 200)
    assert predict_rounds(find_algorithm("ring").steps(8, 64), 8, 8, NETWORKS["ring"]).seconds > 0  # 14 rounds of 8
    ahead = [one(0, 1, 9)] * 199
    assert predict_rounds(iter(ahead), 9, 8, NETWORKS["ring"]).seconds > 0
    with raises(ValueError, "201 messages", "200"):
        predict_rounds(iter(ahead * 2), 9, 8, NETWORKS["ring"])


@pytest.mark.parametrize(("source", "dest"), [(0, 4), (-1, 0), (2, 2)])
def test_ranks_that_are_not_there_are_refused(source, dest):
    bad = Round(np.array([source]), np.array([dest]), np.array([0]), np.array([1]), False)
    with raises(ValueError, "4 ranks"):
        predict_rounds([bad], 4, 8)


def test_messages_that_take_no_time_and_share_a_link_are_refused():
    free = Switch(alpha=0.0, beta=0.0)
    with pytest.raises(ValueError, match="take no time"):
        predict_rounds(find_algorithm("parameter_server").steps(4, 8), 4, 8, free)
    assert predict_rounds(find_algorithm("ring").steps(4, 8), 4, 8, free).seconds == 0


@pytest.mark.parametrize("network", [NETWORKS["switch"], NETWORKS["eager ring"], NETWORKS["fat tree"]], ids=str)
def test_a_schedule_may_use_its_arrays_again(network):
    def reusing(rounds):
        arrays = [np.zeros(24, np.int64) for _ in range(4)]
        for round_ in rounds:
            views = [array[: len(values)] for array, values in zip(arrays, round_, strict=False)]
            for view, values in zip(views, round_, strict=False):
                view[:] = values
            yield Round(*views, False)

    for seed in range(20):
        p, rounds = random_rounds(seed)
        once = predict_rounds(rounds, p, 8, network).clocks.tolist()
        assert predict_rounds(reusing(rounds), p, 8, network).clocks.tolist() == once


def test_no_ranks_are_refused():
    with raises(ValueError, "1 rank", "0"):
        predict_rounds([], 0, 8)


def test_a_schedule_without_messages_takes_no_time():
    got = predict_rounds([], 3, 8)
    assert got.seconds == 0 and got.clocks.tolist() == [0, 0, 0]


BIG = """
import re, time
from itertools import islice
from hpdl_lab.predict.messages import predict_rounds
from hpdl_lab.collectives.table import find_algorithm
from hpdl_lab.comm.network import FatTree, Islands, Switch
p = 16384
for name, network in (
    ("ring", Switch()), ("ring", FatTree(32, 4)), ("halving_doubling", Islands(8)), ("tree", FatTree(32, 4)),
    ("double_tree", Switch()), ("hierarchical", Islands(8)), ("parameter_server", Switch()),
    ("pairwise", FatTree(16, 4)),
):
    begin = time.process_time()
    done = {"ring": 32766, "pairwise": 16383}.get(name, 200) / 200  # two hundred of their rounds, which are alike
    steps = find_algorithm(name, "all_to_all" if name == "pairwise" else "all_reduce").steps(p, 16 * p)
    seconds = predict_rounds(islice(steps, 200), p, 4, network).seconds * done
    print(name, (time.process_time() - begin) * done, seconds)
print("peak", int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024, 0)
"""


@pytest.mark.slow
def test_16384_ranks_take_minutes_at_most_and_little_memory():
    """A minute on a quiet machine; the bound is the next order of magnitude."""
    done = subprocess.run([sys.executable, "-c", BIG], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    *timed, (_, peak, _) = (line.split() for line in done.stdout.splitlines())
    assert len(timed) == 8
    for name, seconds, _ in timed:
        assert float(seconds) < 600, f"{name} took {seconds} s"
    ring = Switch()
    assert float(timed[0][2]) == pytest.approx(2 * 16383 * (ring.alpha + 64 * ring.beta), rel=1e-9)
    assert float(peak) < 1e9
