"""The status table: what a rank publishes, everybody reads; a dead rank is seen to be dead."""

import os
import subprocess
import sys

import pytest

from hpdl_lab.comm.errors import Wait
from hpdl_lab.comm.status.table import MAX_PEERS, MAX_TEXT, VERSION, StatusTable
from hpdl_lab.trace import now_ns
from tests.wording import raises


@pytest.fixture
def table(tmp_path):
    table = StatusTable.create(tmp_path / "table", 4)
    yield table
    table.close()


def sleeper():
    """A process that does nothing, for a minute."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def publish_as(table, process, rank, state, **fields):
    """Publish from here what another process would publish."""
    pid, os.getpid = os.getpid, lambda: process.pid
    try:
        table.publish(rank, state, **fields)
    finally:
        os.getpid = pid


def test_all_fields_come_back(table):
    table.publish(2, "waiting", 7, "recv", (1, 3), 4000, 10, 20, "cell:7", {"count": 1000, "dtype": "float32"})
    slot = table.slot(2)
    facts = {"count": 1000, "dtype": "float32"}
    assert slot == (os.getpid(), 7, "waiting", "recv", (1, 3), 4000, 10, 20, "cell:7", facts)
    table.end_wait(2, now=lambda: 30)
    assert table.slot(2) == slot._replace(until_ns=30)


def test_facts_reach_the_table_in_the_numbers_of_the_run(table):
    counts = (("broadcast", "cell:7", 2),)
    facts = {"call": "broadcast", "count": 9, "root": 0, "nth": 2, "counts": counts, "unreceived": (3, 0)}
    table.publish(2, "waiting", op="recv", peers=(1,), facts=facts)
    wait = table.waits([1, 2, 3])[0]
    assert (wait.rank, wait.peers, wait.unreceived) == (1, (0,), (2,))
    assert (wait.call, wait.count, wait.root, wait.nth, wait.counts) == ("broadcast", 9, 0, 2, counts)


def test_facts_that_are_too_long_are_cut_or_left_out(table):
    counts = tuple((f"op {i}", "a" * 60 + ".py:7", i) for i in range(30))
    table.publish(0, "failed", facts={"message": "x" * 999, "error": "KeyError", "counts": counts, "count": -1})
    assert table.slot(0).facts == {"message": "x" * MAX_TEXT, "error": "KeyError"}


def test_a_second_process_reads_the_same_file(table):
    table.publish(0, "waiting", op="recv", peers=(1,), nbytes=4000, line="cell:7")
    waits = StatusTable.open(table.path).waits()
    assert len(waits) == 1
    assert str(waits[0]).startswith("rank 0 waits in recv of 4,000 bytes from rank 1 since ")


def test_seconds_count_until_the_rank_gives_up(table):
    since = now_ns() - 3_000_000_000
    table.publish(0, "waiting", op="recv", peers=(1,), since_ns=since)
    assert 3.0 <= table.waits()[0].seconds <= (now_ns() - since) / 1e9
    table.end_wait(0, now=lambda: since + 2_000_000_000)
    assert table.waits()[0].seconds == 2.0


def test_ranks_are_numbered_as_in_the_run(table):
    table.publish(3, "waiting", op="recv", peers=(1,))
    table.publish(1, "running")
    waits = table.waits([3, 1])
    assert [(w.rank, w.state, w.peers) for w in waits] == [(0, "waiting", (1,)), (1, "running", ())]


def test_ranks_that_never_published_are_left_out(table):
    assert table.waits() == []


def test_a_publishing_that_was_interrupted_is_mended_by_the_next(table):
    table.publish(1, "running")
    VERSION.pack_into(table._memory, table._at(1), 3)  # where an interrupt between its lines leaves it
    table.publish(1, "finished")
    assert VERSION.unpack_from(table._memory, table._at(1))[0] % 2 == 0


def test_long_texts_and_many_peers_are_cut(table):
    table.publish(0, "waiting", op="x" * 99, peers=range(99), line="y" * 200 + ".py:7")
    slot = table.slot(0)
    assert (len(slot.op), len(slot.peers), len(slot.line)) == (24, MAX_PEERS, 96)
    assert slot.line.endswith(".py:7")


@pytest.mark.parametrize("reap", [False, True])  # a child that has died stays in the table until its parent looks
def test_a_killed_process_is_dead(table, reap, eventually):
    process = sleeper()
    publish_as(table, process, 1, "waiting", op="recv", peers=(0,), line="cell:3")
    assert not table.is_dead(1)
    process.kill()
    if reap:
        process.wait()
    eventually(lambda: table.is_dead(1))
    assert table.died(1)
    assert table.waits() == [Wait(1, "dead", line="cell:3")]
    process.wait()


def test_a_process_that_ended_before_anybody_looked_is_dead(table):
    process = sleeper()
    publish_as(table, process, 1, "running")
    process.kill()
    process.wait()
    assert table.died(1)


def test_a_rank_that_finished_has_not_died(table):
    process = sleeper()
    publish_as(table, process, 1, "finished")
    process.kill()
    process.wait()
    assert table.is_dead(1) and not table.died(1)
    assert table.waits() == [Wait(1, "finished")]


def test_the_file_is_private(table):
    assert os.stat(table.path).st_mode & 0o777 == 0o600


def test_no_such_rank(table):
    with raises(ValueError, "rank 4", "4"):
        table.publish(4, "idle")


def test_not_a_board(tmp_path):
    (tmp_path / "other").write_bytes(b"something else entirely")
    with raises(ValueError, "other"):
        StatusTable(tmp_path / "other")


def test_no_ranks(tmp_path):
    with raises(ValueError, "1 rank", "0"):
        StatusTable.create(tmp_path / "table", 0)
