"""The event log: its keys, its lines, its limit, its export."""

import json
import sys
import threading
from collections import namedtuple

import numpy as np
import torch
import torch.distributed as dist

from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.trace import (
    Event,
    Trace,
    bytes_sent,
    line_of,
    load_chrome,
    number_text,
    save_chrome,
    seconds_text,
    source_line,
    to_chrome,
)
from tests.wording import raises


def test_events_are_keyed_by_rank_and_step_and_name_the_line():
    results = sim.run(3, lambda comm: ring.all_reduce(comm, np.zeros(9)))
    keys = [(e.rank, e.step) for e in results.events]
    assert len(set(keys)) == len(keys) == 3 * 2 * 4
    assert {e.line.split(":")[0] for e in results.events} == {"test_trace.py"}
    assert all(e.t1_ns >= e.t0_ns for e in results.events)


def test_spans_and_bytes():
    def work(comm):
        with comm.trace.span("forward"):
            comm.compute(seconds=1e-3)
        comm.all_reduce(np.zeros(2))

    results = sim.run(2, work)
    forward = [e for e in results.events if e.op == "forward"]
    assert [e.t1_ns - e.t0_ns for e in forward] == [1_000_000, 1_000_000]
    assert bytes_sent(results.events) == {0: 16, 1: 16}


def test_the_log_is_bounded_and_says_what_it_dropped():
    trace = Trace(0, limit=2)
    for _ in range(5):
        trace.add(trace.step(), "send", 0, 1)
    assert (len(trace.events), trace.dropped) == (2, 3)


def test_packed_events_are_the_events_that_were_added():
    trace = Trace(3)
    trace.add(0, "send", 5, 2**60, 1023, 2**40, "cell:7")
    trace.add(trace.step(), "compute", -1, 0)
    assert trace.events == [
        Event(3, 0, "send", 5, 2**60, 1023, 2**40, "cell:7"),
        Event(3, 0, "compute", -1, 0, -1, 0, ""),
    ]
    assert len(trace.log) == 2


def test_what_runs_beside_a_rank_is_in_the_same_log_in_its_own_lane():
    trace = Trace(1, clock=lambda: 7)
    beside = trace.in_lane("background", clock=lambda: 9)
    trace.add(trace.step(), "compute", 0, trace.clock())
    beside.add(beside.step(), "send", 0, beside.clock(), 2, 8, "cell:1")
    trace.add(trace.step(), "all_reduce", 1, 2, lane="background")
    assert trace.events == beside.events
    assert [(e.step, e.op, e.t1_ns, e.lane) for e in trace.events] == [
        (0, "compute", 7, ""),
        (10**9, "send", 9, "background"),
        (1, "all_reduce", 2, "background"),
    ]


def test_two_threads_share_a_log():
    trace = Trace(0)

    def fill(trace, op):
        for i in range(2000):
            trace.add(trace.step(), op, i, i, line=f"{op}:{i}")

    beside = threading.Thread(target=fill, args=(trace.in_lane("background"), "send"))
    beside.start()
    fill(trace, "compute")
    beside.join()
    assert sorted(e.step for e in trace.events) == [*range(2000), *range(10**9, 10**9 + 2000)]
    assert all((e.line, e.lane) == (f"{e.op}:{e.t0_ns}", "background" * (e.op == "send")) for e in trace.events)


def test_chrome_json_can_be_read_back(tmp_path):
    results = sim.run(2, ring.all_reduce, np.zeros(8))
    path = tmp_path / "trace.json"
    save_chrome(results.events, path)
    rows = json.loads(path.read_text())["traceEvents"]
    slices = [r for r in rows if r["ph"] == "X"]
    assert len(slices) == len(results.events)
    assert {r["pid"] for r in slices} == {0, 1}
    assert all(r["dur"] >= 0 and r["ts"] >= 0 and r["args"]["nbytes"] == 32 for r in slices)
    assert [r["args"]["name"] for r in rows if r["ph"] == "M"] == ["rank 0", "rank 1"]


def test_lanes_are_threads_in_the_export():
    events = [
        Event(1, 0, "compute", 0, 10),
        Event(1, 10**9, "send", 0, 5, 0, 8, lane="background"),
        Event(0, 0, "x", 0, 1),
    ]
    rows = to_chrome(events)["traceEvents"]
    assert [(r["pid"], r["tid"]) for r in rows if r["ph"] == "X"] == [(1, 0), (1, 1), (0, 0)]
    names = [(r["name"], r["pid"], r["tid"], r["args"]["name"]) for r in rows if r["ph"] == "M"]
    assert names[2:] == [("thread_name", 1, 1, "background")] and [n[:2] for n in names[:2]] == [
        ("process_name", 0),
        ("process_name", 1),
    ]


def test_a_collective_keeps_its_bytes_in_the_export():
    row = to_chrome([Event(0, 0, "all_reduce", 0, 10, nbytes=4096)])["traceEvents"][-1]
    assert row["args"] == {"step": 0, "line": "", "nbytes": 4096}


def test_an_empty_trace_exports():
    assert to_chrome([])["traceEvents"] == []


def test_cells_have_no_file_name_worth_showing():
    assert source_line("/tmp/ipykernel_42/1234.py", 7) == "cell:7"
    assert source_line("/home/ann/ring.py", 7) == "ring.py:7"


def test_a_line_is_not_one_that_a_namedtuple_has_written_for_itself():
    made = namedtuple("Made", "at", defaults=[0])
    seen = []
    sys.setprofile(lambda frame, event, arg: seen.append(frame) if frame.f_code.co_filename == "<string>" else None)
    made()
    sys.setprofile(None)
    assert seen[0].f_code.co_filename == "<string>"
    assert line_of(seen[0], 1) == ""
    assert line_of(seen[0].f_back, 7) == "test_trace.py:7"


def test_a_line_is_the_attendees_or_none():
    results = sim.run(2, ring.all_reduce, np.zeros(4))  # no line of this file runs on a rank
    assert {e.line for e in results.events} == {""}


def test_times_and_numbers_as_people_read_them():
    assert [seconds_text(s) for s in (0, 3e-9, 1.5e-6, 0.0021, 0.9999, 12.34, 5000)] == [
        "0 s", "3 ns", "1.5 µs", "2.1 ms", "1 s", "12.3 s", "5,000 s"
    ]  # fmt: skip
    assert [number_text(v) for v in (0, 1e-5, 0.1234, 12.34, 999.4, 12300, float("inf"))] == [
        "0", "1e-5", "0.123", "12.3", "999", "12,300", "inf"
    ]  # fmt: skip


def test_a_trace_is_read_as_it_was_saved(tmp_path):
    def work(comm):
        with comm.trace.span("forward"):
            comm.compute(seconds=1e-3)
        ring.all_reduce(comm, np.zeros(9))
        comm.background(ring.all_reduce, np.zeros(9)).wait()

    events = sim.run(3, work).events
    save_chrome(events, tmp_path / "run.json")
    read = load_chrome(tmp_path / "run.json")
    assert {e.lane for e in read} == {"", "background"}
    assert sorted(read) == sorted(
        e._replace(t0_ns=e.t0_ns - events[0].t0_ns, t1_ns=e.t1_ns - events[0].t0_ns) for e in events
    )


def test_a_trace_of_torch_profiler_has_the_phases_of_training_and_the_communication(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.profiler.profile() as profiler:
            for _ in range(2):
                loss = model(torch.ones(32, 64)).square().mean()
                loss.backward()
                dist.all_reduce(loss.detach())
                optimizer.step()
        profiler.export_chrome_trace(str(tmp_path / "rank0.json.gz"))
    finally:
        dist.destroy_process_group()
    events = load_chrome(tmp_path / "rank0.json.gz")
    phases = [(e.op, e.lane) for e in events if not e.lane]
    assert phases == [("forward", ""), ("backward", ""), ("update", "")] * 2
    assert [(e.rank, e.op) for e in events if e.lane] == [(0, "all_reduce")] * 2
    for before, after in zip(events, events[1:], strict=False):
        assert before.t0_ns < before.t1_ns and before.t0_ns <= after.t0_ns


def test_what_is_no_trace_is_one_sentence(tmp_path):
    for text in ("", "[]", "{}", '{"traceEvents": [{}]}'):
        (tmp_path / "a.json").write_text(text)
        with raises(ValueError, "a.json", "Chrome trace"):
            load_chrome(tmp_path / "a.json")
