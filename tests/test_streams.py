"""Streams on simulated ranks: order by events, in virtual time, and a host that does not wait."""

import pytest
import torch

from hpdl_lab.comm import sim
from hpdl_lab.comm.network import Switch
from hpdl_lab.kernels import streams
from hpdl_lab.kernels.streams import Stream, all_reduce_on_stream

SECONDS = 0.02


def test_a_step_is_launched_in_no_time_and_takes_both_kernels_and_the_sum():
    found = sim.run(4, streams.step, torch.ones(10), all_reduce_on_stream, SECONDS, network=Switch(alpha=1e-3, beta=0))
    assert all((left.x == 2.5).all() and left.launched == 0 for left in found)
    mine = {e.op: e for e in found.events if e.rank == 0 and e.op in streams.SHOWN}
    assert mine["produce"].t1_ns <= mine["all_reduce"].t0_ns and mine["all_reduce"].t1_ns <= mine["consume"].t0_ns
    assert mine["other work"].t1_ns - mine["launch"].t0_ns == pytest.approx(SECONDS * 1e9)
    assert {e.lane for e in mine.values()} == {"", "compute", "comm", "other"}


def test_an_event_is_a_place_in_a_stream():
    def told(comm):
        stream, seen = Stream(comm, "compute"), []

        def spend(comm, word):
            comm.compute(1.0)
            seen.append(word)

        empty = stream.record_event()
        stream.launch(spend, "before")
        event = stream.record_event()
        stream.launch(spend, "behind")
        early = empty.query(), event.query()
        event.synchronize()
        at_event = list(seen)
        stream.synchronize()
        return early, at_event, seen

    assert sim.run(1, told)[0] == ((True, False), ["before"], ["before", "behind"])


def test_what_fails_on_a_stream_is_raised_where_the_host_waits():
    def fails(comm):
        raise KeyError("lost")

    def launched(comm):
        stream = Stream(comm, "compute")
        stream.launch(fails)
        with pytest.raises(KeyError, match="lost"):
            stream.synchronize()

    sim.run(1, launched)
