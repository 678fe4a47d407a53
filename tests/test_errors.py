"""How stuck ranks are described: the table, and the reason that each rule gives for waits made by hand."""

import pickle
from dataclasses import replace

import pytest

from hpdl_lab.comm.errors import CommTimeout, Wait, likely_reason, name_ranks, wait_cycle
from hpdl_lab.comm.status import report
from hpdl_lab.comm.status.report import MOST_ROWS, describe_waits

RULES = {rule.__name__.lstrip("_"): rule for rule in report.RULES}


def waiting(rank, op, *peers, **facts):
    return Wait(rank, "waiting", op, peers, 8, 1.5, facts.pop("line", f"cell:{rank}"), **facts)


def finished(rank, *counts, **facts):
    return Wait(rank, "finished", counts=counts, **facts)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0, 1"), ([2, 0, 1], "ranks 0-2"), ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7, 8")],
)
def test_ranks_are_named_as_people_do(ranks, text):
    assert name_ranks(ranks) == text


def test_a_cycle_is_found_behind_a_tail():
    waits = [waiting(0, "recv", 1), waiting(1, "recv", 2), waiting(2, "recv", 1), Wait(3, "finished")]
    assert wait_cycle(waits) == (1, 2)
    assert wait_cycle([waiting(0, "recv", 1), Wait(1, "running")]) == ()


def called(rank, op, nth=1, state="waiting", **facts):
    """A rank that waits for all others in a collective."""
    peers = tuple(r for r in range(4) if r != rank) if state == "waiting" else ()
    return Wait(rank, state, op, peers, nth=nth, line=f"cell:{rank}", **facts)


LOOP = (("recv", "cell:5", 4),)
RAISED = Wait(2, "failed", line="cell:4", error="ValueError")

# (the rule that speaks, what the ranks were doing, the sentence or its beginning)
CASES = [
    (
        "collectives_differ",
        [
            called(0, "broadcast", root=0),
            called(1, "broadcast", root=1),
            *(called(r, "broadcast", root=0) for r in (2, 3)),
        ],
        "rank 1 calls broadcast with root 1, ranks 0, 2, 3 with root 0",
    ),
    (
        "collectives_differ",
        [*(called(r, "barrier") for r in (0, 1)), called(2, "all_reduce", count=4), called(3, "barrier")],
        "rank 2 calls all_reduce where ranks 0, 1, 3 call barrier",
    ),
    (
        "collectives_differ",
        [called(0, "all_reduce", count=1000), called(1, "all_reduce", state="failed", count=1001, error="Mismatch")],
        "counts differ: rank 0 calls all_reduce of 1,000 elements, rank 1 of 1,001 elements",
    ),
    (
        "collectives_differ",
        [
            called(0, "reduce", dtype="float32"),
            called(1, "reduce", dtype="float32"),
            called(2, "reduce", dtype="int64"),
        ],
        "dtypes differ: ranks 0, 1 call reduce of float32, rank 2 of int64",
    ),
    (
        "collectives_differ",
        [called(0, "barrier"), called(1, "all_reduce"), called(2, "split")],
        "rank 0 calls barrier, rank 1 calls all_reduce, rank 2 calls split",
    ),
    (
        "said_why",
        [waiting(0, "send", 1), Wait(1, "failed", error="Mismatch", message="counts differ: rank 0 sends 1,000")],
        "counts differ: rank 0 sends 1,000",
    ),
    ("raised", [waiting(0, "recv", 2), RAISED], "rank 2 raised ValueError at line 4 and never arrived"),
    ("raised", [finished(0), RAISED], "rank 2 raised ValueError at line 4"),
    ("raised", [waiting(0, "recv", 1), Wait(1, "failed")], "rank 1 raised an error and never arrived"),
    ("died", [waiting(0, "recv", 1), Wait(1, "dead")], "rank 1 died and never arrived"),
    (
        "opposite_communicators",
        [waiting(0, "barrier", 1, comm="split 1", nth=1), waiting(1, "barrier", 0, comm="split 2", nth=1)],
        "two communicators in opposite order: rank 0 waits in barrier on split 1, rank 1 waits in barrier on split 2",
    ),
    (
        "all_exchange",
        [waiting(r, "recv", (r + 1) % 4, call="sendrecv") for r in range(4)],
        "ranks 0-3 all exchange with one who exchanges with another: 0 with 1, 1 with 2, 2 with 3, 3 with 0",
    ),
    ("all_receive_first", [waiting(0, "recv", 1), waiting(1, "recv", 0)], "ranks 0 and 1 both receive first and"),
    ("all_receive_first", [waiting(r, "recv", (r + 1) % 3) for r in range(3)], "ranks 0-2 all receive first and"),
    ("all_send_first", [waiting(0, "send", 1), waiting(1, "send", 0)], "ranks 0 and 1 both send first and"),
    (
        "left_early",
        [waiting(0, "recv", 3, line="cell:5", counts=LOOP), finished(3, ("recv", "cell:5", 3), ("send", "cell:5", 3))],
        "rank 3 left the loop one step early: it came to line 5 three times, rank 0 four times",
    ),
    (
        "left_early",
        [
            waiting(0, "barrier", 1, line="a.py:5", counts=(("barrier", "a.py:5", 12),)),
            finished(1, ("barrier", "a.py:5", 2)),
        ],
        "rank 1 left the loop 10 steps early: it came to a.py:5 two times, rank 0 12 times",
    ),
    (
        "wrong_source",
        [waiting(0, "recv", 1, unreceived=(2,)), finished(1), waiting(2, "send", 0)],
        "rank 0 receives from rank 1, but rank 2 sent to it: is the source right?",
    ),
    (
        "never_called",
        [
            *(called(r, "all_reduce") for r in range(3)),
            finished(3, ("barrier", "cell:7", 1), line="cell:7", op="barrier"),
        ],
        "rank 3 never called all_reduce: it finished (cell:7)",
    ),
    (
        "never_called",
        [called(0, "all_reduce"), finished(1), finished(2)],
        "ranks 1, 2 never called all_reduce: they finished",
    ),
    ("never_called", [waiting(0, "recv", 1), finished(1)], "rank 1 never sent to rank 0: it finished"),
    (
        "never_called",
        [waiting(0, "send", 1), finished(1, ("recv", "cell:9", 1), line="cell:9")],
        "rank 1 never received from rank 0 what it waits for at line 0: it finished (cell:9)",
    ),
    (
        "never_called",
        [called(0, "barrier", nth=2), finished(1, ("barrier", "cell:9", 1))],
        "rank 1 never called barrier once more: it finished",
    ),
    (
        "waits_in_a_circle",
        [waiting(0, "recv", 1), waiting(1, "send", 0)],
        "each waits for the next: rank 0 in recv for",
    ),
    (
        "straggler",
        [*(waiting(r, "barrier", 2, nth=1) for r in (0, 1)), Wait(2, "running", line="cell:5")],
        "rank 2 is still computing (cell:5): not a deadlock, a deadline",
    ),
    (
        "not_begun",
        [waiting(0, "recv", 1), waiting(1, "start", 0)],
        "rank 1 has not begun yet: not a deadlock, a deadline",
    ),
    ("not_heard_of", [waiting(0, "recv", 1), Wait(1, "silent")], "rank 1 on another host has sent no status"),
    ("out_of_step", [waiting(0, "recv", 1)], "the ranks do not call the same operations in the same order"),
]


@pytest.mark.parametrize(("rule", "waits", "reason"), CASES)
def test_the_likely_reason(rule, waits, reason):
    assert likely_reason(waits).startswith(reason)
    assert RULES[rule](waits) == likely_reason(waits), "another rule spoke"


def test_every_rule_is_tried():
    assert {rule for rule, _, _ in CASES} == RULES.keys()


@pytest.mark.parametrize(
    "waits",
    [
        [],
        [finished(0), finished(1)],
        [Wait(0, "running"), Wait(1, "running")],
        [waiting(0, "start", 1), Wait(1, "idle")],
        [called(0, "barrier", comm="split 1 color 0"), called(1, "all_reduce", comm="split 1 color 1")][:1],
    ],
)
def test_no_reason_is_made_up(waits):
    assert not waits or likely_reason(waits) in ("", "the ranks do not call the same operations in the same order")


def test_parts_of_a_split_may_do_different_things():
    waits = [called(0, "barrier", comm="split 1 color 0"), called(1, "all_reduce", comm="split 1 color 1")]
    assert not report.collectives_differ(waits)


def test_the_table():
    waits = [
        waiting(0, "recv", 1, call="broadcast", root=1, count=1000, dtype="float32", comm="split 1"),
        waiting(1, "send", 0),
        Wait(2, "running"),
        finished(3, op="barrier", line="cell:9"),
        Wait(4, "failed", error="KeyError", line="cell:4"),
    ]
    assert describe_waits(waits) == [
        "  rank  state     in                                       with         bytes  elements       since  line",
        "  0     waiting   broadcast with root 1 on split 1 (recv)  from rank 1  8      1,000 float32  1.5 s  cell:0",
        "  1     waiting   send                                     to rank 0    8                     1.5 s  cell:1",
        "  2     running",
        "  3     finished  after barrier                                                                      cell:9",
        "  4     failed    KeyError                                                                           cell:4",
        "  cycle: 0 -> 1 -> 0",
    ]


def test_short_waits_are_told_in_a_unit_that_people_read():
    waits = [replace(waiting(0, "recv", 1), seconds=2.01e-6), replace(waiting(1, "recv", 0), seconds=0.0451)]
    assert [line.split("  ")[-2] for line in describe_waits(waits)[1:3]] == ["2.01 µs", "45.1 ms"]
    assert str(waits[0]) == "rank 0 waits in recv of 8 bytes from rank 1 since 2.01 µs  (cell:0)"


def test_the_table_of_many_ranks_shows_one_of_each_kind():
    n = 1000
    waits = [waiting(r, "recv", (r + 1) % n, line="cell:7") for r in range(n)]
    lines = describe_waits(waits)
    assert len(lines) < MOST_ROWS and f"and 999 more in the state of rank 0: ranks 1-{n - 1}" in lines[2]
    assert lines[-1] == "  cycle: 0 -> 1 -> 2 -> 3 -> 4 -> 5 -> ... -> 998 -> 999 -> 0"


def test_an_error_keeps_its_table_through_pickle():
    waits = [waiting(0, "recv", 1), Wait(1, "running")]
    error = pickle.loads(pickle.dumps(CommTimeout("no answer within 10 s", waits)))
    assert error.waits == tuple(waits)
    assert str(error).splitlines() == [
        "no answer within 10 s",
        "  rank  state    in    with         bytes  since  line",
        "  0     waiting  recv  from rank 1  8      1.5 s  cell:0",
        "  1     running",
        "  likely: rank 1 is still computing: not a deadlock, a deadline",
    ]
    assert error.reason == "rank 1 is still computing: not a deadlock, a deadline"


def test_the_reason_is_not_said_twice():
    waits = [waiting(0, "recv", 1), waiting(1, "recv", 0)]
    error = CommTimeout("deadlock: ranks 0 and 1 both receive first and no rank has sent", waits)
    assert "likely" not in str(error)
