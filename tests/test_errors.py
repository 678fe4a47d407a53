"""How stuck ranks are described."""

import pickle

import pytest

from hpdl_lab.comm.errors import CommTimeout, Wait, likely_reason, name_ranks, wait_cycle


def waiting(rank, op, *peers):
    return Wait(rank, "waiting", op, peers, 8, 1.5, f"cell:{rank}")


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


@pytest.mark.parametrize(
    ("waits", "reason"),
    [
        ([waiting(0, "recv", 1), waiting(1, "recv", 0)], "ranks 0, 1 all receive first"),
        ([waiting(0, "send", 1), waiting(1, "send", 0)], "ranks 0, 1 all send first"),
        ([waiting(0, "recv", 1), Wait(1, "failed", line="cell:4")], "rank 1 raised an error and never arrived"),
        ([waiting(0, "recv", 1), Wait(1, "dead")], "rank 1 died and never arrived"),
        ([waiting(0, "recv", 1), Wait(1, "finished")], "rank 0 waits in recv for rank 1, which has already finished"),
        ([waiting(0, "recv", 1), waiting(1, "send", 0)], "each waits for the next"),
    ],
)
def test_the_likely_reason(waits, reason):
    assert likely_reason(waits).startswith(reason)


def test_an_error_keeps_its_table_through_pickle():
    error = pickle.loads(
        pickle.dumps(CommTimeout("no answer within 10 s", [waiting(0, "recv", 1), Wait(1, "running")]))
    )
    assert str(error).splitlines() == [
        "no answer within 10 s",
        "  rank 0 waits in recv of 8 bytes from rank 1 since 1.5 s  (cell:0)",
        "  rank 1 running",
    ]
